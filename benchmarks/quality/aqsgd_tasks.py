"""What benchmarks/quality/aqsgd.py trains: tasks, the wires that are compared on each, and their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.train.config.sections import TrainConfig, read_config

FULL = {"scale": "full"}  # the authors' rounding: every code of the grid
MIRROR = {"memory": "delta", "store": "fp32", "gate": False}  # as paper-aqsgd


def bits(count: int, **more: Any) -> dict[str, Any]:
    return {"codec": "quantize", "bits": count, **more}


def published(forward: int, backward: int) -> dict[str, Any]:
    """AQ-SGD at other bits than its preset's."""
    return {
        "preset": "paper-aqsgd", "forward": bits(forward, **FULL, memory=MIRROR),
        "backward": bits(backward, **FULL, warmup="epoch"),
    }  # fmt: skip


def direct(forward: int, backward: int) -> dict[str, Any]:
    """Every message coded by itself, from the first step on; a tied embedding is exact."""
    return {"forward": bits(forward, **FULL), "backward": bits(backward, **FULL)}


WIRES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"preset": "bf16"},
    "direct 4/8": direct(4, 8), "direct 3/6": direct(3, 6), "direct 2/4": direct(2, 4),
    "direct 4/4": direct(4, 4), "direct 3/3": direct(3, 3),
    "AQ-SGD 4/8": {"preset": "paper-aqsgd"}, "AQ-SGD 3/6": published(3, 6), "AQ-SGD 2/4": published(2, 4),
    "ours 3/3": {"preset": "max"},
    "rotated 4/4": {"preset": "scratch"},
    "end to end, published": {"preset": "paper-aqsgd"}, "end to end, ours": {"preset": "max"},
    "Optimus-CC": {"preset": "paper-optimus"},
}  # fmt: skip
FROZEN = {"end to end, published": {"name": "frozen_adam", "freeze_after": "epoch"}}  # the optimiser of a wire


@dataclass(frozen=True)
class Task:
    """One model and data set.

    data, optim, run: sections of run.toml. kind: of `[task]`. batch: sequences per step. length: tokens of a sample.
    rates: tried for fp32 with seed 0; the best is everybody's. seeds: paired. wires: by name, all with seed 0.
    claimed: those that have the other seeds too. microbatches: of a step; they change rounding only, and fewer of them
    take a card less time. dp: replicas. every: steps between evaluations within an epoch; 0: none.
    """

    kind: str
    data: Mapping[str, Any]
    optim: Mapping[str, Any]
    rates: tuple[float, ...]
    seeds: int
    wires: tuple[str, ...]
    claimed: tuple[str, ...]
    run: Mapping[str, Any]
    microbatches: int = 2
    dp: int = 1
    every: int = 0


SENTENCES = {"columns": ["sentence"], "held_out": 0.2}
THREE = ("fp32", "AQ-SGD 4/8", "ours 3/3")
FOUR = (*THREE, "direct 4/8")
ENDS = ("end to end, published", "end to end, ours")
TASKS = {
    "sst2": Task(
        "classify", {**SENTENCES, "seq_len": 48, "samples": 20_000}, {"batch": 64, "epochs": 3, "warmup": 40},
        (5e-5, 1e-4, 2e-4), 8, FOUR, THREE, {},
    ),
    "cola": Task(
        "classify", {**SENTENCES, "seq_len": 32}, {"batch": 32, "epochs": 3, "warmup": 40},
        (5e-6, 1e-5, 2e-5, 4e-5), 8, FOUR, THREE, {}, 1,
    ),
    "wikitext": Task(
        "causal", {"seq_len": 256, "held_out": 0.1}, {"batch": 16, "epochs": 3, "warmup": 10}, (5e-5, 1e-4, 2e-4), 3,
        tuple(WIRES)[:-3], (*THREE, "AQ-SGD 2/4", "rotated 4/4", "AQ-SGD 3/6", "direct 4/8"), {"autocast": "bf16"}, 1,
    ),
    "wikitext-dp2": Task(  # activations, their gradients, replicas: the rate is the one that wikitext's sweep found
        "causal", {"seq_len": 256, "held_out": 0.1}, {"batch": 16, "epochs": 3, "warmup": 10}, (1e-4,), 3,
        (*ENDS, "fp32", "Optimus-CC", "bf16"), (*ENDS, "fp32"), {"autocast": "bf16"}, 1, 2, 17,
    ),
}  # fmt: skip
WORDS = ["plain", "thin", "dense", "warm", "cold", "sparse", "exact", "late", "early", "wide"]


def config(task: Task, wire: str, seed: int, rate: float, model: str, data: str, device: str) -> TrainConfig:
    """The run, as run.toml would say it: four stages.

    model, data: folder and file; an empty model: a tiny random one, and an empty text: Python's library.
    """
    quick = not model
    sizes: dict[str, Any] = {"path": model} if model else {"hidden": 32, "layers": 4, "heads": 4}
    if quick and task.kind == "classify":
        sizes["type"] = "bert"
    given = {**task.data, **({"paths": [data]} if data else {"corpus_bytes": 20_000}), "seed": seed}
    if quick:
        given |= {"seq_len": 16, "samples": 90}
    optim = {**task.optim, "lr": rate, **FROZEN.get(wire, {})} | (
        {"batch": 16, "epochs": 2, "warmup": 2} if quick else {}
    )
    return read_config({
        "task": {"kind": task.kind}, "model": sizes, "data": given, "optim": optim, "wire": WIRES[wire],
        "mesh": {"dp": task.dp, "pp": 4, "microbatches": task.microbatches, "schedule": "GPipe"},
        "run": {**({} if quick else task.run), "seed": seed, "device": device, "eval_every": 0},
    })  # fmt: skip


def tiny_sentences() -> str:
    """A table of labelled sentences for --quick."""
    rows = [f"{a} {b} {c}\t{int(a < c)}" for a in WORDS for b in WORDS[:5] for c in WORDS[:2]]
    return "\n".join(["sentence\tlabel", *rows])
