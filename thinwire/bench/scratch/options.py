"""`thinwire bench scratch`: from scratch over a pipeline: steps to the loss that dense reaches × seconds per step.

Rules of a public yardstick (Protocol NanoGPT): 8 stages of one layer each, links of 200 Mb/s and 50 ms, every sample
once, T = steps to the loss that dense bf16 reaches × seconds per step. Two parts, since a loss does not depend on the
network:
  steps     a small GPT on bytes of Python's library, all stages in one process, every message through both ends of its
            lane: the bits of real ranks
  seconds   of the yardstick's own step (524,288 tokens of width 1024): each row's exact bytes, on the line through the
            two published measurements (4.85 s + 0.0233 s per byte per token)

thinwire bench scratch                                         every row, three seeds: hours on two cores
thinwire bench scratch --quick                                 five rows, a few steps: does it run?
thinwire bench scratch --only 'rotated 4, dense' --json rows.json --resume
thinwire bench scratch --only dense --lab 4                    also four steps on real shaped links, at this size
thinwire bench scratch --model yardstick --rate 0.02 --only 'tokens both ways + normal 2 back 2 through, bf16 of 0.5'
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from thinwire.bench.scratch.rows import DENSE, QUICK, ROWS, Row, row_of
from thinwire.errors import UsageError
from thinwire.installed import check_figures
from thinwire.terminal import read_json

WORK = "thinwire.bench.scratch.command"
GPT, YARDSTICK = "gpt", "yardstick"


@dataclass(frozen=True)
class Scratch:
    """Model, data and training of every row; all of it follows from these numbers and a seed.

    stages: of one layer each. width: of hidden states. length: bytes of a sample. rows: samples per step.
    steps: of dense; the others stop where they reach its loss. most: times dense's steps after which a row stops.
    opened: steps that a model with boundaries in a subspace goes on for without them, dense, at its end.
    ramp: share of these in which the boundaries open little by little; 0: at once.
    every: steps between evaluations. held_out: samples evaluated on.
    rate: the optimiser's, after `warmup` steps; Muon's, with the yardstick's model.
    vocabulary: of tokens; 256: bytes. text: folders of source and text files, with commas between
        them; "": Python's library.
    cache: a file that keeps their tokens. device: on a card products are in bf16.
    decay: share of a run's steps, its last ones, over which the rate falls to 0.
    model: "gpt", trained by AdamW, or "yardstick", by Muon (model.py).
    """

    stages: int = 8
    width: int = 256
    length: int = 128
    rows: int = 16
    steps: int = 2000
    most: float = 2.0
    opened: int = 0
    every: int = 25
    held_out: int = 64
    rate: float = 1e-3
    warmup: int = 50
    ramp: float = 0.0
    vocabulary: int = 256
    text: str = ""
    cache: str = ""
    device: str = "cpu"
    decay: float = 0.0
    model: str = GPT

    def rate_at(self, step: int, steps: int) -> float:
        """Of a step, from 0, in a run of so many."""
        falls = self.decay * steps
        return self.rate * min(1.0, (step + 1) / self.warmup, (steps - step) / falls if falls else 1.0)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length


FEW = {"stages": 4, "width": 64, "length": 64, "rows": 4, "steps": 40, "every": 10, "held_out": 16, "warmup": 5}
WHOLE = ("stages", "width", "length", "rows", "steps", "opened", "every", "held_out", "warmup", "vocabulary")
NUMBERS = (*WHOLE, "most", "rate", "ramp", "decay")
TEXTS = ("text", "cache", "device", "model")
LEAST = {"stages": 2, "width": 16, "opened": 0, "vocabulary": 256, "rate": 1e-9, "ramp": 0, "decay": 0}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench scratch`."""
    parser.description = __doc__
    parser.add_argument("--only", default="", metavar="WORDS", help="rows with one of these words; dense is always one")
    parser.add_argument("--seeds", type=int, default=None, help="paired runs of every row (3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a small model, few rows and steps: under a minute")
    for name in WHOLE:
        text = f"--{name.replace('_', '-')}"
        parser.add_argument(text, type=int, default=None, help=f"({getattr(Scratch(), name)})")
    parser.add_argument("--most", type=float, default=None, help="times dense's steps, then a row stops (2)")
    parser.add_argument("--rate", type=float, default=None, help="learning rate (0.001)")
    parser.add_argument(
        "--ramp", type=float, default=None, help="share of --opened in which boundaries open slowly (0)"
    )
    parser.add_argument("--decay", type=float, default=None, help="share of the steps in which the rate falls to 0 (0)")
    parser.add_argument("--formulas", action="store_true", help="codes without messages; on a card a step is one graph")
    parser.add_argument("--eager", action="store_true", help="with --formulas on a card: neither graphs nor compiled")
    parser.add_argument(
        "--uncompiled", action="store_true", help="with --formulas on a card: graphs of torch's kernels"
    )
    parser.add_argument(
        "--lengths", default="1", metavar="TIMES", help="with --formulas: dense's steps times these, a run each (1)"
    )
    parser.add_argument(
        "--plan", metavar="FILE", help="with --formulas: these runs in this order; a line: rate seed times row"
    )
    parser.add_argument(
        "--text", metavar="FOLDER", help="or several, with commas: files to train on (Python's library)"
    )
    parser.add_argument("--cache", metavar="FILE", help="keeps the tokens of the text, for other runs of it")
    parser.add_argument(
        "--model", choices=(GPT, YARDSTICK), help="a small GPT under AdamW, or the yardstick's kind under Muon (gpt)"
    )
    parser.add_argument("--device", help="cpu or cuda (cpu)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at the same time (1)")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="after which no run begins")
    parser.add_argument("--lab", type=int, default=0, metavar="N", help="also N steps per row on real shaped links")
    parser.add_argument("--json", metavar="PATH", help="written anew after every run")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the --json file, do the others")
    parser.add_argument("--figure", metavar="PATH", help="T beside dense, and loss against bytes per token")


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be, before torch is imported."""
    setup = read_setup(args)
    chosen(args)
    if args.lab < 0 or (args.seeds is not None and args.seeds < 1):
        raise UsageError(f"--lab {args.lab}, --seeds {args.seeds}: allowed are 0 or more, and 1 or more")
    if args.resume and args.json is None:
        raise UsageError("--resume goes on with the runs of a file: name it by --json")
    if args.resume and read_json(args.json)["setup"] != asdict(setup):
        raise UsageError(f"--resume: {args.json} is of other options: {read_json(args.json)['setup']}")
    if args.figure:
        check_figures("--figure")
    lengths(args)


def lengths(args: argparse.Namespace) -> list[float]:
    """Of --lengths."""
    try:
        found = [float(part) for part in args.lengths.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UsageError(f"--lengths {args.lengths!r}: numbers above 0, with commas between them")
    if max(found) > read_setup(args).most:
        raise UsageError(f"--lengths {args.lengths}: more than --most {read_setup(args).most}")
    return found


def planned(args: argparse.Namespace) -> list[tuple[Row, float, int, float]]:
    """The runs with --formulas, in order: row, rate, seed, times dense's steps."""
    if not args.plan:
        seeds, rate = range(args.seeds or (1 if args.quick else 3)), read_setup(args).rate
        return [
            (row, rate, seed, length)
            for row in chosen(args)
            for length in ([1.0] if row.name == DENSE else lengths(args))
            for seed in seeds
        ]
    try:
        lines = Path(args.plan).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {args.plan}: {error.strerror}") from None
    out = []
    for line in filter(None, map(str.strip, lines)):
        try:
            at, seed, times, name = line.split(maxsplit=3)
            numbers = float(at), int(seed), float(times)
        except ValueError:
            raise UsageError(f"--plan {args.plan}: {line!r} is not: rate seed times row") from None
        out.append((row_of(name), *numbers))
    return out


def read_setup(args: argparse.Namespace) -> Scratch:
    """Model, data and training that the options ask for."""
    given = {name: getattr(args, name) for name in (*NUMBERS, *TEXTS) if getattr(args, name) is not None}
    setup = replace(Scratch(), **({**FEW, **given} if args.quick else given))
    for name in NUMBERS:
        if not getattr(setup, name) >= LEAST.get(name, 1):
            raise UsageError(f"--{name.replace('_', '-')} {getattr(setup, name)}: too small")
    if setup.width % 4:
        raise UsageError(f"--width {setup.width}: must be a multiple of its 4 heads")
    return setup


def chosen(args: argparse.Namespace) -> list[Row]:
    """The rows to run, dense first. A word that is a row's whole name means that row alone, also one of `row_of`."""
    words = [word.strip() for word in args.only.split(",") if word.strip()]
    able = {name: row for name, row in ROWS.items() if _able(row, args)}
    found = {word: row for word in words if (row := able.get(word) or _written(word)) is not None and _able(row, args)}
    few = [name for name in able if not args.quick or name in QUICK]
    parts = [word for word in words if word not in found]
    found |= {name: able[name] for name in few if not words or any(part in name for part in parts)}
    if words and not found:
        raise UsageError(f"--only {args.only!r}: no row has these words; rows are {', '.join(ROWS)}")
    return list({DENSE: ROWS[DENSE], **found}.values())


def _able(row: Row, args: argparse.Namespace) -> bool:
    return row.formulas if args.formulas else row.messages


def _written(name: str) -> Row | None:
    """The row of a name that is not in the list; None: it is not a row's."""
    try:
        return row_of(name)
    except UsageError:
        return None
