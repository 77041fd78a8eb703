"""The options of `thinwire bench link`, read and checked. It has two forms.

thinwire bench link --rates 10mbit,1gbit --latency 10ms
    does an emulated link do what it says? Raw TCP, Gloo all-reduce and Gloo send against the nominal rate
thinwire bench link --rate 100mbit --latency 50ms --loss 0.1%,1% --streams 1,8 --congestion reno,bbr --size 10MB
    what share of a long link is used? Every combination: three messages after one another, one way and both ways at
    once, over so many flows
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from thinwire.errors import UsageError
from thinwire.installed import check_figures
from thinwire.lab.topology import make_tcp
from thinwire.quantities import parse_bytes, parse_loss, parse_rate, parse_time, show_rate

WORK = "thinwire.bench.link.command"
RATES = "2mbit,10mbit,100mbit,1gbit"
GRID = {"rate": "100mbit", "latency": "0ms", "loss": "0%", "streams": "1", "congestion": "default", "size": "10MB"}
MOST_STREAMS = 64
DEFAULT = "default"  # the congestion control that the lab chooses

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One combination: a link (bit/s, seconds one way, probability), a congestion control (None: the lab's), flows."""

    rate: float
    latency: float
    loss: float
    congestion: str | None
    streams: int


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench link`."""
    parser.description = __doc__
    parser.add_argument("--rates", help=f"the first form: rates, comma-separated ({RATES})")
    parser.add_argument("--seconds", default="2s", help="with --rates: how long a transfer should take (%(default)s)")
    parser.add_argument("--latency", help="one-way delay between the two hosts (0ms); a list in the second form")
    parser.add_argument("--rate", metavar="RATES", help="the second form, and all below; lists (100mbit)")
    parser.add_argument("--loss", metavar="SHARES", help="packets lost on their way (0%%)")
    parser.add_argument("--streams", metavar="NUMBERS", help="flows that a message is cut over (1)")
    parser.add_argument("--congestion", metavar="NAMES", help="TCP's congestion control (default: the lab's)")
    parser.add_argument("--size", help="of each of the three messages (10MB)")
    parser.add_argument("--window", metavar="SIZE", help="what one flow may have under way (default: the kernel's)")
    parser.add_argument("--limit", default="120s", help="give a combination up after this long (%(default)s)")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--figure", metavar="PATH", help="the second form: shares against the number of flows")


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be, before torch is imported."""
    parse_time(args.seconds, "seconds")
    parse_time(args.limit, "limit")
    if not is_grid(args):
        if args.figure:
            raise UsageError("--figure: draws combinations, so give --rate, --loss, --streams or --congestion")
        read_rates(args.rates or RATES)
        args.rates, args.latency = args.rates or RATES, args.latency or "0ms"
        parse_time(args.latency, "latency")
        return
    if args.rates is not None:
        raise UsageError("--rates compares a link with its rate; for combinations write --rate instead")
    read_cells(args)
    read_size(args)
    if args.figure:
        check_figures("--figure")


def is_grid(args: argparse.Namespace) -> bool:
    """Is it the second form: combinations of link, flows and congestion control?"""
    named = [name for name in (*GRID, "window") if name != "latency" and getattr(args, name) is not None]
    return bool(named) or (args.rates is None and "," in (args.latency or ""))


def read_rates(text: str) -> list[float]:
    """Rates in bit/s from "10mbit,1gbit"."""
    rates = [parse_rate(word.strip(), "rate") for word in text.split(",")]
    limited = [rate for rate in rates if rate is not None]
    if len(limited) < len(rates):
        raise UsageError("a link without a rate has nothing to be compared with")
    return limited


def read_cells(args: argparse.Namespace) -> list[Cell]:
    """All combinations, those on the same network one after another."""

    def values(name: str, parse: Callable[[str], T]) -> list[T]:
        text = getattr(args, name) or GRID[name]
        return [parse(word.strip()) for word in text.split(",")]

    make_tcp({"window": args.window} if args.window else {})
    rates = read_rates(args.rate or GRID["rate"])
    networks = product(
        values("congestion", lambda word: None if word == DEFAULT else word),
        values("latency", lambda word: parse_time(word, "latency")),
        values("loss", lambda word: parse_loss(word, "loss")),
    )
    streams = values("streams", _streams)
    return [
        Cell(rate, latency, loss, congestion, count)
        for congestion, latency, loss in networks
        for rate, count in product(rates, streams)
    ]


def _streams(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= MOST_STREAMS:
        raise UsageError(f"streams {word!r}: allowed are whole numbers from 1 to {MOST_STREAMS}, comma-separated")
    return int(word)


def read_size(args: argparse.Namespace) -> int:
    """Bytes of a message."""
    size = parse_bytes(args.size or GRID["size"], "size")
    if not 1 <= size <= 10**9:
        raise UsageError(f"size {args.size!r}: allowed is 1B to 1GB")
    return size


def link_of(row: dict[str, Any]) -> str:
    """A measured row's link and congestion control in words."""
    return f"{show_rate(row['rate'])}, {1e3 * row['latency']:g} ms, {100 * row['loss']:g} %, {row['congestion']}"
