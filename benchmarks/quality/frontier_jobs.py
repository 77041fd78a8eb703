"""The runs of the frontier: methods and their tables `[local]`, which rates are tried, what is run with the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from stacked_model import Size
from stacked_run import Job

Row = dict[str, Any]
STAGES = ("tune", "frontier", "seeds", "ablations", "sites", "apart")
RATES = (1e-3, 2e-3)  # of the inner optimiser
HS = (10, 30, 100)
SITES, MIDDLE = 4, 30
OURS, MORE, TWO_BITS = "ours", "ours, four times as many", "ours, two bits"


def sparse(
    hops: bool = True, k: int = 128, tile: int = 64, decay: float = 0.95, values: Any = None, delay: int = 1,
    lr: float = 1.0, momentum: float = 0.0,
) -> Row:  # fmt: skip
    """A table of ours: the k largest of every tile, gathered or in two hops, with error feedback."""
    values = {"codec": "two_levels", "block": 512} if values is None else values
    codec = {"codec": "tile_topk", "k": k, "tile": tile} | ({"values": values} if values else {})
    wire = {
        "collective": "two_hop" if hops else "gather", "codec": codec, "exact_dims": 0,
        "memory": {"memory": "error_feedback", "decay": decay},
    }  # fmt: skip
    return {"wire": {"gradient": wire}, "delay": delay, "outer_lr": lr, "momentum": momentum, "nesterov": momentum > 0}


def dense(bits: int) -> Row:
    """All values in so many bits, in two hops, with error feedback and DiLoCo's outer optimiser."""
    codec = {"codec": "quantize", "bits": bits, "scale": "mse"}
    wire = {"collective": "two_hop", "codec": codec, "memory": "error_feedback", "exact_dims": 0}
    return {"wire": {"gradient": wire}, "delay": 1, "outer_lr": 0.7, "momentum": 0.9}


# candidates for ours: name → (table, keep); about as many bytes with four sites
CANDIDATES: dict[str, tuple[Row, float]] = {
    "ours: gathered (local-max)": (sparse(hops=False, k=64), 0.0),
    "ours: gathered, Nesterov 0.5": (sparse(hops=False, k=64, momentum=0.5), 0.0),
    "ours: gathered, keep": (sparse(hops=False, k=64, decay=1.0), 1.0),
    "ours: hops": (sparse(), 0.0),
    "ours: hops, no delay": (sparse(delay=0), 0.0),
    "ours: hops, Nesterov 0.5": (sparse(momentum=0.5), 0.0),
    "ours: hops, keep": (sparse(decay=1.0), 1.0),
    "ours: hops, keep, Nesterov 0.5": (sparse(decay=1.0, momentum=0.5), 1.0),
}
LOCAL: dict[str, Row] = {
    "LocalSGD": {"wire": "off", "outer_lr": 1.0, "momentum": 0.0, "nesterov": False},
    "DiLoCo": {"preset": "diloco"},
    "Streaming DiLoCo": {"preset": "streaming-diloco"},
    "SparseLoCo": {"preset": "sparseloco"},
}
OUTER = {"DiLoCo": (0.4, 0.7), "Streaming DiLoCo": (0.4, 0.7), "SparseLoCo": (0.7, 1.0)}
ORDER = ["fp32 per step", "4 bits per step", "large batch", *LOCAL, OURS, MORE, TWO_BITS]


def tuning(steps: int, batch: int, size: Size) -> list[Job]:
    """Seed 0, the middle H, few steps: inner and outer rates of every method, and the candidates for ours."""

    def job(method: str, every: int, lr: float, table: Row, keep: float = 0.0, flush: bool = False) -> Job:
        return Job(method, SITES, every, 0, steps, lr, table, keep, flush, batch=batch, size=size)

    out = [job("fp32 per step", 0, lr, {}) for lr in (5e-4, *RATES)]
    out += [job("large batch", MIDDLE, lr, {}) for lr in (*RATES, 4e-3)]
    for name, (table, keep) in CANDIDATES.items():
        out += [job(name, MIDDLE, lr, table, keep, flush=True) for lr in RATES]
    for method, table in LOCAL.items():
        outers = OUTER.get(method, (table.get("outer_lr"),))
        out += [job(method, MIDDLE, lr, {**table, "outer_lr": outer}) for lr in RATES for outer in outers]
    return out + [job(TWO_BITS, MIDDLE, lr, dense(2)) for lr in RATES]


def best(rows: list[Row], is_it: Callable[[str], bool]) -> Row:
    """Of the tuning's rows of a method, that with the least loss."""
    mine = [row for row in rows if row["stage"] == "tune" and is_it(row["method"])]
    if not mine:
        raise SystemExit("run --stage tune first: rates are chosen from its lines")
    return min(mine, key=lambda row: min(loss for loss in (*_ends(row), 1e9) if loss == loss))


def _ends(row: Row) -> tuple[float, ...]:
    """The losses that a run may end with: its own, and that without the dense last round where it has one."""
    return (row["held"], row["held_anchor"]) if row["flush"] else (row["held"],)


def with_codec(table: Row, times: int) -> Row:
    """A table of ours that sends so many times more values of every tile."""
    gradient = table["wire"]["gradient"]
    codec = {**gradient["codec"], "k": times * gradient["codec"]["k"]}
    return {**table, "wire": {"gradient": {**gradient, "codec": codec}}}


class Chosen:
    """What the tuning chose, as jobs of the grid.

    rows: all lines of the file. steps, batch, size: of the jobs.
    """

    def __init__(self, rows: list[Row], steps: int, batch: int, size: Size) -> None:
        self.rows, self.steps, self.batch, self.size = rows, steps, batch, size

    def job(self, method: str, every: int, seed: int = 0, sites: int = SITES, apart: bool = False) -> Job:
        """A method with its best rates."""
        tuned = "fp32 per step" if method == "4 bits per step" else method
        row = best(self.rows, lambda m: m.startswith("ours:") if method in (OURS, MORE) else m == tuned)
        table = row["table"] if method != MORE else with_codec(row["table"], 4)
        flush = row["flush"] and not row["held_anchor"] < row["held"]
        how = {"table": table, "keep": row["keep"], "flush": flush, "apart": apart}
        return Job(method, sites, every, seed, self.steps, row["lr"], batch=self.batch, size=self.size, **how)

    def grid(self, methods: list[str], hs: tuple[int, ...], **how: Any) -> list[Job]:
        """Methods × H; those without local steps once."""
        out = []
        for every in hs:
            for method in methods:
                often = 0 if method.endswith("per step") else every
                job = self.job(method, often, **how)
                out += [job] if job not in out else []
        return out

    def ablations(self) -> list[Job]:
        """One thing of ours changed at a time, at the middle H."""
        base = self.job(OURS, MIDDLE)
        found: dict[str, Row] = {}
        gradient = base.table["wire"]["gradient"]
        codec = gradient["codec"]

        def wire(**changed: Any) -> Row:
            return {**base.table, "wire": {"gradient": {**gradient, **changed}}}

        decay = gradient["memory"]["decay"]
        for beta in (0.8, 0.95, 1.0):
            found |= {f"ours, beta {beta}": wire(memory={**gradient["memory"], "decay": beta})} if beta != decay else {}
        for tile, k in ((32, codec["k"] // 4), (128, codec["k"] * 4)):
            found[f"ours, tile {tile}"] = wire(codec={**codec, "tile": tile, "k": k})
        exact = {key: value for key, value in codec.items() if key != "values"}
        found["ours, 32 bits"] = wire(codec=exact)
        found["ours, one magnitude"] = wire(codec={**codec, "values": {"codec": "scaled_sign"}})
        found["ours, four bits"] = wire(codec={**codec, "values": {"codec": "quantize", "bits": 4}})
        found |= {f"ours, delay {delay}": {**base.table, "delay": delay} for delay in (0, 5)}
        return [replace(base, method=name, table=table) for name, table in found.items()]

    def stage(self, name: str) -> list[Job]:
        """The jobs of a stage, the most important first."""
        rivals = ["Streaming DiLoCo", "SparseLoCo", OURS]
        if name == "frontier":
            every = [m for m in ORDER if m not in (MORE, TWO_BITS)]
            local = [m for m in every if not m.endswith("per step")]
            return self.grid(["fp32 per step", OURS, *every, MORE, TWO_BITS], (30, 100)) + self.grid(local, (10,))
        if name == "seeds":
            per_seed = [self.grid(["fp32 per step", *rivals, MORE], (30, 100), seed=seed) for seed in (1, 2)]
            per_seed += [self.grid(rivals, (10,), seed=seed) for seed in (1, 2)]
            return [job for jobs in per_seed for job in jobs]
        if name == "ablations":
            return self.ablations()
        if name == "sites":
            return [job for sites in (8, 2) for job in self.grid(["DiLoCo", *rivals], (MIDDLE,), sites=sites)]
        return self.grid(["fp32 per step", "DiLoCo", *rivals], (MIDDLE,), apart=True)


def key(job: Job, stage: str) -> Row:
    """What tells one line of the file from another."""
    return {**asdict(job), "stage": "tune" if stage == "tune" else "grid"}
