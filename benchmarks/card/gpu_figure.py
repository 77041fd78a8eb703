"""The figure of section `quality`: python benchmarks/card/gpu_figure.py docs/gpu.json docs/figures/gpu-quality.png"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

RATE = 1e8  # bit/s, for the second panel
LOOK = {
    "fp32": ("black", "-"), "bf16": ("grey", "--"), "direct 2/4": ("tab:red", ":"), "direct 3/6": ("tab:orange", ":"),
    "direct 4/8": ("tab:olive", ":"), "AQ 2/4": ("tab:red", "-"), "AQ 3/6": ("tab:orange", "-"),
    "AQ 4/8": ("tab:olive", "-"), "ours 3/3": ("tab:blue", "-"),
}  # fmt: skip


def draw(section: dict[str, Any], path: str | Path) -> None:
    """Held-out loss by step, and by the time that one boundary's frames take on a slow link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in section["rows"]:
        by_method[row["method"]].append(row)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, (colour, line) in LOOK.items():
        rows = by_method[name]
        points = len(rows[0]["held_out"])
        loss = [sum(row["held_out"][i] for row in rows) / len(rows) for i in range(points)]
        steps = [rows[0]["steps"] * i / (points - 1) for i in range(points)]
        left.plot(steps, loss, line, color=colour, label=name)
        right.plot([sent * 8 / RATE / 60 for sent in rows[0]["bytes"]], loss, line, color=colour)
    left.set(xlabel="step", ylabel="held-out loss, mean of three seeds", ylim=(0.8, 0.95))
    right.set(xlabel="minutes of one boundary's frames at 100 Mbit/s (computed from bytes)", xscale="log")
    left.legend(ncols=2, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["quality"], sys.argv[2])
