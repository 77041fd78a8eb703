"""The figure of `thinwire bench link`: the share of the rate against the number of flows, one line per link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.bench.link.options import link_of
from thinwire.errors import UsageError

TITLES = {"share": "one way", "share_both": "both ways at once"}


def draw(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Draw `rows` to `path`; what did not end stands at zero."""
    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(link_of(row), []).append(row)
    streams = sorted({row["streams"] for row in rows})
    for axes, (value, title) in zip(figure.subplots(1, 2, sharey=True), TITLES.items()):
        for link, mine in lines.items():
            points = sorted((row["streams"], 100 * (row[value] or 0.0)) for row in mine)
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=link)
        axes.set(title=title, xlabel="flows", xscale="log", ylim=(0, 105))
        axes.set_xticks(streams, [str(count) for count in streams])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("% of the nominal rate")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None
