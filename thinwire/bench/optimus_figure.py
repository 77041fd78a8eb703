"""Step time against the number of stages whose gradients are compressed: simulated, measured, and the rule's pick."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(part: dict[str, Any], path: str) -> None:
    """Draw `part`, the result's "stages", to `path`."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    counts = [len(row["stages"]) for row in part["rows"]]
    figure, axis = plt.subplots(figsize=(6, 4))
    for row in part["rows"]:
        axis.plot([len(row["stages"])] * len(row["taken"]), row["taken"], ".", color="C0", alpha=0.4)
    medians = [row["seconds"] for row in part["rows"]]
    axis.plot(counts, medians, "o-", color="C0", label="measured (median; steps as dots)")
    axis.plot(counts, [row["simulated"] for row in part["rows"]], "s--", color="C1", label="simulated")
    said = f"slack picks {part['picked']}: measured"
    axis.plot([len(part["picked"])], [part["slack"]["seconds"]], "*", ms=15, color="C3", label=said)
    axis.set_xticks(counts)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("stages whose gradients are compressed, the earliest first")
    axis.set_ylabel("seconds per step")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
