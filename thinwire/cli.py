"""The `thinwire` command: a table of subcommands, each living in the room that owns it.

A command module has `configure(parser)`, which adds its arguments, and `run(args) -> int`; or, where its work needs
torch, `check(args)` and the name of the module that has `run`, `WORK`. One that makes training runs also has an option
--watch, and `watched(args)`, their folders: a page that follows them is served beside it. Modules are imported only
when named, and work only once the options are right: `thinwire --help` needs no torch, nor does telling a mistake.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from thinwire import __version__
from thinwire.errors import RunFailed, UsageError
from thinwire.installed import check_figures

COMMANDS = {
    "demo": ("thinwire.demo", "the main job in minutes, on this machine: one training, uncompressed and compressed"),
    "train": ("thinwire.train.command", "train a language model over a slow network, everything compressed"),
    "run": ("thinwire.run", "a training script as it is, with what it wraps in DDP compressed"),
    "convex": ("thinwire.theory.options", "the theory bench: compressed methods on convex problems, with figures"),
    "plan": ("thinwire.plan", "what every message costs, which the step waits for, and what to expect"),
    "lab": ("thinwire.lab.command", "run a program on several hosts with slow links, emulated on this machine"),
    "bench": ("", "measure the parts on this machine"),
    "report": ("thinwire.report.command", "one HTML page about training runs: loss, time, bytes, errors, the step"),
    "watch": ("thinwire.watch.command", "a local web page that follows training runs while they go on"),
    "doctor": ("thinwire.doctor.command", "what this machine can do, and what to install where it cannot"),
}

BENCHES = {
    "link": ("thinwire.bench.link.options", "raw TCP and Gloo against a link's rate; long links by number of flows"),
    "codecs": ("thinwire.bench.codecs_options", "encode and decode speed, beside other quantisers and memcpy"),
    "train": ("thinwire.bench.train", "time to the same held-out loss over slow links, everything compressed"),
    "allreduce": (
        "thinwire.bench.allreduce_options",
        "each collective on a slow network: seconds, bytes, words per k",
    ),
    "optimus": ("thinwire.bench.optimus", "Optimus-CC's ladder and ours: step time, bytes, loss; which stages"),
    "faults": ("thinwire.bench.faults.options", "faults into small trainings: does each go on, roll back or say why?"),
    "scratch": (
        "thinwire.bench.scratch.options",
        "from scratch over a pipeline: steps to a loss × seconds per step",
    ),
    "pipeline": ("thinwire.bench.pipeline_options", "compressed activations and gradients: step time, bytes, loss"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names (default: the process's own words); the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(words).parse_args(words)
        return int(args.run(args) or 0)
    except UsageError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("thinwire: interrupted", file=sys.stderr)
        return 130


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thinwire", description="Train large models over slow networks: compress what crosses the wire."
    )
    parser.add_argument("--version", action="version", version=f"thinwire {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda args: parser.print_help())
    named = next((w for w in words if not w.startswith("-")), "")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=_sentence(summary))
        if name == "bench":
            _add_benches(sub, words if name == named else [])
        elif name == named:
            _attach(sub, module)
    return parser


def _add_benches(parser: argparse.ArgumentParser, words: list[str]) -> None:
    benches = parser.add_subparsers(title="benches", metavar="BENCH")
    parser.set_defaults(run=lambda args: parser.print_help())
    for name, (module, summary) in BENCHES.items():
        sub = benches.add_parser(name, help=summary, description=_sentence(summary))
        if name in words:
            _attach(sub, module)


def _attach(parser: argparse.ArgumentParser, module: str) -> None:
    command = importlib.import_module(module)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.configure(parser)
    run = getattr(command, "run", None) or partial(_checked, command)
    parser.set_defaults(run=partial(_followed, command, run) if hasattr(command, "watched") else run)


def _checked(command: ModuleType, args: argparse.Namespace) -> int:
    """Check the options, then import what does the work."""
    command.check(args)
    status: int = importlib.import_module(command.WORK).run(args)
    return status


def _followed(command: ModuleType, run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run the command; with --watch, the live page about its runs beside it."""
    folders = command.watched(args) if getattr(args, "watch", None) else []
    if not folders:
        return run(args)
    check_figures("--watch")
    from thinwire.watch.serve import beside

    with beside(folders):
        return run(args)


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
