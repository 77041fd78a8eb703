"""Held-out loss against wall-clock for every wire of `thinwire bench train`, one panel per share of the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], wires: list[str], shares: list[float], path: str) -> None:
    """Draw `result`, the document of `thinwire bench train`, to `path`: one panel per share in `shares`, in it all
    `wires`."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, len(shares), figsize=(6 * len(shares), 4.2), squeeze=False, sharey=True)
    for panel, share in zip(axes[0], shares):
        times = {t["wire"]: t for t in result["time"] if t["share"] == share}
        for at, wire in enumerate(wires):
            for row in (r for r in result["loss"] if r["wire"] == wire):
                seconds, losses = zip(*curve_of(row, times[wire])[1:])  # the first is at no time at all
                label = wire if row["seed"] == 0 else None
                panel.plot(seconds, losses, color=f"C{at}", alpha=0.8, lw=1.4, label=label)
        panel.set_xscale("log")
        panel.set_xlabel("seconds of training (log scale)")
        panel.set_title(f"the wire takes {100 * share:.3g} % of an fp32 step", fontsize=10)
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def curve_of(loss: dict[str, Any], time: dict[str, Any]) -> list[tuple[float, float]]:
    """Held-out loss against seconds, of a row `loss` and its `time` per step: the first epoch's steps are cold, the
    others warm."""
    first = loss["steps_per_epoch"]
    return [(min(s, first) * time["cold"] + max(0, s - first) * time["warm"], value) for s, value in loss["evals"]]
