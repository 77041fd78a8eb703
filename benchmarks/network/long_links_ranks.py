"""What the ranks of long_links.py run: steps of training beside their prediction, and collectives; one row per cell."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

SKIPPED = 3  # steps that are not counted


def append(path: str, row: dict[str, Any]) -> None:
    """Add a line to the file, in one call: several labs write to it."""
    line = (json.dumps(row) + "\n").encode()
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(number, line)
    os.close(number)


def train_cells(job: dict[str, Any]) -> None:
    """On every rank: the cells of a job, one after another on one network, until the time is over."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with ExitStack() as stack:
        for patch in _shared_work():
            stack.enter_context(patch)
        for number, cell in enumerate(job["cells"]):
            if not _goes_on(job["until"]):
                return
            began = time.time()
            with _variant(cell["variant"]):
                row = _cell(cell, f"{job['folder']}/{number}")
            if dist.get_rank() == 0:
                append(job["rows"], {**job["about"], **cell["about"], **row, "took": time.time() - began})
                print(f"{job['name']}: {cell['about']} {row['measured']:.3f} s", flush=True)


def _goes_on(until: float) -> bool:
    """May another cell begin? As rank 0 says."""
    from thinwire.distributed.values import broadcast_json

    return bool(broadcast_json(time.time() < until))


def _shared_work() -> list[Any]:
    """Groups of ranks and speeds of links are found once per network, and taken again for every cell."""
    import torch.distributed as dist

    from thinwire.train import build
    from thinwire.train.tune import timing

    make_mesh, probe, speeds = build.make_mesh, timing.probe, {}

    @cache
    def mesh(config: Any, device: str) -> Any:
        return make_mesh(config, device)

    def probed(group: Any, ahead: int, device: Any, streams: int = 1) -> Any:
        key = (*dist.get_process_group_ranks(group), ahead, streams)
        if key not in speeds:
            speeds[key] = probe(group, ahead, device, streams)
        return speeds[key]

    return [mock.patch.object(build, "make_mesh", mesh), mock.patch.object(timing, "probe", probed)]


@contextmanager
def _variant(name: str) -> Iterator[None]:
    """One thing is as it was before messages were sent early; "now": nothing. Two hops are the wire's own setting."""
    from thinwire.collectives import messages
    from thinwire.data_parallel import gradient_pass
    from thinwire.data_parallel.exchange import Exchange

    join = Exchange._join

    def joined(self: Exchange, group: Any, own_group: bool, streams: int) -> None:
        join(self, group, False, streams)

    patches = {
        "receives late": mock.patch.object(Exchange, "_join", joined),
        "one unit at a time": mock.patch.dict(gradient_pass.MOST_IN_FLIGHT, {"cpu": 0}),
        "no checksums": mock.patch.object(messages, "_note_all", lambda *_: None),
    }
    with patches.get(name, nullcontext()):
        yield


def _cell(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Seconds of every step on this rank, and with `predicted` what the planner measures before. folder: of the run."""
    from thinwire.distributed.values import gather_json
    from thinwire.train import build
    from thinwire.train.config.sections import read_config
    from thinwire.train.loop import Trainer

    document = {**cell["document"], "run": {"out": folder, "eval_every": 0, "checkpoint_every": 0, "loggers": []}}
    row: dict[str, Any] = {}
    with mock.patch.object(build, "decide", partial(_measured, row)) if cell["predicted"] else nullcontext():
        trainer = Trainer(read_config(document), say=lambda line: None)
    if cell["variant"] == "gradients late":
        trainer.parts.update.watch.close()
    steps, waited, spans = [], [], _timed(trainer)
    for _ in range(trainer.steps):
        trainer._train_step()
        steps.append(trainer.last_seconds)
        waited.append(trainer.parts.update.waited)
    trainer.parts.close()
    trainer.vote.close()
    if trainer.metrics is not None:
        trainer.metrics.close()
    sent = trainer.totals.bytes
    if trainer.parts.decision is not None:
        made = trainer.parts.decision
        row["decided"] = {"microbatches": made.microbatches, "ahead": made.ahead, "seconds": made.seconds}
        row["decided"]["wire"] = made.wire
    row["spans"] = gather_json({name: statistics.median(times[SKIPPED:]) for name, times in spans.items()})
    row |= {"document": cell["document"]} if "found" in row else {}
    return {**row, "measured": statistics.median(steps[SKIPPED:]), "steps": steps, "waited": waited, "bytes": sent}


def _timed(trainer: Any) -> dict[str, list[float]]:
    """From now on the seconds of the parts of every step: the pipeline's pass, waiting for gradients, the vote, the
    optimiser."""
    out: dict[str, list[float]] = {}
    update = trainer.parts.update
    for name, owner in (
        ("run", trainer.parts.engine),
        ("exchanged", update),
        ("hold", trainer.vote),
        ("apply", update),
    ):
        out[name] = []
        setattr(owner, name, partial(_clocked, getattr(owner, name), out[name]))
    return out


def _clocked(call: Callable[..., Any], taken: list[float], *args: Any, **kwargs: Any) -> Any:
    began = time.perf_counter()
    result = call(*args, **kwargs)
    taken.append(time.perf_counter() - began)
    return result


def _measured(
    row: dict[str, Any], config: Any, wire: Any, mesh: Any, stages: Any, named: Any, kept: Any, say: Any, rows: int
) -> None:
    """In the place of the planner's decision: what ranks measure for it goes to `row`, and nothing is decided."""
    from thinwire.train.tune.auto import forms
    from thinwire.train.tune.timing import measure

    began = time.perf_counter()
    found = measure(config, forms(config, wire), mesh, stages, named, rows, int(wire.streams))
    row |= {"found": asdict(found), "measuring": time.perf_counter() - began}


def allreduce_cells(job: dict[str, Any]) -> None:
    """On every rank: collectives on one network, one row each."""
    import torch
    import torch.distributed as dist

    from thinwire.bench.allreduce import contestants
    from thinwire.bench.allreduce_ranks import WARM, _one_team, exchanges
    from thinwire.codecs import TopK
    from thinwire.distributed.values import gather_json
    from thinwire.kernels.cpu.compile import compiled_once

    _one_team()
    shape = tuple(job["shape"])
    k = TopK(job["density"]).count(shape[0] * shape[1])
    rows = contestants(shape, job["density"])
    with compiled_once():
        for cell in job["cells"]:
            rows[cell["about"]["collective"]].collective.exchange(torch.randn(WARM).view(64, -1), state={})
    dist.init_process_group("gloo")
    for cell in job["cells"]:
        if not _goes_on(job["until"]):
            return
        began = time.time()
        mine = exchanges(rows[cell["about"]["collective"]].collective, shape, k, "similar", cell["steps"])
        every = gather_json([[step["seconds"], step["payload"] + step["beside"]] for step in mine])
        seconds = [max(rank[s][0] for rank in every) for s in range(cell["steps"])]
        sent = statistics.fmean(step[1] for rank in every for step in rank[1:] or rank)
        if dist.get_rank() == 0:
            about = {**job["about"], **cell["about"], "measured": statistics.median(seconds[1:] or seconds)}
            append(job["rows"], {**about, "steps": seconds, "bytes": sent, "took": time.time() - began})
            print(f"{job['name']}: {cell['about']} {about['measured']:.3f} s", flush=True)


def opening_cells(job: dict[str, Any]) -> None:
    """On every rank: seconds until the connections of several streams are open."""
    import torch.distributed as dist

    from thinwire.collectives.flows import Flows

    dist.init_process_group("gloo")
    for cell in job["cells"]:
        dist.barrier()
        began = time.perf_counter()
        flows = Flows(None, cell["about"]["streams"])
        took = time.perf_counter() - began
        flows.close()
        if dist.get_rank() == 0:
            append(job["rows"], {**job["about"], **cell["about"], "measured": took})


def train_command(job: dict[str, Any], cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """In the launcher: `thinwire train` of another tree, in processes of its own; its steps."""
    import subprocess
    import sys

    given = cell["document"]
    sections = {**given, "run": {"eval_every": 0, "checkpoint_every": 0}}
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in sections.items()]
    text = "".join(lines)
    (folder / "run.toml").write_text(text)
    words = [sys.executable, "-m", "thinwire", "train", str(folder / "run.toml"), "--local", "4", "--out"]
    words += [str(folder / "run"), "--rate", job["network"]["rate"]]
    variables = {**os.environ, "PYTHONPATH": cell["tree"], "OMP_NUM_THREADS": "1"}
    subprocess.run(words, env=variables, check=True, capture_output=True, timeout=300)
    events = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    done = [event for event in events if event["kind"] == "step"]
    steps = [event["step_seconds"] for event in done]
    waited = [event["wait_seconds"] for event in done]
    sent = sum(done[-1][f"{kind}_bytes"] for kind in ("forward", "backward", "gradient", "embedding"))
    return {"measured": statistics.median(steps[SKIPPED:]), "steps": steps, "waited": waited, "bytes": sent}
