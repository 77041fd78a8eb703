"""The options of `thinwire bench allreduce`, read and checked; what it does is in allreduce.py."""

from __future__ import annotations

import argparse
import math

from thinwire.errors import UsageError
from thinwire.installed import check_figures
from thinwire.quantities import parse_rate, parse_time

WORK = "thinwire.bench.allreduce"
WORKERS = ("similar", "skewed", "adversarial")


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench allreduce`."""
    parser.add_argument("--hosts", default="2,4,8", help="comma-separated (%(default)s)")
    parser.add_argument("--rate", default="20mbit", help="of every host's link (%(default)s)")
    parser.add_argument("--latency", default="0ms", help="one way, host to host (%(default)s)")
    parser.add_argument("--numel", default="10e6", help="values to reduce (%(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="share that sparse ones pick (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="exchanges a launch; long ones once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="launches of each, in turn (%(default)s)")
    parser.add_argument("--workers", choices=WORKERS, default=WORKERS[0], help="gradients (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="names that contain one of these, comma-separated")
    parser.add_argument(
        "--ablation", action="store_true", help="Ok-Topk also without its parts, and with its own thresholds"
    )
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--figure", metavar="PATH", help="seconds and words per k against the number of hosts")


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be, before torch is imported."""
    read_hosts(args.hosts)
    read_numel(args.numel)
    parse_rate(args.rate, "rate")
    parse_time(args.latency, "latency")
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: allowed is a whole number from 1")
    if args.figure:
        check_figures("--figure")


def read_hosts(text: str) -> list[int]:
    """Numbers of hosts from "2,4,8"."""
    try:
        hosts = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--hosts {text}: allowed are whole numbers, comma-separated") from None
    if min(hosts) < 2:
        raise UsageError(f"--hosts {text}: allowed are numbers from 2")
    return hosts


def read_numel(text: str) -> int:
    """A number of values from "10e6"."""
    try:
        numel = float(text)
    except ValueError:
        numel = math.nan
    if not 2 <= numel < 2**31 or numel != int(numel):
        raise UsageError(f"--numel {text}: allowed is a whole number from 2 below 2³¹, such as 10e6")
    return int(numel)
