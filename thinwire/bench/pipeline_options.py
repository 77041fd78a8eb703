"""The options of `thinwire bench pipeline`, read and checked; what it does is in pipeline.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from thinwire.errors import UsageError
from thinwire.installed import check_figures
from thinwire.planner.schedule import SINGLE_STAGE
from thinwire.quantities import parse_rate

WORK = "thinwire.bench.pipeline"
SHARES = "0.9,0.95,0.98,0.995"
VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Setup:
    """Model, data and training of one run; everything follows from it and the seed."""

    stages: int
    layers: int = 1  # of one stage
    width: int = 128
    length: int = 64
    rows: int = 4  # of a micro-batch
    microbatches: int = 8
    samples: int = 512
    held_out: int = 128
    epochs: int = 5
    pretrain: int = 300  # steps in one process, before
    rate: float = 5e-4  # learning rate of the fine-tuning; four times that before
    schedule: str = "1F1B"
    seed: int = 0
    vocabulary: int = VOCABULARY

    @property
    def batch(self) -> int:
        return self.rows * self.microbatches


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench pipeline`."""
    parser.add_argument("--hosts", type=int, default=4, help="stages, one a host (%(default)s)")
    parser.add_argument("--shares", default=SHARES, help="of the fp32 step on the exposed wire (%(default)s)")
    parser.add_argument("--rates", default="", help="of every host's link, instead of --shares; comma-separated")
    parser.add_argument("--schedule", choices=SINGLE_STAGE, default="1F1B", help="(%(default)s)")
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help='modes whose name contains one of these words; "ablations": all of ours',
    )
    parser.add_argument("--seeds", type=int, default=3, help="paired runs for the loss; 0: no training (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed, cold and warm each; 0: no timing (%(default)s)")
    for name, text in (
        ("epochs", "of fine-tuning"), ("samples", "fine-tuned on"), ("held-out", "samples"),
        ("pretrain", "steps before, in one process"), ("layers", "of a stage"), ("width", "of the model"),
        ("length", "bytes of a sample"), ("rows", "of a micro-batch"), ("microbatches", "of a step"),
    ):  # fmt: skip
        default = getattr(Setup(stages=1), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="written anew after every row")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the --json file and do what is missing")
    parser.add_argument("--figure", metavar="PATH", help="loss against time, step time against rate, speed-up")


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be, before torch is imported."""
    read_setup(args)
    read_shares(args.shares)
    for word in args.rates.split(",") if args.rates else ():
        parse_rate(word, "rate")
    if args.resume and args.json is None:
        raise UsageError("--resume goes on with the rows of a file: name it by --json")
    if args.figure:
        check_figures("--figure")


def read_shares(text: str) -> list[float]:
    """Shares of the wire in an fp32 step from "0.9,0.95"."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < s < 1 for s in shares):
        raise UsageError(f"--shares {text}: allowed are numbers between 0 and 1, comma-separated")
    return shares


def read_setup(args: argparse.Namespace) -> Setup:
    """Model, data and training that the options ask for."""
    names = ("epochs", "samples", "held_out", "pretrain", "layers", "width", "length", "rows", "microbatches")
    for name in ("hosts", *names):
        if getattr(args, name) < (2 if name == "hosts" else 1):
            raise UsageError(f"--{name} {getattr(args, name)}: too small")
    setup = Setup(args.hosts, schedule=args.schedule, **{name: getattr(args, name) for name in names})
    if setup.microbatches < args.hosts and setup.schedule == "1F1B":
        raise UsageError(f"--microbatches {setup.microbatches}: 1F1B needs one per stage, {args.hosts}")
    if setup.held_out % setup.microbatches or setup.samples < setup.batch:
        raise UsageError(f"--held-out must be a multiple of --microbatches, --samples at least {setup.batch}")
    return setup
