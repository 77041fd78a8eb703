"""The simulator's picture of a recorded run: its mesh, model, wire and rate, with compute fitted to the measured step.

How long a stage computes is not recorded. It is chosen so that the simulated step lasts as long as the measured one
(the median of the second half, when deltas are warm): what the picture adds is where that time goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.errors import UsageError
from thinwire.planner import config as planner
from thinwire.planner.model import work_from_flops
from thinwire.planner.predict import predict
from thinwire.planner.settings import Wire, read_wire
from thinwire.planner.simulate import Result
from thinwire.quantities import UNLIMITED
from thinwire.report.runs import Run, number
from thinwire.train.config.sections import ModelConfig, TrainConfig, read_config
from thinwire.train.data.tokenizer import ByteTokenizer

SLOWEST, FASTEST = 1e3, 1e18  # floating-point operations per second, between which the fit looks
CLOSE = 1.001  # the fit's accuracy, as a ratio
UNREADABLE = (OSError, json.JSONDecodeError, UnicodeDecodeError)


def simulated(
    run: Run, rate: float | None = None, latency: float | None = None, *, measured_at: str | None = None
) -> Result:
    """A step of the run, or of the same run at another rate (bit/s) and latency (seconds one way; None: its own).

    UsageError says why there is none.

    `measured_at`: the network's rate, such as 100mbit, where the run did not record it. Without it a run that is asked
    for at another `rate` counts as measured on an unlimited network.
    """
    plan = fitted(run, measured_at=measured_at, elsewhere=rate is not None)
    assert plan.wire is not None
    return predict(plan if rate is None else plan.at(rate, latency), plan.wire)


def explained(result: Result) -> str:
    """The words under the picture of a simulated step."""
    spent = ", ".join(f"{what} {seconds:.3g} s" for what, seconds in result.spent.items())
    return (
        f"One pipeline, one band per rank: above what it computes, below what its port sends. Outlined: what "
        f"the step waits for ({spent}). The network is the simulator's, at the run's rate and latency, without loss; "
        f"how long computing takes is fitted so that the step lasts the measured {result.makespan:.3g} s."
    )


def fitted(run: Run, *, measured_at: str | None = None, elsewhere: bool = False) -> planner.Run:
    """The run for the planner, computing as fast as it did.

    `run`: as recorded. `measured_at`: the network's rate where the run did not record it. `elsewhere`: it is asked for
    at another rate, so that one which did not record its own counts as measured on an unlimited network."""
    config = read_config({**run.document, "wire": run.about.get("wire") or {}})
    if config.model.lora is not None:
        raise UsageError("the simulator does not know adapters (LoRA), whose gradients are smaller than the model")
    if config.mesh.sites > 1:
        raise UsageError("the simulator knows one site, and this run has several")
    if config.optim.accumulate > 1:
        raise UsageError("the simulator knows one pipeline pass per step, and this run accumulates several")
    steps = [seconds for _, seconds in run.series("step_seconds")]
    if not steps:
        raise UsageError("no step was timed")
    network = measured_at or (UNLIMITED if elsewhere else None)
    plan, wire = planner.read_run(_document(run, config, network)), read_wire(config.wire, run.name)
    flops = _fit(plan, wire, median(steps[len(steps) // 2 :]))
    work = work_from_flops(plan.model, plan.schedule.stages, plan.sequences, flops)
    return replace(plan, work=work, wire=wire)


def _document(run: Run, config: TrainConfig, rate: str | None) -> dict[str, Any]:
    """The run as `thinwire plan` reads it."""
    mesh = config.mesh
    recorded = number(run.about, "rate")
    if recorded is None and rate is None:
        raise UsageError("the run did not record the rate of its network; give it with --rate, such as --rate 100mbit")
    return {
        "model": _sizes(run, config),
        "mesh": {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp},
        "schedule": {"name": mesh.schedule} | ({"virtual": mesh.virtual} if mesh.virtual else {}),
        "batch": {"microbatches": mesh.microbatches, "size": config.microbatch},
        "compute": {"flops": 1e9},
        "network": {"rate": rate if recorded is None else recorded, "latency": number(run.about, "latency") or 0.0},
    }


def _sizes(run: Run, config: TrainConfig) -> dict[str, Any]:
    """Layers, width, vocabulary: from the configuration, or from the checkpoint that it names."""
    model = config.model
    given = _checkpoint(run, model)
    known = {
        "layers": given.get("num_hidden_layers", given.get("n_layer", model.layers)),
        "hidden": given.get("hidden_size", given.get("n_embd", model.hidden)),
        "vocab": given.get("vocab_size", model.vocab) or _tokens(config),
        "tied": config.task.kind == "causal" and bool(given.get("tie_word_embeddings", model.tied)),
    }
    total = number(run.about, "parameters")
    embedding = known["vocab"] * known["hidden"] * (1 if known["tied"] else 2)
    rest = 0 if total is None else max(0, round(total) - embedding)
    sizes = {**known, "seq": config.data.seq_len, "crossing": config.boundary.rank}
    return sizes | ({"parameters": rest} if rest >= known["hidden"] else {})


def _checkpoint(run: Run, model: ModelConfig) -> Mapping[str, Any]:
    """config.json of the model; empty where sizes were given.

    The run's own result has the same sizes. A run that has not ended has none: then what it started from is read, which
    run.toml names from the folder that it was given in, and the run's record from where the command was started.
    """
    name = model.path or model.config
    if name is None:
        return {}
    part = "path" if model.path else "config"
    understood = _json(run.folder / "config.json").get("model", {}).get(part) or name
    started_from = [Path(understood), run.folder / name, run.folder.parent / name]
    if model.path:
        started_from = [place / "config.json" for place in started_from]
    for file in (run.folder / "model" / "config.json", *started_from):
        if file.is_file():
            return _json(file)
    raise UsageError(f"the model's sizes are in {name}, which is not there any more")


def _json(file: Path) -> Mapping[str, Any]:
    """The object in a file; empty where there is no file, or something else is in it."""
    if not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text())
    except UNREADABLE as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    return read if isinstance(read, Mapping) else {}


def _tokens(config: TrainConfig) -> int:
    if config.data.tokenizer == "bytes" or (config.data.tokenizer == "auto" and config.model.path is None):
        return ByteTokenizer.size
    raise UsageError("the vocabulary's size is the tokenizer's, and not in run.toml")


def _fit(plan: planner.Run, wire: Wire, seconds: float) -> float:
    """The speed of computing, bisected until the step takes `seconds`."""

    def step(flops: float) -> float:
        work = work_from_flops(plan.model, plan.schedule.stages, plan.sequences, flops)
        return predict(replace(plan, work=work), wire).makespan

    low, middle, high = SLOWEST, FASTEST, FASTEST
    best = step(high)
    if best > seconds:
        raise UsageError(
            f"with no time to compute at all the simulated step takes {best:.3g} s, but {seconds:.3g} s was "
            "measured: the recorded rate is not that of this network"
        )
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step(middle) > seconds else (low, middle)
    return middle
