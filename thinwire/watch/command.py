"""`thinwire watch RUN…`: a local web page that follows runs while they go on."""

from __future__ import annotations

import argparse
import sys
from threading import Event

from thinwire.errors import UsageError
from thinwire.installed import check_figures

EXAMPLES = """examples:
  thinwire watch out/train
  thinwire watch out/off out/max --port 8600
  thinwire train run.toml --local 4 --rate 100mbit --watch

RUN is the folder that `thinwire train` writes ([run] out); the run may not have begun yet, or have ended.
The page is served on this machine only, at an address that holds a random token. It reads, and changes nothing."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire watch`."""
    parser.epilog = EXAMPLES
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders that `thinwire train` writes")
    parser.add_argument("--port", type=int, default=0, help="where to serve (default: any that is free)")
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="serve others too (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; the exit status."""
    if not args.runs:
        raise UsageError("no run given: thinwire watch RUN, the folder that `thinwire train` writes")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: allowed are 1 to 65535, and 0 for any that is free")
    check_figures("the page")
    from thinwire.report.runs import places
    from thinwire.watch.serve import serving

    with serving(places(args.runs), args.bind, args.port):
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        try:
            Event().wait()
        except KeyboardInterrupt:
            print("\nwatch ended", file=sys.stderr)
    return 0
