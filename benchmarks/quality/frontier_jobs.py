"""The runs of the frontier: methods and their tables `[local]`, their rates, what is tried and what is run.

Rates are those of least held-out loss in the tuning on seed 0 (docs/results/local-frontier.jsonl, stage "tune").
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stacked_model import Size
from stacked_run import Job

Row = dict[str, Any]
STAGES = ("tune", "frontier", "seeds", "sites", "apart", "ablations")
SITES, MIDDLE = 4, 30
RATES = (1e-3, 2e-3, 4e-3)  # of the inner optimiser, that are tried
OURS = "ours"
LOW = "ours, low rank"
OUR_HS = (1, 3, 10, 30, 100)
HS = (10, 30, 100)  # of the others
PLAIN = {"outer_lr": 1.0, "momentum": 0.0, "nesterov": False}
LOCAL: dict[str, Row] = {
    "LocalSGD": {"wire": "off", **PLAIN},
    "DiLoCo": {"preset": "diloco"},
    "Streaming DiLoCo": {"preset": "streaming-diloco"},
    "SparseLoCo": {"preset": "sparseloco"},
    OURS: {"preset": "local-max"},
}
OUTER: dict[str, tuple[float, ...]] = {  # rates of the outer optimiser that are tried
    "LocalSGD": (1.0,), "DiLoCo": (0.4, 0.7), "Streaming DiLoCo": (0.4, 0.7), "SparseLoCo": (0.7, 1.0, 2.0),
    OURS: (0.7, 1.0, 1.4),
}  # fmt: skip
TUNED: dict[str, tuple[float, float | None]] = {  # (inner, outer rate)
    "fp32 per step": (2e-3, None), "4 bits per step": (2e-3, None), "large batch": (4e-3, None),
    "LocalSGD": (2e-3, 1.0), "DiLoCo": (2e-3, 0.7), "Streaming DiLoCo": (2e-3, 0.7), "SparseLoCo": (2e-3, 2.0),
    OURS: (2e-3, 1.0),
}  # fmt: skip
ORDER = list(TUNED)


def sparse(
    hops: bool = True, k: int = 128, tile: int = 64, decay: float = 0.95, values: Any = None, delay: int = 1,
    lr: float = 1.0, momentum: float = 0.0, keep: float = 0.0,
) -> Row:  # fmt: skip
    """A table of ours: the k largest of every tile, gathered or in two hops, with error feedback."""
    values = {"codec": "two_levels", "block": 512} if values is None else values
    codec = {"codec": "tile_topk", "k": k, "tile": tile} | ({"values": values} if values else {})
    wire = {
        "collective": "two_hop" if hops else "gather", "codec": codec, "exact_dims": 0,
        "memory": {"memory": "error_feedback", "decay": decay},
    }  # fmt: skip
    outer = {"outer_lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    return {"wire": {"gradient": wire}, "delay": delay, "keep": keep, **outer}


def low(
    rank: int = 3, bits: int = 4, decay: float = 1.0, delay: int = 0, lr: float = 1.0, momentum: float = 0.3,
    keep: float = 1.0, shrink: float = 0.0,
) -> Row:  # fmt: skip
    """A table of ours: one factor of low rank per round, coded, in two hops, with error feedback."""
    factors = {"collective": "two_hop", "codec": {"codec": "quantize", "bits": bits, "block": 256, "scale": "mse"}}
    wire = {
        "collective": "alternating_low_rank", "rank": rank, "shrink": shrink, "factors": factors,
        "exact_dims": 0, "unit_mb": 1000.0,
        "memory": {"memory": "error_feedback", "decay": decay},
    }  # fmt: skip
    outer = {"outer_lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    return {"wire": {"gradient": wire}, "delay": delay, "keep": keep, **outer}


def dense(bits: int) -> Row:
    """All values in so many bits, in two hops, with error feedback and DiLoCo's outer optimiser."""
    codec = {"codec": "quantize", "bits": bits, "scale": "mse"}
    wire = {"collective": "two_hop", "codec": codec, "memory": "error_feedback", "exact_dims": 0}
    return {"wire": {"gradient": wire}, "delay": 1, "outer_lr": 0.7, "momentum": 0.9}


def ours(**changed: Any) -> Row:
    """The preset `local-max` written out, with some of it changed."""
    return sparse(**{"hops": False, "k": 64, "keep": 0.5, "lr": 3.0, **changed})


def before(**changed: Any) -> Row:
    """What `local-max` was until 2026-11-19: all that was not sent is kept, Nesterov outside."""
    return ours(**{"keep": 1.0, "lr": 1.0, "momentum": 0.5, **changed})


ABLATIONS: dict[str, Row] = {  # one thing of ours changed at a time
    **{f"ours, beta {beta}": ours(decay=beta) for beta in (0.8, 0.9, 1.0)},
    "ours, nothing kept": ours(keep=0.0),
    "ours, all kept": ours(keep=1.0),
    "ours, all kept, Nesterov": before(),
    "ours, outer rate 2": ours(lr=2.0),
    "ours, tile 32": ours(tile=32, k=16),
    "ours, tile 128": ours(tile=128, k=256),
    "ours, 32 bits": ours(values=()),
    "ours, one magnitude": ours(values={"codec": "scaled_sign"}),
    "ours, four bits": ours(values={"codec": "quantize", "bits": 4}),
    "ours, delay 0": ours(delay=0),
    "ours, delay 5": ours(delay=5),
    "ours, two hops, twice as many": ours(hops=True, k=128),
}


class Protocol:
    """Jobs of equal sizes. steps, batch, size: of all of them."""

    def __init__(self, steps: int, batch: int, size: Size) -> None:
        self.how: Row = {"steps": steps, "batch": batch, "size": size}

    def job(self, method: str, every: int, seed: int = 0, sites: int = SITES, apart: bool = False) -> Job:
        """A method with its tuned rates."""
        lr, outer = TUNED[method]
        table = {} if outer is None else {**LOCAL[method], "outer_lr": outer}
        return Job(method, sites, every, seed, lr=lr, table=table, apart=apart, **self.how)

    def tuning(self) -> list[Job]:
        """Seed 0: inner and outer rates of every method, at the middle H, ours at 10."""
        out = [Job("fp32 per step", SITES, 0, 0, lr=lr, **self.how) for lr in RATES]
        out += [Job("large batch", SITES, MIDDLE, 0, lr=lr, **self.how) for lr in RATES]
        for method, outers in OUTER.items():
            for lr in RATES:
                tables = [{**LOCAL[method], "outer_lr": outer} for outer in outers]
                every = 10 if method == OURS else MIDDLE
                out += [Job(method, SITES, every, 0, lr=lr, table=table, **self.how) for table in tables]
        return out

    def frontier(self, seed: int, methods: list[str] | None = None) -> list[Job]:
        """Methods × H; the most telling first."""
        methods = [m for m in ORDER if methods is None or m in methods]
        out = [self.job("fp32 per step", 0, seed)]
        for method in methods[::-1]:
            hs = OUR_HS if method == OURS else (0,) if method.endswith("per step") else HS
            out += [self.job(method, every, seed) for every in hs]
        return list({str(job): job for job in out}.values())

    def stage(self, name: str) -> list[Job]:
        """The jobs of a stage."""
        rivals = ["DiLoCo", "Streaming DiLoCo", "SparseLoCo", OURS]
        if name == "tune":
            return self.tuning()
        if name == "frontier":
            return self.frontier(0)
        if name == "seeds":
            return [job for seed in (1, 2) for job in self.frontier(seed, ["fp32 per step", *rivals[1:]])]
        if name == "sites":
            exact = [self.job("fp32 per step", 0)]
            return exact + [self.job(method, MIDDLE, sites=sites) for sites in (8, 2) for method in rivals]
        if name == "apart":
            return [self.job(m, 0 if m.endswith("step") else MIDDLE, apart=True) for m in ("fp32 per step", *rivals)]
        lr, _ = TUNED[OURS]
        return [Job(name, SITES, 10, 0, lr=lr, table=table, **self.how) for name, table in ABLATIONS.items()]


def key(job: Job, stage: str) -> Row:
    """What tells one line of the file from another."""
    return {**asdict(job), "stage": "tune" if stage == "tune" else "grid"}
