"""What is printed about a run: a line of progress, and at the end its time, bytes and result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.quantities import show_bytes, show_duration

TRAFFIC = ("forward", "backward", "gradient", "embedding", "site")  # the last between sites, where there are several


def describe(event: dict[str, Any]) -> str:
    """A line of progress for an event of kind "step" or "eval"."""
    if event["kind"] == "eval":
        return ", ".join([f"held-out loss {event['held_out']:.4f}", *_scores(event)])
    parts = [f"loss {event['loss']:.4f}", _sent(event), f"{event['tokens'] / event['step_seconds']:.0f} tokens/s"]
    if event["hit_rate"] is not None:
        parts.append(f"{100 * event['hit_rate']:.0f} % of samples remembered")
    return ", ".join(filter(None, parts))


def closing(out: str, events: Sequence[dict[str, Any]], model: str = "model") -> str:
    """The last lines about a finished run in the folder `out`, where its `model` is."""
    steps = [event for event in events if event["kind"] == "step"]
    evals = [event for event in events if event["kind"] == "eval"]
    if not steps:
        return f"done: {out}"
    last = steps[-1]
    parts = [f"{last['step']} steps in {show_duration(last['seconds'])}"]
    parts += [f"held-out loss {evals[-1]['held_out']:.4f}", *_scores(evals[-1])] if evals else []
    parts += [_sent(last)] if _sent(last) else []
    return f"done: {out}: {', '.join(parts)}\nthe model is in {out}/{model}; thinwire report {out} draws the run"


def _scores(event: dict[str, Any]) -> list[str]:
    """Of a classifier."""
    if "accuracy" not in event:
        return []
    return [f"accuracy {100 * event['accuracy']:.1f} %", f"Matthews' correlation {event['matthews']:.3f}"]


def _sent(event: dict[str, Any]) -> str:
    """What all ranks have sent since the start, in words; empty for a run of one rank."""
    sent = sum(event.get(f"{kind}_bytes", 0) for kind in TRAFFIC)
    between = f" ({show_bytes(event['site_bytes'])} between sites)" if "site_bytes" in event else ""
    return f"{show_bytes(sent)} sent{between}, {event['raw_bytes'] / sent:.1f}× less than fp32" if sent else ""
