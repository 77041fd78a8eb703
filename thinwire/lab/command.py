"""`thinwire lab run`: a program on an emulated slow network, with its output, its speed and its bytes."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from thinwire.errors import UsageError
from thinwire.lab.errors import LabError, LabTimeout, RankFailed
from thinwire.lab.events import Script, load_events
from thinwire.lab.job import Job
from thinwire.lab.netlink import Traffic
from thinwire.lab.network import Network
from thinwire.lab.topology import SUBNET, TCP_KEYS
from thinwire.quantities import parse_time, show_bytes, show_rate
from thinwire.terminal import table, write_json

EXAMPLES = """examples:
  thinwire lab run --hosts 4 --rate 100mbit -- python train.py
  thinwire lab run --hosts 2 --up 20mbit --down 100mbit --latency 10ms --preload torch -- python train.py
  thinwire lab run --topology sites.toml --per-host 2 --json out/run.json -- python train.py

A program finds the variables torchrun would set; its hosts see each other and nothing else.
Rates are decimal bits: kbit, mbit, gbit. A latency is one way, from host to host."""
REFRESH = 1.0  # seconds between two readings of the live line
TIMED_OUT = 124  # the status of the `timeout` program


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and options of `thinwire lab` on its parser."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    run = actions.add_parser(
        "run",
        help="run a program on every host",
        description="Run a program on every host of a slow network made on this machine; no root needed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--hosts", metavar="N", help="how many hosts (default 2)")
    run.add_argument("--rate", help="of every host's link, both ways, such as 100mbit (default: unlimited)")
    run.add_argument("--up", help="what a host may send, if it differs from --rate")
    run.add_argument("--down", help="what a host may receive, if it differs from --rate")
    run.add_argument("--latency", help="one-way delay between hosts, such as 10ms")
    run.add_argument("--loss", help="packets lost on the way, such as 0.1%%")
    run.add_argument("--reorder", help="packets that come late, behind their followers, such as 1%%")
    run.add_argument("--congestion", metavar="NAME", help="TCP's congestion control (cubic where allowed, else reno)")
    run.add_argument("--window", metavar="SIZE", help="what one connection may have under way, such as 16MB")
    run.add_argument(
        "--no-slow-start-after-idle",
        dest="slow_start_after_idle",
        action="store_false",
        default=None,
        help="a connection that has been silent goes on at the speed it had",
    )
    run.add_argument("--mtu", metavar="BYTES", help="the largest packet (1500; 9000 for jumbo frames)")
    run.add_argument("--topology", metavar="FILE", help="a TOML file of sites and hosts, instead of the above")
    run.add_argument("--subnet", default=SUBNET, help="the hosts' addresses (%(default)s), seen by them alone")
    run.add_argument("--per-host", default="1", metavar="K", help="processes per host (1)")
    run.add_argument(
        "--preload",
        metavar="MODULES",
        help="import these (torch,…) once and fork the Python ranks from there",
    )
    run.add_argument("--timeout", default="24h", help="end the program after this long (%(default)s)")
    run.add_argument("--patience", default="10s", help="how long TCP retries on a dead link (about %(default)s)")
    run.add_argument(
        "--events", metavar="FILE", help="TOML: hosts killed, added, frozen, cut off in mid-run; docs/lab.md"
    )
    run.add_argument("--json", metavar="PATH", help="write the table and more to this file")
    run.add_argument(
        "--watch",
        metavar="RUN",
        help="serve a page that follows the run of `thinwire train` which the program makes there",
    )
    run.add_argument("command", nargs="*", metavar="-- COMMAND …", help="the program and its arguments")


def watched(args: argparse.Namespace) -> list[Path]:
    """The folder of the run that the program makes."""
    return [Path(args.watch)]


def run(args: argparse.Namespace) -> int:
    """Run the program of the parsed command line on its network and print what crossed; the exit status."""
    if not args.command:
        raise UsageError("no program: write it after --, as in `thinwire lab run --hosts 4 -- python train.py`")
    limit, per_host = parse_time(args.timeout, "timeout"), _count(args.per_host, "per-host")
    preload = [name for name in (args.preload or "").split(",") if name]
    shape = _shape(args) | {"subnet": args.subnet, "preload": preload, "patience": args.patience}
    script = Script([]) if args.events is None else load_events(args.events, [h.name for h in Network(**shape).hosts])
    with Network(**shape, end_dead=not script.cuts) as net:
        for note in net.notes:
            print(f"note: {note}", file=sys.stderr)
        absent = script.absent([host.name for host in net.hosts for _ in range(per_host)])
        job = net.start(args.command, per_host=per_host, fork=bool(preload), absent=absent)
        status, problem = _wait(net, job, limit, script)
        traffic, seconds = job.traffic(), job.seconds
    if problem:
        print(f"thinwire: {problem}", file=sys.stderr)
    _show(net, traffic, seconds)
    record = _record(args, net, job, traffic, seconds, status)
    happened = [{"seconds": at, "do": event.do, "host": event.host} for at, event in script.past]
    write_json(args.json, record | ({"events": happened} if args.events is not None else {}))
    return status


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Network` that were given; a topology file excludes the others."""
    names = ("hosts", "rate", "up", "down", "latency", "loss", "reorder", "mtu", *sorted(TCP_KEYS))
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.topology is not None and given:
        raise UsageError(f"--topology describes the whole network; leave out --{_option(next(iter(given)))}")
    if "hosts" in given:
        given["hosts"] = _count(given["hosts"], "hosts")
    if given.get("mtu", "").isdecimal():  # what is no number is refused as a wrong one is
        given["mtu"] = int(given["mtu"])
    return given if args.topology is None else {"topology": args.topology}


def _option(name: str) -> str:
    return "no-slow-start-after-idle" if name == "slow_start_after_idle" else name


def _count(text: str, what: str) -> int:
    """A whole number from 1; read here and not by argparse, whose error message is longer than one line."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{what} {text!r}: allowed is a whole number from 1")
    return int(text)


def _wait(net: Network, job: Job, limit: float, script: Script) -> tuple[int, str]:
    """Until the program's end: the status for the shell, and what went wrong. script: what happens meanwhile."""
    often = REFRESH / 10 if script.events else REFRESH
    try:
        with _live() as live:
            before, read_at = net.traffic(), time.monotonic()
            while not job.watch(min(often, max(0.0, limit - job.seconds))) and job.seconds < limit:
                script.tick(net, job, lambda line: print(line, file=sys.stderr, flush=True))
                if live is not None and time.monotonic() - read_at >= REFRESH:
                    now, span = net.traffic(), time.monotonic() - read_at
                    live.update(_speeds({name: now[name].since(before[name]) for name in now}, span))
                    before, read_at = now, time.monotonic()
            job.wait(0.0)
    except RankFailed as error:
        return (error.status if error.status > 0 else 128 - error.status), str(error)
    except LabTimeout as error:
        return TIMED_OUT, str(error)
    except LabError as error:
        return 1, str(error)
    return 0, ""


def _live() -> Live | nullcontext[None]:
    """A line at the bottom of a terminal; nothing elsewhere. What ranks print scrolls above it."""
    if not sys.stderr.isatty():
        return nullcontext()
    console = Console(stderr=True)
    return Live(console=console, transient=True, redirect_stdout=sys.stdout.isatty(), auto_refresh=False)


def _speeds(moved: dict[str, Traffic], seconds: float) -> Text:
    def speed(count: int) -> str:
        return f"{count * 8e-6 / seconds:.1f}"

    parts = [f"{name} ↑{speed(seen.sent)} ↓{speed(seen.received)}" for name, seen in moved.items()]
    return Text("Mb/s: " + "  ".join(parts), no_wrap=True, overflow="ellipsis")


def _show(net: Network, traffic: dict[str, Traffic], seconds: float) -> None:
    rows = []
    for name, link in net.topology.links.items():
        seen = traffic[name]
        mean = seen.sent * 8e-6 / seconds
        rows.append(
            (
                name,
                show_rate(link.up),
                show_rate(link.down),
                show_bytes(seen.sent),
                show_bytes(seen.received),
                mean,
            )
        )
    columns = ("link", "up", "down", "sent", "received", "mean Mb/s sent")
    table(f"{len(net.hosts)} hosts, {seconds:.2f} s", columns, rows)


def _record(
    args: argparse.Namespace, net: Network, job: Job, traffic: dict[str, Traffic], seconds: float, status: int
) -> dict[str, Any]:
    places = {host.name: {"address": host.address, "site": host.site} for host in net.hosts}
    return {
        "command": args.command,
        "status": status,
        "seconds": seconds,
        "setup_seconds": net.setup_seconds,
        "delay": net.delay,
        "mtu": net.topology.mtu,
        "tcp": asdict(net.topology.tcp),
        "notes": net.notes,
        "links": [
            {"name": name, **places.get(name, {}), **asdict(link), **asdict(traffic[name])}
            for name, link in net.topology.links.items()
        ],
        "ranks": [
            {"rank": place.rank, "host": place.host, "status": code}
            for place, code in zip(job.placements, job.statuses)
        ],
    }
