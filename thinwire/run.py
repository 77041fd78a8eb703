"""`thinwire run`: a training script as it is, with what it wraps in DDP compressed.

    torchrun --nproc-per-node 2 -m thinwire run --wire max train.py --epochs 3

The script runs in this process. Before it does, the constructor of DistributedDataParallel (or of the trainer that
--trainer names) is replaced by one that also attaches compression; afterwards it is put back.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.config.presets import PRESETS, written_out
from thinwire.config.toml import read_toml
from thinwire.errors import UsageError
from thinwire.installed import check_installed

if TYPE_CHECKING:
    from thinwire.data_parallel.handle import Handle

TRAINERS = {"huggingface": ("transformers", "train"), "lightning": ("lightning.pytorch", "test")}  # module, extra
Attach = Callable[[Any], Callable[[], "Handle | None"]]  # takes what was made; the handle, once there is one


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = __doc__
    parser.add_argument("--wire", default="auto", help=f"auto, {', '.join(PRESETS)}, or a TOML file with [wire]")
    parser.add_argument(
        "--trainer", choices=sorted(TRAINERS), help="compress what this trainer runs, with its checkpoints"
    )
    parser.add_argument("--module", "-m", action="store_true", help="SCRIPT is a module's name, as after python -m")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script with compression attached; the exit status."""
    if args.script is None:
        raise UsageError("which script? thinwire run --wire max train.py …, under torchrun")
    table = _wire(args.wire)
    _check_script(args)
    if args.trainer is not None:
        module, extra = TRAINERS[args.trainer]
        check_installed(f"--trainer {args.trainer}", (module.partition(".")[0],), extra)
    from thinwire.config.wire import Wire

    wire = Wire.of(table)
    with _attached(args.trainer, wire) as found:
        _run_script(args)
    _say(found)
    return 0


def _wire(given: str) -> dict[str, Any]:
    """The `[wire]` table that --wire names, checked as far as that needs no torch."""
    if not given.endswith(".toml"):
        if given not in ("auto", *PRESETS):
            raise UsageError(f"--wire {given}: allowed are auto, {', '.join(PRESETS)}, and a file that ends in .toml")
        return {"preset": given}
    document = read_toml(given, "--wire ")
    table = document.get("wire")
    if not isinstance(table, dict):
        raise UsageError(f"--wire {given}: has no [wire] table; it has {', '.join(document) or 'nothing'}")
    return written_out(table)


def _check_script(args: argparse.Namespace) -> None:
    if args.module:
        sys.path.insert(0, "")
        if importlib.util.find_spec(args.script) is None:
            raise UsageError(f"--module {args.script}: no such module")
    elif not Path(args.script).is_file():
        raise UsageError(f"{args.script}: no such script; options of thinwire run stand before it")


def _run_script(args: argparse.Namespace) -> None:
    """As `python SCRIPT …` and `python -m MODULE …` would."""
    sys.argv = [args.script, *args.arguments]
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(args.script).resolve().parent))
        runpy.run_path(args.script, run_name="__main__")


@contextmanager
def _attached(trainer: str | None, wire: Any) -> Iterator[list[Callable[[], Handle | None]]]:
    """While this lasts every model or trainer that is made is compressed; gives what finds their handles."""
    home = "torch.nn.parallel.DistributedDataParallel" if trainer is None else f"{TRAINERS[trainer][0]}.Trainer"
    module, _, name = home.rpartition(".")
    made: Any = getattr(importlib.import_module(module), name)
    attach = _ddp(wire) if trainer is None else _trainer(wire)
    original = made.__init__
    found: list[Callable[[], Handle | None]] = []

    def make(self: object, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        found.append(attach(self))

    made.__init__ = make
    try:
        yield found
    finally:
        made.__init__ = original


def _ddp(wire: Any) -> Attach:
    from thinwire.data_parallel.ddp import compress_ddp

    def attach(model: Any) -> Callable[[], Handle | None]:
        handle = compress_ddp(model, wire)
        return lambda: handle

    return attach


def _trainer(wire: Any) -> Attach:
    from thinwire.data_parallel.trainers import compress_trainer

    def attach(trainer: Any) -> Callable[[], Handle | None]:
        attachment = compress_trainer(trainer, wire)
        return lambda: attachment.handle

    return attach


def _say(found: list[Callable[[], Handle | None]]) -> None:
    """What was saved, a line per model, by the first rank."""
    handles = [handle for get in found if (handle := get()) is not None]
    if not found:
        print("thinwire: the script wrapped no model in DDP: nothing was compressed", file=sys.stderr)
    for handle in handles:
        if handle.reducer.is_first:
            print(f"thinwire: {handle.summary()}", flush=True)
