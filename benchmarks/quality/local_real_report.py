"""What local_real.py found: a table, every trial, and a figure.

    python benchmarks/quality/local_real_report.py docs/results/local-real.jsonl --table --trials --figure PATH

Losses are held-out, at what all sites share. Two differences to fp32 data parallel with the same seed: in percent of
its loss, and in percent of what it learns, since a model that knows much before has little to lose. ± is half of a 95 %
interval over paired seeds (Student's t). Bytes are those that thinwire sends; SparseLoCo's are given as published, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from local_frontier import done
from local_frontier_report import fewer, steps_to

from thinwire.quantities import half_interval

Row = dict[str, Any]
EXACT = "fp32 per step"
PUBLISHED = 14 / 10  # bits per entry: 12 of them an index, as against thinwire's
Kind = tuple[str, int, int, bool, float]  # method, H, sites, sites have text of their own, Adam's second beta
STYLES = {
    "LocalSGD": "D", "DiLoCo": "s", "Streaming DiLoCo": "o", "SparseLoCo": "^", "ours": "v", "ours, 1 bit": "<",
    "ours, 2 bits": "P", "4 bits per step": "*", "large batch": "x",
}  # fmt: skip
COLORS = [f"C{i}" for i in range(len(STYLES))]
# by method: what a row of the table of times is called, its round in local_seconds.py, and how many of those a round is
ROUNDS: dict[str, dict[str, tuple[str, float]]] = {
    "fp32 per step": {"fp32 DDP": ("fp32", 1), "bf16 DDP": ("fp32", 0.5)},
    "4 bits per step": {"4 bits per step": ("four bits per step", 1)}, "LocalSGD": {"LocalSGD": ("fp32", 1)},
    "Streaming DiLoCo": {"Streaming DiLoCo": ("Streaming DiLoCo, a fragment of 4", 4)},
    "SparseLoCo": {"SparseLoCo": ("SparseLoCo, local-max", 1)}, "ours": {"`local-max`": ("SparseLoCo, local-max", 1)},
    "ours, 1 bit": {"`local-signs`": ("local-signs", 1)},
    "ours, 2 bits": {"two bits": ("two bits, a fragment of 8", 8)},
}  # fmt: skip


def settings(row: Row) -> str:
    """What was tried, as one word."""
    table = row["table"]
    words = [f"{row['lr']:g}"] + ([f"β₂ {row['beta2']:g}"] if row.get("beta2", 0.95) != 0.95 else [])
    if table:
        momentum = f", momentum {table['momentum']:g}" if table["momentum"] else ""
        words.append(f"outer {table['outer_lr']:g}{momentum}")
    return ", ".join(words)


def kinds(rows: list[Row]) -> dict[Kind, list[dict[int, Row]]]:
    """Trials of every kind by seed, the best on the first seed first."""
    found: dict[Kind, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        what = json.dumps([row["lr"], row["table"]], sort_keys=True)
        kind = row["method"], row["every"], row["sites"], row["apart"], row.get("beta2", 0.95)
        found[kind][what][row["seed"]] = row
    return {kind: sorted(tried.values(), key=_first) for kind, tried in found.items()}


def _first(seeds: dict[int, Row]) -> tuple[int, float]:
    return min(seeds), seeds[min(seeds)]["held"]


def lost(mine: dict[int, Row], exact: dict[int, Row]) -> tuple[list[float], list[float]]:
    """By seed: percent of fp32's loss, and of what fp32 learns."""
    both = [(mine[seed]["held"], exact[seed]) for seed in sorted(mine) if seed in exact]
    over = [100 * (held / other["held"] - 1) for held, other in both]
    start = [other.get("start", 2 * other["held"]) for _, other in both]
    return over, [100 * (held - other["held"]) / (s - other["held"]) for (held, other), s in zip(both, start)]


def said(values: list[float]) -> str:
    """Mean ± half of the interval."""
    if not values:
        return "–"
    half = half_interval(values) if len(values) > 1 else None
    return f"{statistics.fmean(values):+.2f}" + ("" if half is None else f" ± {half:.2f}") + " %"


def table(rows: list[Row]) -> list[str]:
    """Markdown, by how many times fewer bytes."""
    found = kinds(rows)
    heads = ["method", "sites", "H", "rates", "trials", "loss, seed 0", "over fp32", "of what fp32 learns", "seeds"]
    out = [f"| {' | '.join(heads)} | fewer bytes |"]
    out.append("|---|---|---|---|---|---|---|---|---|---|")
    for kind in sorted(found, key=lambda kind: (*kind[:1:-1], fewer(_any(found[kind][0])), kind)):
        method, every, sites, apart, _ = kind
        best = found[kind][0]
        over, share = lost(best, reference(found, kind))
        times = f"{fewer(_any(best)):,.0f}×"
        if method == "SparseLoCo":
            times += f" (published: {fewer(_any(best)) / PUBLISHED:,.0f}×)"
        name = method + (", text apart" if apart else "")
        out.append(
            f"| {name} | {sites} | {every or '–'} | {settings(_any(best))} | {len(found[kind])} | "
            f"{_any(best)['held']:.4f} | {said(over)} | {said(share)} | {len(best)} | {times} |"
        )
    return out


def reference(found: dict[Kind, list[dict[int, Row]]], kind: Kind) -> dict[int, Row]:
    """fp32 data parallel by seed, with the same second beta. With text apart it has the same text in all."""
    places = [(EXACT, 0, sites, apart, kind[4]) for sites, apart in (kind[2:4], (4, kind[3]), (4, False))]
    return next(found[place][0] for place in places if place in found)


def _any(seeds: dict[int, Row]) -> Row:
    return seeds[min(seeds)]


def trials(rows: list[Row]) -> list[str]:
    """Every trial on seed 0, a kind per line."""
    out = []
    for kind, tried in sorted(kinds(rows).items()):
        words = [f"{settings(_any(one))}: {_any(one)['held']:.4f}" for one in tried]
        out.append(
            f"- {kind[0]}, H = {kind[1]}, {kind[2]} sites{', text apart' if kind[3] else ''}: {'; '.join(words)}"
        )
    return out


def times(rows: list[Row], seconds: dict[str, dict[str, float]], target: float, computing: float) -> list[str]:
    """Markdown: how long seed 0 takes to a loss. seconds: of a round, by its name in local_seconds.py and by rate.
    computing: seconds of a step without a network."""
    out = [
        f"| loss {target:g} | steps | rounds | {' | '.join(seconds['fp32'])} |",
        "|---" * (3 + len(seconds["fp32"])) + "|",
    ]
    for kind, tried in kinds(rows).items():
        row = tried[0].get(0)
        if row is None or kind[2] != 4 or kind[3] or kind[0] not in ROUNDS:
            continue
        steps = steps_to(row, target)
        for name, (round_, part) in ROUNDS[kind[0]].items():
            said_ = f"{name}{f', H = {kind[1]}' if kind[1] else ''}, β₂ {kind[4]:g}"
            if steps is None:
                out.append(f"| {said_} | not reached |" + " |" * (1 + len(seconds["fp32"])))
                continue
            count = steps / max(1, kind[1])
            cells = [_duration(steps * computing + count * part * found) for found in seconds[round_].values()]
            out.append(f"| {said_} | {steps:,.0f} | {count:,.0f} | {' | '.join(cells)} |")
    return out


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.1f} min"


def draw(rows: list[Row], path: Path) -> None:
    """Loss over fp32's against fewer bytes, with four sites."""
    from matplotlib.figure import Figure

    found = kinds(rows)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (method, mark), color in zip(STYLES.items(), COLORS):
        for beta, fill in ((0.95, "none"), (0.999, "full")):
            points = []
            for kind in found:
                if kind[0] == method and kind[2] == 4 and not kind[3] and kind[4] == beta and method != EXACT:
                    over, _ = lost(found[kind][0], reference(found, kind))
                    half = half_interval(over) if len(over) > 1 else None
                    points.append((fewer(_any(found[kind][0])), statistics.fmean(over), half or 0.0))
            if points:
                x, y, error = zip(*sorted(points))
                named = f"{method}, β₂ {beta:g}"
                axes.errorbar(
                    x, y, error, marker=mark, markersize=9, fillstyle=fill, color=color, capsize=3, label=named
                )
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="dashed")
    axes.axvline(1000, color="grey", linewidth=0.8, linestyle="dashed")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("times fewer bytes per token than fp32 data parallel")
    axes.set_ylabel("held-out loss over fp32's with the same β₂, %")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a file of rows")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--steps", type=int, default=500, help="of the runs that are shown (default 500)")
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("--figure", type=Path)
    parser.add_argument(
        "--times", type=Path, metavar="SECONDS", help="time to --loss, by what local_seconds.py --json wrote"
    )
    parser.add_argument("--loss", type=float, default=2.03)
    parser.add_argument("--computing", type=float, default=0.06, help="seconds of a step without a network")
    options = parser.parse_args()
    rows = [row for row in done(options.rows) if row["steps"] == options.steps]
    if options.table:
        print("\n".join(table(rows)))
    if options.trials:
        print("\n".join(trials(rows)))
    if options.times:
        seconds = json.loads(options.times.read_text())["seconds"]
        print("\n".join(times(rows, seconds, options.loss, options.computing)))
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
