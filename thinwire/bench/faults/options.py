"""`thinwire bench faults`: one fault at a time into small trainings on four hosts of the lab; how does each end?

Every cell of the table is one training with one fault. It must end in one of three ways, seen from outside:
  goes on       losses and weights equal those of an undisturbed run, bit for bit
  rolled back   the step was dropped on all ranks alike, or an earlier checkpoint was taken, and that was said
  one line      every rank ends within the time and says in one line why; the trainer, resumed, comes to the same bits
Anything else is a fault of ours: WRONG (nobody noticed), HANG, TRACEBACK, NO WORD. Then the exit status is 1.

thinwire bench faults                             everything: many minutes
thinwire bench faults --quick                     the short form, about a minute
thinwire bench faults --only 'cable ddp, kill'    cells whose name has the words "cable" and "ddp", or "kill"
thinwire bench faults --patience 120              with the trainer's own time-out instead of a short one
"""

from __future__ import annotations

import argparse

from thinwire.bench.faults.cells import FAULTS, RUNS, chosen
from thinwire.errors import UsageError
from thinwire.installed import check_training

WORK = "thinwire.bench.faults.command"
LEAST_PATIENCE = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench faults`."""
    parser.description = __doc__
    parser.add_argument("--only", default="", metavar="WORDS", help="cells with all of these words; several by commas")
    parser.add_argument("--list", action="store_true", help="print the cells' names, and stop")
    parser.add_argument("--quick", action="store_true", help="the quickest cells only")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="every cell so often (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of rank, step and bit of each fault (%(default)s)")
    parser.add_argument(
        "--patience",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="that ranks wait for each other before they give up (%(default)s)",
    )
    parser.add_argument("--json", metavar="PATH", help="every cell, as they come: verdict, seconds, what was said")


def check(args: argparse.Namespace) -> None:
    """UsageError where an option is not allowed."""
    if args.repeat < 1:
        raise UsageError(f"--repeat {args.repeat}: allowed is a whole number from 1")
    if not args.patience >= LEAST_PATIENCE:
        raise UsageError(f"--patience {args.patience:g}: allowed is {LEAST_PATIENCE:g} and more")
    if not chosen(args.only, args.quick, 1):
        raise UsageError(
            f"--only {args.only!r}: no cell has these words; faults begin with {FAULTS[0].name!r}, runs are "
            f"{', '.join(RUNS)}: --list prints all"
        )
    check_training(lora=False)
