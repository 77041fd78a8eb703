"""Where a rank's step goes, from a trace of its card and of the launches on its host (sections `pipeline…` of gpu.py).

The rank's own computing is one stream. Where that stands still, the next kernel says why: it was launched late (the
host), or it was there and waited for a frame: the last message kernel to end before it tells which (NCCL has a stream
for every boundary and direction). Messages are told apart by the time at which a frame was posted or sent.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.pipeline.overlap import Transport

RATES = ("unlimited", "300mbit", "100mbit")
SHORT = 15.0  # µs: a shorter pause between kernels is a launch's own
NEAR = 60.0  # µs: a message that ends so close before a kernel is what the kernel waited for
Event = dict[str, Any]


@contextmanager
def noted(transports: dict[tuple[str, str], Transport], times: dict[str, list[float]]) -> Iterator[None]:
    """times: for "forward in" and so on, when (µs) its frames were posted or sent."""
    names, given = {id(transport): " ".join(way) for way, transport in transports.items()}, Transport._start

    def start(self: Transport, *arguments: Any) -> Any:
        times[names[id(self)]].append(time.time_ns() / 1e3)
        return given(self, *arguments)

    Transport._start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transport._start = given  # type: ignore[method-assign]


def record(step: Callable[[], None], ways: dict[tuple[str, str], Transport], folder: str, name: str) -> dict[str, Any]:
    """A step of this rank, whose frames take these ways, under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    transports: dict[str, list[float]] = defaultdict(list)
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen, noted(ways, transports):
        began = time.perf_counter()
        step()
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    path = Path(folder) / f"trace-{name}-{dist.get_rank()}.json"
    seen.export_chrome_trace(str(path))
    text = path.read_text()
    path.unlink()
    with gzip.open(f"{path}.gz", "wt", compresslevel=3) as out:
        out.write(json.dumps({"transports": transports}) + "\n" + text)
    return {"step_s": took, "host_s": queued} | read(json.loads(text), transports)


def read(trace: dict[str, Any], transports: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of the step by what the rank's computing stream did or waited for."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    launched: dict[int, float] = {}
    kernels: list[Event] = []
    for event in trace["traceEvents"]:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launched[event["args"].get("correlation", -1)] = event["ts"]
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    kernels.sort(key=lambda event: event["ts"])
    messages = [k for k in kernels if "nccl" in k["name"].lower()]
    own = [k for k in kernels if "nccl" not in k["name"].lower()]
    labels = _labels(messages, launched, transports, base)
    spent: dict[str, float] = defaultdict(float)
    codec = sum(k["dur"] for k in own if k["name"].startswith("_"))
    end, at = own[0]["ts"], 0
    ends = sorted((k["ts"] + k["dur"], k["args"]["stream"]) for k in messages)
    for kernel in own:
        pause = kernel["ts"] - end
        if pause > SHORT:
            late = min(max(launched.get(kernel["args"].get("correlation", -1), end) - end, 0.0), pause)
            spent["host"] += late
            while at < len(ends) and ends[at][0] <= kernel["ts"]:
                at += 1
            near = at > 0 and ends[at - 1][0] > max(end + late, kernel["ts"] - NEAR)
            spent[labels.get(ends[at - 1][1], "other") if near else "other"] += pause - late
        elif pause > 0:
            spent["between kernels"] += pause
        spent["computing"] += max(0.0, kernel["ts"] + kernel["dur"] - max(end, kernel["ts"]))
        end = max(end, kernel["ts"] + kernel["dur"])
    blocks = sorted({tuple(k["args"].get("grid", ())) for k in messages})
    return {
        "kernels": len(own), "codec_s": codec / 1e6, "message_grids": blocks,
        "seconds": {name: round(us / 1e6, 4) for name, us in spent.items()},
    }  # fmt: skip


def _labels(
    messages: list[Event], launched: dict[int, float], transports: dict[str, list[float]], base: float
) -> dict[int, str]:
    """Stream → the way whose frames it carries: the one posted last before the stream's first kernel was launched."""
    labels: dict[int, str] = {}
    for kernel in messages:
        stream, when = kernel["args"]["stream"], launched.get(kernel["args"].get("correlation", -1))
        if stream in labels or when is None:
            continue
        before = [(max(t for t in times if t <= when + base), way) for way, times in transports.items()
                  if times and times[0] <= when + base]  # fmt: skip
        labels[stream] = max(before)[1] if before else "other"
    return labels


def show(traces: list[dict[str, Any]]) -> None:
    for row in traces:
        spent = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["seconds"].items())
        print(f"trace of rank {row['rank']} at {row['trace']}: {row['step_s']:.3f} s, host done after "
              f"{row['host_s']:.3f}, {row['kernels']} kernels, codecs {row['codec_s']:.4f}; {spent}; "
              f"message grids {row['message_grids']}")  # fmt: skip
