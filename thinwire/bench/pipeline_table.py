"""The tables of `thinwire bench pipeline`, and the real link that a rate stands for."""

from __future__ import annotations

import statistics
from typing import Any

from thinwire.bench.pipeline_modes import MODES
from thinwire.quantities import half_interval, show_bytes, show_rate
from thinwire.terminal import table

LOSS = ("mode", "seeds", "loss", "over fp32", "± 95 %", "each", "warm")
LOSS_CAPTION = "over fp32: mean over paired seeds of the relative difference after the last epoch"
COLUMNS = ("rate", "mode", "cold s", "warm s", "× fp32", "× bf16", "ideal", "5 epochs")
CAPTION = (
    "slowest rank, median. ideal: 1/((1 − s) + s·bits/32) with s the wire's share of the fp32 step at that rate. 5 "
    "epochs: over fp32, the first epoch cold"
)
BYTES = ("mode", "predicted", "framed", "counted")
BYTES_CAPTION = (
    "over all timed steps and hosts: predicted by closed form (every message compressed), framed as sent, counted by "
    "the lab from outside"
)


def show(result: dict[str, Any], names: list[str]) -> None:
    """Print the tables of `result`, the document of the bench, for the modes `names`."""
    if result["loss"]:
        cells = [(name, *cell) for name in names if (cell := loss_cells(result, name))]
        table("held-out loss, evaluated uncompressed", LOSS, cells, LOSS_CAPTION)
    if result["time"]:
        rows = sorted(result["time"], key=lambda row: -(row["rate"] or 1e99))
        table("seconds per step", COLUMNS, [_time_cells(result, row) for row in rows], CAPTION)
        table("bytes", BYTES, [_byte_cells(row) for row in rows if "counted" in row], BYTES_CAPTION)
        for line in stands_for(result):
            print(line)


def loss_cells(result: dict[str, Any], name: str) -> tuple[Any, ...] | None:
    """Of mode `name` in `result`: (seeds, loss, relative difference to fp32, half its confidence interval, each seed's,
    share of warm visits)."""
    rows = [row for row in result["loss"] if row["mode"] == name]
    base = {row["seed"]: row["losses"][-1] for row in result["loss"] if row["mode"] == "fp32"}
    if not rows:
        return None
    gaps = [row["losses"][-1] / base[row["seed"]] - 1 for row in rows if row["seed"] in base]
    visits = summed(epoch for row in rows for epoch in row["epochs"])
    warm = visits["warm"] / (visits["warm"] + visits["cold"]) if visits["warm"] else None
    mean = statistics.fmean(row["losses"][-1] for row in rows)
    each = ", ".join(f"{100 * gap:+.2f}" for gap in gaps)
    over = f"{100 * statistics.fmean(gaps):+.2f} %" if gaps else None
    return len(rows), mean, over, _percent(half_interval(gaps)), each, _percent(warm)


def _time_cells(result: dict[str, Any], row: dict[str, Any]) -> tuple[Any, ...]:
    fp32, bf16 = (_warm(result, name, row["rate"]) for name in ("fp32", "bf16"))
    five = row["cold"] + 4 * row["warm"]
    return (
        show_rate(row["rate"]), row["mode"], row["cold"], row["warm"], fp32 and fp32 / row["warm"],
        bf16 and bf16 / row["warm"], ideal(result, row), fp32 and 5 * fp32 / five,
    )  # fmt: skip


def _byte_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    framed = "–" if row["framed"] is None else show_bytes(row["framed"])
    return row["mode"], show_bytes(row["predicted"]), framed, show_bytes(row["counted"])


REAL = (1600, 12, 1024)  # width, layers per stage and length: GPT2-XL in four stages
REAL_FLOPS = {"a GPU of 100 TFLOP/s (an A100's half)": 1e14, "one of 25 TFLOP/s (a good home GPU)": 2.5e13}


def stands_for(result: dict[str, Any]) -> list[str]:
    """One line per rate in `result`: exposed wire over the rest of the fp32 step, and where GPT2-XL would meet that
    ratio.

    The same schedule exposes the same share of a boundary's bits, so bits and seconds scale to the real model's: 32
    bits per value, 72·layers·width² operations per token, forward and backward, over the pipeline's filling as well."""
    if "exposed_bits" not in result:
        return []
    setup, lines = result["setup"], []
    width, layers, length = REAL
    here = 32 * setup["microbatches"] * setup["rows"] * setup["length"] * setup["width"]
    bits = result["exposed_bits"] / here * 32 * setup["microbatches"] * length * width
    tokens = (setup["microbatches"] + setup["stages"] - 1) * length
    for rate in sorted({row["rate"] for row in result["time"] if row["rate"] is not None}, reverse=True):
        ratio = result["exposed_bits"] / rate / result["fp32_unlimited"]
        links = [
            f"{show_rate(bits / (ratio * 72 * layers * width**2 * tokens / flops))} with {name}"
            for name, flops in REAL_FLOPS.items()
        ]
        lines.append(
            f"{show_rate(rate)}: wire/compute {ratio:.1f} (s = {100 * ratio / (1 + ratio):.1f} %), as GPT2-XL in four "
            f"stages over {', or '.join(links)}"
        )
    return lines


def ideal(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """The speed-up that compression of the wire's share of the fp32 step to bits/32 would give; `row`: of the times in
    `result`."""
    free, slow = _warm(result, "fp32", None), _warm(result, "fp32", row["rate"])
    if free is None or slow is None or row["rate"] is None:
        return None
    s = max(0.0, 1 - free / slow)
    return 1 / ((1 - s) + s * statistics.fmean(MODES[row["mode"]].bits) / 32)


def _warm(result: dict[str, Any], name: str, rate: float | None) -> float | None:
    return next((row["warm"] for row in result["time"] if row["mode"] == name and row["rate"] == rate), None)


def summed(counts: Any) -> dict[str, int]:
    """The sum of `counts`, dictionaries of numbers, key by key."""
    out: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            out[name] = out.get(name, 0) + count
    return out


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"
