"""A run on this machine: every rank on a host of the lab, its links as slow as asked, and progress to look at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab import Job, Network, check
from thinwire.report.show import progress
from thinwire.train.config import TrainConfig
from thinwire.train.metrics import read_events
from thinwire.train.rank import train_rank
from thinwire.units import parse_rate, show_bytes

PRELOAD = ("torch", "torch.distributed.checkpoint", "transformers", "thinwire.train.rank")
WATCH = 0.5


def train_local(
    config: TrainConfig, *, rate: str | None = None, latency: str = "0ms", resume: bool = False,
    timeout: float | None = None, network: Network | None = None, label: str = "train",
) -> list[dict[str, Any]]:  # fmt: skip
    """Train on hosts of the lab, the ranks of a tensor-parallel group on one; the events of the run."""
    if not check()[0].ok:
        raise UsageError("this machine forbids network namespaces (thinwire doctor says more): use torchrun instead")
    if network is not None:
        return _watched(network, config, resume, timeout, label, parse_rate(rate))
    with Network(hosts=config.mesh.ranks // config.mesh.tp, rate=rate, latency=latency, preload=PRELOAD) as net:
        return _watched(net, config, resume, timeout, label, parse_rate(rate))


def _train(config: TrainConfig, resume: bool, rate: float | None) -> int:
    return train_rank(config, resume, rate=rate)


def _watched(
    net: Network, config: TrainConfig, resume: bool, timeout: float | None, label: str, rate: float | None
) -> list[dict[str, Any]]:
    """Start the ranks and follow the metrics they write."""
    path, seen = Path(config.run.out) / "metrics.jsonl", 0
    if not resume and path.exists():
        path.unlink()
    job = net.start(_train, config, resume, rate, per_host=config.mesh.tp, echo=False)
    while not job.watch(WATCH) and not any(
        e["kind"] == "run" for e in read_events(path)
    ):  # it says how long it will be
        _check_time(job, timeout)
    total = next((event["steps"] for event in read_events(path) if event["kind"] == "run"), 1)
    with progress(label, total) as advance:
        running = True
        while running:
            running = not job.watch(WATCH)
            events = [e for e in read_events(path) if e["kind"] in ("step", "eval", "note")]
            for event in events[seen:]:
                if event["kind"] == "note":
                    print(event["text"], file=sys.stderr, flush=True)
                else:
                    advance(describe(event), int(event["kind"] == "step"))
            seen = len(events)
            _check_time(job, timeout)
    job.results()
    return read_events(path)


def _check_time(job: Job, timeout: float | None) -> None:
    if timeout is not None and job.seconds > timeout:
        job.stop()
        raise UsageError(f"the run took longer than {timeout:.0f} s and was stopped")


def describe(event: dict[str, Any]) -> str:
    """A line of progress."""
    if event["kind"] == "eval":
        return f"held-out loss {event['held_out']:.4f}"
    sent = sum(event[f"{kind}_bytes"] for kind in ("forward", "backward", "gradient", "embedding"))
    saved = f", {event['raw_bytes'] / sent:.1f}× less than fp32" if sent else ""
    hits = f", {100 * event['hit_rate']:.0f} % of samples remembered" if event["hit_rate"] is not None else ""
    speed = event["tokens"] / event["step_seconds"]
    return f"loss {event['loss']:.4f}, {speed:.0f} tokens/s, {show_bytes(sent)} sent{saved}{hits}"
