"""The options of `thinwire bench codecs`; what it does is in codecs.py."""

from __future__ import annotations

import argparse

from thinwire.errors import UsageError

WORK = "thinwire.bench.codecs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench codecs`."""
    parser.add_argument("--mib", type=int, default=64, help="size of the float32 tensor in MiB (default 64)")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved repeats; medians are compared (15)")
    parser.add_argument("--json", metavar="PATH", help="write the numbers to PATH")


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be, before torch is imported."""
    if args.mib < 1 or args.repeats < 1:
        raise UsageError(f"--mib and --repeats must be at least 1, not {args.mib} and {args.repeats}")
