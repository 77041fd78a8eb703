"""What local_frontier.py found: a table, a figure, and the time to one loss over slow links.

    python benchmarks/quality/local_frontier_report.py out --table --figure docs/figures/local-frontier.svg --times 0.05

Losses are held-out, at what all sites share. Differences are to fp32 data parallel with the same seed, in percent of
its loss, the mean over seeds with a 95 % interval (Student's t). Of local steps the loss after the method's own last
round stands beside that after a last round in four bits per value, residuals included.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from frontier_jobs import LOW, ORDER, SITES
from local_frontier import done
from stacked_run import PER_STEP
from stacked_sites import per_step_wire, table_of

from thinwire.collectives import AlternatingLowRank, Dense, Gather, TwoHop
from thinwire.local_steps.schedule import Schedule

Row = dict[str, Any]
HIGHEST = 45.0  # percent: what lies above is named beside the figure
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # by the number of seeds
RATES = (10e6, 100e6, 300e6)  # bits per second
LATENCY = 0.05  # seconds, one way
EXACT = "fp32 per step"
HOPS = {Gather: 1, TwoHop: 2, AlternatingLowRank: 2, Dense: 2 * (SITES - 1)}  # latencies of a round in a row
Kind = tuple[str, int, int, bool]  # method, sites, H, sites have text of their own


def grouped(rows: list[Row]) -> dict[Kind, dict[int, Row]]:
    """The grid's rows with the most steps, by kind and seed. Where a kind was run with several settings, those of the
    least loss on the first seed count."""
    grid = [row for row in rows if row["stage"] == "grid"]
    if not grid:
        raise SystemExit("no line of the grid is there: only the tuning was run")
    most = max(row["steps"] for row in grid)
    found: dict[Kind, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in grid:
        if row["steps"] == most and not row.get("late"):
            settings = json.dumps([row.get("lr"), row["table"], row.get("site_adam", False), row.get("moments")])
            found[named(row), row["sites"], row["every"], row["apart"]][settings][row["seed"]] = row
    return {kind: min(tried.values(), key=_first_loss) for kind, tried in found.items()}


def _first_loss(seeds: dict[int, Row]) -> tuple[int, float]:
    return min(seeds), seeds[min(seeds)]["held"]


def named(row: Row) -> str:
    """The method; low rank with what it sends, since H alone does not tell."""
    wire = row["table"].get("wire", {})
    rank = wire.get("gradient", {}).get("rank") if isinstance(wire, dict) else None
    return f"{row['method']}, rank {rank}" if rank and row["method"] == LOW else str(row["method"])


def reference(kinds: dict[Kind, dict[int, Row]], apart: bool) -> dict[int, Row]:
    """fp32 data parallel by seed. Where sites have text of their own it has the same text in all."""
    return kinds.get((EXACT, SITES, 0, apart)) or kinds.get((EXACT, SITES, 0, False), {})


def over(mine: dict[int, Row], exact: dict[int, Row], what: str = "held") -> tuple[float, float, int] | None:
    """(mean, half of the 95 % interval, seeds) of the loss over fp32's, in percent; None without a common seed."""
    found = [100 * (mine[s][what] / exact[s]["held"] - 1) for s in mine if s in exact and what in mine[s]]
    if not found:
        return None
    mean, count = sum(found) / len(found), len(found)
    if count == 1:
        return mean, math.nan, 1
    deviation = math.sqrt(sum((x - mean) ** 2 for x in found) / (count - 1))
    return mean, T_95.get(count, 2.0) * deviation / math.sqrt(count), count


def place(kind: Kind) -> tuple[bool, int, int, int, str]:
    method, sites, every, apart = kind
    first = method.split(", rank")[0]
    return apart, sites != SITES, sites, ORDER.index(first) * 1000 + every if first in ORDER else 10**6, method


def fewer(row: Row) -> float:
    """How many times fewer bytes than fp32 data parallel."""
    return row["fp32_bytes_per_token"] / row["bytes_per_token"]


def table(rows: list[Row]) -> list[str]:
    """Markdown."""
    kinds = grouped(rows)
    out = ["| method | sites | H | held-out loss | over fp32 | its own end | last round dense | seeds | fewer bytes |"]
    out.append("|---|---|---|---|---|---|---|---|---|")
    for kind in sorted(kinds, key=place):
        mine = kinds[kind]
        row = mine[min(mine)]
        exact = reference(kinds, kind[3])
        said, anchor, last = (_percent(over(mine, exact, what)) for what in ("held", "held_anchor", "held_flush"))
        name = f"{kind[0]}{', text apart' if kind[3] else ''}"
        often = str(kind[2]) if kind[2] else "–"
        out.append(
            f"| {name} | {kind[1]} | {often} | {row['held']:.4f} | {said} | {anchor} | {last} | {len(mine)} | "
            f"{fewer(row):,.0f}× |"
        )
    return out


def _percent(found: tuple[float, float, int] | None) -> str:
    if found is None:
        return "–"
    return f"{found[0]:+.2f} %" if math.isnan(found[1]) else f"{found[0]:+.2f} ± {found[1]:.2f} %"


def tuned(rows: list[Row]) -> list[str]:
    """Markdown: what the tuning found, by loss."""
    found = sorted((row for row in rows if row["stage"] == "tune"), key=lambda row: row["held"])
    out = ["| method | lr | outer lr | loss | at the anchor | fewer bytes |", "|---|---|---|---|---|---|"]
    for row in found:
        outer = row["table"].get("outer_lr", "–")
        anchor = f"{row['held_anchor']:.4f}" if row["flush"] else "–"
        out.append(f"| {row['method']} | {row['lr']} | {outer} | {row['held']:.4f} | {anchor} | {fewer(row):,.0f}× |")
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Loss over fp32's against fewer bytes, with four sites."""
    from matplotlib.figure import Figure

    kinds = grouped(rows)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes, beyond = figure.add_subplot(), []
    for method, mark in zip([*ORDER[1:], LOW], "Dso^vP*Xh"):
        points = []
        for kind in kinds:
            found = over(kinds[kind], reference(kinds, False))
            if kind[0].split(", rank")[0] == method and kind[1] == SITES and not kind[3] and found is not None:
                row = next(iter(kinds[kind].values()))
                points.append((fewer(row), found[0], 0.0 if math.isnan(found[1]) else found[1]))
        if points and min(point[1] for point in points) > HIGHEST:
            beyond.append(f"{method} (not shown):\n+{min(point[1] for point in points):.0f} % and more")
        elif points:
            x, y, error = zip(*sorted(points))
            axes.errorbar(x, y, yerr=error, marker=mark, capsize=3, label=method)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="dashed")
    axes.axvline(1000, color="grey", linewidth=0.8, linestyle="dashed")
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes per token than fp32 data parallel")
    axes.set_ylabel("held-out loss over fp32's, %")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), title="\n".join(beyond) or None)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# --- time to a loss


def steps_to(row: Row, target: float) -> float | None:
    """Inner steps after which the loss has come to the target, between two looks by a straight line."""
    before: tuple[float, float] | None = None
    for step, loss in [*row["curve"], (row["steps"], row["held"])]:
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def step_seconds(row: Row, rate: float, computing: float, share: float = 1.0) -> float:
    """A step with its part of the rounds; `share` of the bytes that were counted (bf16 per step sends half of fp32)."""
    rounds, delay, reduction = row["steps"] / max(1, row["every"]), 0, per_step_wire("off")
    if row["table"]:
        settings = table_of(row["table"], row["every"])
        schedule, delay = Schedule.of(settings), settings.delay
        rounds = sum(len(schedule.sent(step)) for step in range(1, row["steps"] + 1))
        reduction = settings.wire.gradient or reduction
    elif row["method"] in PER_STEP:
        reduction = per_step_wire(PER_STEP[row["method"]])
    one = share * 8 * row["bytes"] / rounds / rate + HOPS[type(reduction.collective)] * LATENCY
    return computing + max(0.0, one - delay * computing) * rounds / row["steps"]


def times(rows: list[Row], computing: float, tolerance: float) -> list[str]:
    """Markdown: minutes until the loss is within `tolerance` percent of what fp32 comes to; seed 0, four sites.

    computing: seconds of a step without a network; 0: those that the card took for the step of fp32 data parallel.
    """
    kinds = grouped(rows)
    exact = reference(kinds, False)[0]
    computing = computing or exact["seconds"] / exact["steps"]
    target = exact["held"] * (1 + tolerance / 100)
    named = [("fp32 DDP", exact, 1.0), ("bf16 DDP", exact, 0.5)]
    for kind in sorted(kinds, key=place):
        if kind[0].split(", rank")[0] in (*ORDER[1:], LOW) and kind[1] == SITES and not kind[3] and 0 in kinds[kind]:
            often = f", H = {kind[2]}" if kind[2] else ""
            named.append((kind[0] + often, kinds[kind][0], 1.0))
    out = [f"Loss {target:.4f}; a step without a network {1e3 * computing:.1f} ms; {1e3 * LATENCY:.0f} ms one way.", ""]
    out.append("| | steps | " + " | ".join(f"{rate / 1e6:.0f} Mb/s" for rate in RATES) + " |")
    out.append("|---|---|" + "---|" * len(RATES))
    for name, row, share in named:
        steps = steps_to(row, target)
        if steps is None:
            out.append(f"| {name} | not reached |" + " – |" * len(RATES))
            continue
        seconds = [steps * step_seconds(row, rate, computing, share) for rate in RATES]
        out.append(f"| {name} | {steps:,.0f} | " + " | ".join(_said(s) for s in seconds) + " |")
    return out


def _said(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.1f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of frontier.jsonl, or such a file")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--tuned", action="store_true", help="what the tuning found")
    parser.add_argument("--figure", type=Path)
    said = "time to one loss; seconds of a step without a network, by default the card's for all sites' tokens"
    parser.add_argument("--times", type=float, metavar="SECONDS", nargs="?", const=0.0, help=said)
    parser.add_argument("--tolerance", type=float, default=1.0, help="percent over fp32's loss, for --times")
    options = parser.parse_args()
    rows = done(options.out / "frontier.jsonl" if options.out.is_dir() else options.out)
    if options.tuned:
        print("\n".join(tuned(rows)))
    if options.table:
        print("\n".join(table(rows)))
    if options.times is not None:
        print("\n".join(times(rows, options.times, options.tolerance)))
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
