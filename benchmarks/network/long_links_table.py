"""Tables of long_links.py's rows, as markdown; predictions are simulated here, from what ranks measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from thinwire.config.presets import written_out
from thinwire.planner.simulate import Result, simulate
from thinwire.train.config.sections import read_config
from thinwire.train.tune.auto import KINDS, level_tables
from thinwire.train.tune.measured import Measured

Row = dict[str, Any]


def prediction(row: Row) -> Result:
    """The planner's simulated step, from what the row's ranks measured."""
    config = read_config(row["document"])
    levels = {kind: len(tables) - 1 for kind, tables in level_tables(config).items()}
    fused = written_out(config.wire).get("embedding", {}).get("sync") in ("fused", "rows")
    assert set(levels) == set(KINDS)
    return simulate(Measured(**row["found"]).step(config.mesh.plan(), levels, fused))


def show(path: Path) -> None:
    """Print all tables that the rows allow."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    of: Callable[..., list[Row]] = lambda *parts: [row for row in rows if row["part"] in parts]  # noqa: E731
    if of("predict", "loss"):
        _predictions(of("predict", "loss"))
    if of("opening"):
        taken = [row["measured"] for row in of("opening")]
        print(
            f"connections of {of('opening')[0]['streams']} streams between four hosts, {_link(of('opening')[0])}: "
            f"{statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f}, {len(taken)} times)\n"
        )
    if of("microbatches"):
        heads = (
            "link",
            "[mesh] microbatches",
            "ahead, micro-batches",
            "simulated, s",
            "seconds per step (least to most)",
        )
        decided = [(row, row["decided"]) for row in of("microbatches")]
        _print(heads, (
            (
                _link(row), row["variant"], f"{made['ahead']}, {made['microbatches'] or row['variant']}",
                f"{made['seconds']:.2f}", _spread(row),
            )
            for row, made in decided
        ))  # fmt: skip
    if of("early"):
        _print(("link", "schedule", "gradients", "seconds per step (least to most)", "waiting for gradients"), ((
            _link(row), row["collective"], "early" if row["variant"] == "now" else "late", _spread(row),
            f"{statistics.median(row['waited'][3:]):.2f}",
        ) for row in of("early")))  # fmt: skip
    if of("goals"):
        _print(("link", "slow start after a silence", "seconds per step (least to most)"), (
            (_link(row), "yes" if row.get("slow_start_after_idle", True) else "no", _spread(row)) for row in of("goals")
        ))  # fmt: skip
    if of("variants", "trees"):
        heads = ("max, 20 Mb/s, cold", "seconds per step (least to most), each run", "waiting for gradients")
        _print((*heads, "first and last stage: pass + gradients + vote + optimiser"), (
            (
                name, "; ".join(map(_spread, some)),
                "; ".join(f"{statistics.median(row['waited'][3:]):.2f}" for row in some), _parts(some[0]),
            )
            for name, some in _by(of("variants", "trees"), "variant")
        ))  # fmt: skip
    if of("allreduce"):
        _collectives(of("allreduce"))


def _predictions(rows: list[Row]) -> None:
    lines, ratios, lossy = [], [], []
    for row in rows:
        found = prediction(row)
        ratio = row["measured"] / found.makespan
        (lossy if row["part"] == "loss" else ratios).append(ratio)
        spent = ", ".join(f"{what} {seconds:.2f}" for what, seconds in found.spent.items())
        about = (_link(row), row["wire"], row["streams"], f"{found.makespan:.2f}", f"{row['measured']:.2f}")
        lines.append((*about, f"{ratio:.2f}", spent))
    heads = ("link", "wire", "streams", "simulated, s", "measured, s", "measured ÷ simulated", "simulated path, s")
    _print(heads, lines)
    for name, some in (("without loss", ratios), ("with 0.1 % loss", lossy)):
        if some:
            errors = [abs(1 - 1 / ratio) for ratio in some], [abs(ratio - 1) for ratio in some]
            of_measured, of_simulated = (statistics.median(kind) for kind in errors)
            print(
                f"{len(some)} cells {name}: median error {of_measured:.1%} of the measured step ({of_simulated:.1%} of "
                f"the simulated), measured ÷ simulated {min(some):.2f} to {max(some):.2f}\n"
            )


def _collectives(rows: list[Row]) -> None:
    latencies = sorted({row["latency"] for row in rows}, key=lambda text: float(text.removesuffix("ms")))
    lines = []
    for name, some in _by(rows, "collective"):
        at = {row["latency"]: row for row in some}
        times = [f"{at[x]['measured']:.2f}" if x in at else "–" for x in latencies]
        lines.append((name, *times, f"{some[0]['bytes'] / 1e6:.2f}"))
    _print((f"{rows[0]['hosts']} hosts, {_rate(rows[0])}", *(f"{x} one way" for x in latencies), "MB per rank"), lines)


def _by(rows: list[Row], key: str) -> list[tuple[str, list[Row]]]:
    return [(name, [row for row in rows if row[key] == name]) for name in dict.fromkeys(row[key] for row in rows)]


def _spread(row: Row) -> str:
    counted = row["steps"][3:]
    return f"{row['measured']:.2f} ({min(counted):.2f} to {max(counted):.2f})"


def _parts(row: Row) -> str:
    """Of a step on the first and on the last stage of a replica, as the ranks timed them."""
    return "; ".join(" + ".join(f"{x:.2f}" for x in rank.values()) for rank in row.get("spans", [])[:2])


def _rate(row: Row) -> str:
    return str(row["rate"]).replace("mbit", " Mb/s")


def _link(row: Row) -> str:
    parts = [_rate(row), row["latency"].replace("ms", " ms")]
    parts += [] if row["loss"] == "0%" else [f"{row['loss']} loss"]
    parts += [] if row.get("slow_start_after_idle", True) else ["no slow start after idle"]
    return ", ".join([*parts, *([row["congestion"]] if "congestion" in row else [])])


def _print(heads: Iterable[str], lines: Iterable[Iterable[object]]) -> None:
    heads = list(heads)
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |")
    print()
