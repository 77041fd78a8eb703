"""A simulated step as Chrome-trace JSON: one process per rank with rows for compute, codec and wire.

The critical path is a process of its own, and its tasks are also marked where they ran. Open the file in
Perfetto or chrome://tracing. Format: "Trace Event Format", complete events (ph X), times in microseconds.
"""

from __future__ import annotations

from typing import Any

from thinwire.planner.build import COMPUTE, WIRE
from thinwire.planner.simulate import Result, Span

ROWS = {COMPUTE: 0, "codec": 1, WIRE: 2}


def chrome_trace(result: Result) -> dict[str, Any]:
    """The document for a trace file; its times are in microseconds."""
    ranks = len(result.step.schedule.ranks)
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, row, name) for name, row in ROWS.items()]
    events.append(_named("process_name", ranks, 0, "critical path"))
    events.append(_named("thread_name", ranks, 0, "what the step waits for"))
    for span in result.spans():
        row = ROWS.get(span.about.what, ROWS["codec"])
        events.append(_event(span, span.about.rank, row))
        if span.on_path:
            events.append(_event(span, ranks, 0))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    about = span.about
    event = {
        "name": str(about.subject) if about.what == COMPUTE else f"{about.what} {about.subject}",
        "cat": about.what + (",critical" if span.on_path else ""),
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": span.start * 1e6,
        "dur": (span.finish - span.start) * 1e6,
        "args": {"slack_ms": span.slack * 1e3, "rank": about.rank, "critical": span.on_path},
    }
    return {**event, "cname": "terrible"} if span.on_path else event
