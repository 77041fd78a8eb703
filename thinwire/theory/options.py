"""The options of `thinwire convex`, read and checked; what it does is in command.py."""

from __future__ import annotations

import argparse

from thinwire.errors import UsageError
from thinwire.installed import THEORY, check_installed

WORK = "thinwire.theory.command"
PROBLEMS = ("ridge", "logistic", "interpolation", "two-stage")
MOST_SEEDS = 20
QUICK = (
    "every claim once, in a minute of processor time: one seed, EF21 and EControl at q = 0.9, shorter two-stage runs; "
    "leaves out logistic regression and the sweeps over densities and levels"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `thinwire convex` on its parser."""
    names = (*PROBLEMS, "all")
    parser.add_argument("--problem", choices=names, default="all", help="default: all")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 … N−1; default: 2, with --quick 1")
    parser.add_argument("--quick", action="store_true", help=QUICK)
    parser.add_argument("--out", metavar="DIR", default="out/convex", help="where the figures go")
    parser.add_argument("--json", metavar="PATH", help="write the table and the checks")


def check(args: argparse.Namespace) -> None:
    """UsageError where an option is wrong or a package that the theory bench needs is not installed."""
    read_seeds(args)
    check_installed("the theory bench", THEORY, "theory")


def read_seeds(args: argparse.Namespace) -> int:
    """How many seeds to run; UsageError where --seeds is out of range."""
    count = args.seeds if args.seeds is not None else 1 if args.quick else 2
    if not 1 <= count <= MOST_SEEDS:
        raise UsageError(f"--seeds must be 1 … {MOST_SEEDS}, not {count}")
    return count
