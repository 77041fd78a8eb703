"""`thinwire bench link --rate … --streams …`: the share of a long link that messages use, for every combination."""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

from thinwire.bench.link.options import Cell, link_of, read_cells, read_size
from thinwire.bench.link.ranks import MESSAGES, exchange
from thinwire.lab.errors import LabTimeout
from thinwire.lab.network import Network
from thinwire.quantities import parse_time, show_bytes, show_rate
from thinwire.terminal import progress, table, write_json

PRELOAD = ("torch.distributed", "thinwire.bench.link.ranks")


def run(args: argparse.Namespace) -> int:
    """Measure every combination of `args` (checked); the exit status."""
    cells, size, limit = read_cells(args), read_size(args), parse_time(args.limit, "limit")
    rows: list[dict[str, Any]] = []
    with progress("link", len(cells)) as advance:
        for (congestion, latency, loss), several in groupby(cells, lambda c: (c.congestion, c.latency, c.loss)):
            with Network(
                hosts=2, latency=latency, loss=loss, congestion=congestion, window=args.window, preload=PRELOAD
            ) as net:
                for cell in several:
                    rows.append(measure(net, cell, size, limit))
                    advance(f"{describe(rows[-1])}: {_percent(rows[-1]['share'])}", 1)
                    write_json(args.json, {"window": args.window, "delay": net.delay, "rows": rows})
    _show(rows, size)
    if args.figure:
        from thinwire.bench.link.figure import draw

        draw(rows, args.figure)
    return 0


def measure(net: Network, cell: Cell, size: int, limit: float) -> dict[str, Any]:
    """One combination on `net`, which has its latency, loss and congestion control: messages of `size` bytes.

    limit: seconds after which one direction is given up; its share is None then.
    """
    for host in net.hosts:
        net.set_rate(host.name, cell.rate)
    alone = _exchange(net, size, cell.streams, False, limit)
    both = _exchange(net, size, cell.streams, True, limit)
    full = size * 8 / cell.rate  # seconds of one message on a link that carries nothing else
    return {
        "rate": cell.rate,
        "latency": cell.latency,
        "loss": cell.loss,
        "streams": cell.streams,
        "congestion": (alone or both or {}).get("congestion", cell.congestion),
        "bytes": size,
        "share": None if alone is None else MESSAGES * full / alone["seconds"],
        "share_both": None if both is None else MESSAGES * full / both["seconds"],
        "share_first": None if alone is None else full / alone["first"],
        "round_trip": (alone or both or {}).get("round_trip"),
    }


def _exchange(net: Network, size: int, streams: int, both: bool, limit: float) -> dict[str, Any] | None:
    """What the ranks saw, the slower of the two where both received; None where they took too long."""
    try:
        results = net.run(exchange, size, streams, both, timeout=limit)
    except LabTimeout:
        return None
    receivers = list(results) if both else [results[1]]
    slowest = {name: max(seen[name] for seen in receivers) for name in ("first", "seconds")}
    return {**slowest, "round_trip": results[0]["round_trip"], "congestion": results[0]["congestion"]}


def describe(row: dict[str, Any]) -> str:
    """A row's combination in words."""
    return f"{link_of(row)}, {row['streams']} flow{'s' if row['streams'] > 1 else ''}"


def _percent(share: float | None) -> str:
    return "no end" if share is None else f"{100 * share:.1f} %"


def _show(rows: list[dict[str, Any]], size: int) -> None:
    cells = [
        (
            show_rate(row["rate"]),
            f"{1e3 * row['latency']:g} ms",
            f"{100 * row['loss']:g} %",
            row["congestion"] or "–",
            row["streams"],
            "–" if row["round_trip"] is None else f"{1e3 * row['round_trip']:.1f}",
            _percent(row["share_first"]),
            _percent(row["share"]),
            _percent(row["share_both"]),
        )
        for row in rows
    ]
    columns = (
        "rate", "latency", "loss", "congestion", "flows", "round trip ms", "first message", f"{MESSAGES} after it",
        "both ways",
    )  # fmt: skip
    caption = "payload against the nominal rate; both ways at once: of each way, the slower one"
    table(f"Messages of {show_bytes(size)} between two hosts", columns, cells, caption)
