"""How much of a step's exchange runs beside its computing, from a trace of one rank (for gpu_steps.py --trace)."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Span = tuple[float, float]


def record(step: Callable[[], None]) -> dict[str, Any]:
    """A step under torch's profiler: see `read`."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return {"step_s": took} | read(json.loads(path.read_text()))


def read(trace: dict[str, Any]) -> dict[str, float]:
    """Seconds in which the computing stream is busy, the others (codecs and messages) are, and both are at once;
    how many kernels of NCCL, their seconds, those from the first to the last, and how many kernels of all others.

    The computing stream is the one with most time in kernels that are not NCCL's.
    """
    streams: dict[int, list[tuple[Span, bool]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            streams[event["args"]["stream"]].append((span, "nccl" in event["name"].lower()))
    busy = {stream: sum(b - a for (a, b), nccl in spans if not nccl) for stream, spans in streams.items()}
    own = max(busy, key=busy.__getitem__)
    computing = union([span for span, _ in streams[own]])
    others = [item for stream, spans in streams.items() if stream != own for item in spans]
    exchange, messages = union([span for span, _ in others]), union([span for span, nccl in others if nccl])
    both = length(computing) + length(exchange) - length(union(computing + exchange))
    found = {"computing_s": length(computing), "exchange_s": length(exchange), "both_s": both}
    if messages:
        found |= {"messages": sum(nccl for _, nccl in others), "messages_s": length(messages)}
        found |= {"from_first_to_last_s": messages[-1][1] - messages[0][0], "kernels": len(others)}
    return found


def union(spans: list[Span]) -> list[Span]:
    """The same times, without overlaps, in order."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
