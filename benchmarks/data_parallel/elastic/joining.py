"""A newcomer whose state takes long: how long do the others wait?

    python benchmarks/data_parallel/elastic/joining.py [--hidden 512] [--layers 6] [--heal later] [--steps 40]

`thinwire train --elastic` with three members in the lab at 50 Mb/s, gradients in four bits. The third is killed after
`--kill` steps, and comes again two seconds later without a checkpoint. Printed as one line of JSON: parameters, seconds
per step before, the longest time between two steps after the death, when the newcomer came and when it had the state
(steps, seconds), its bytes and how many steps it repeated, and whether all members' weights and moments have the same
bits at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from thinwire.lab.events import Event, Script
from thinwire.train.checkpoint import CHECKPOINTS, Checkpoints
from thinwire.train.config.sections import load
from thinwire.train.members.launch import join_locally
from thinwire.train.metrics import METRICS, EventReader
from thinwire.train.stop import StopRequest

MEMBERS = 3
RUN = """
[model]
layers = {layers}
hidden = {hidden}
heads = 8
[data]
seq_len = 32
samples = 400
[mesh]
dp = 3
microbatches = 1
[optim]
batch = 12
steps = {steps}
warmup = 0
[run]
out = "{out}"
eval_every = 0
checkpoint_every = 0
elastic = true
min_replicas = 2
heal = "{heal}"
loggers = []
[wire]
preset = "max"
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        out, path = Path(folder) / "out", Path(folder) / "run.toml"
        out.mkdir()
        path.write_text(RUN.format(**vars(options) | {"out": out}))
        readers = [EventReader(out / f"host{number}" / METRICS) for number in (1, MEMBERS)]
        seen: list[list[dict[str, Any]]] = [[], []]
        ended = threading.Event()
        watcher = threading.Thread(target=watch, args=(readers, seen, ended), daemon=True)
        watcher.start()
        script = Script([Event("kill", "host3", step=options.kill, lasts=2.0)], out)
        began = time.time()
        join_locally(
            load(path), MEMBERS, rate=options.rate, latency="0ms", loss="0%", resume=False, script=script,
            stop=StopRequest(False), timeout=options.timeout,
        )  # fmt: skip
        seconds = time.time() - began
        ended.set()
        watcher.join()
        states = [_state(out / f"host{number}") for number in range(1, MEMBERS + 1)]
    equal = all(torch.equal(one[name], states[0][name]) for one in states[1:] for name in states[0])
    return summarise(*seen, options.kill) | {
        "heal": options.heal, "rate": options.rate, "seconds": seconds, "same_bits": equal,
        "parameters": sum(x.numel() for name, x in states[0].items() if name.startswith("model/")),
    }  # fmt: skip


def watch(readers: list[EventReader], seen: list[list[dict[str, Any]]], ended: threading.Event) -> None:
    """Note when each event was written. The newcomer's file is written anew."""
    while not ended.wait(0.02):
        for reader, events in zip(readers, seen):
            found = reader.poll()
            if len(found) < len(events):
                events.clear()
            events += [event | {"time": time.monotonic()} for event in found[len(events) :]]


def _state(place: Path) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(place / CHECKPOINTS)
    found = checkpoints.newest_sound(print)
    assert found is not None, f"{place} has no checkpoint"
    return checkpoints.read(found, lambda name: name.startswith(("model/", "optim/")))


def summarise(events: list[dict[str, Any]], newcomer: list[dict[str, Any]], kill: int) -> dict[str, Any]:
    steps = [event for event in events if event["kind"] == "step"]
    gaps = {event["step"]: event["time"] - before["time"] for before, event in itertools.pairwise(steps)}
    came = next((event for event in newcomer if event["kind"] == "member" and event["step"] >= kill), None)
    took = next((event for event in newcomer if "took the others' state after" in event.get("text", "")), None)
    said = re.search(r"(\d+) bytes, and repeated (\d+) steps", took["text"]) if took else None
    after = {step: gap for step, gap in gaps.items() if step > kill}
    late = [gap for step, gap in gaps.items() if took and came and came["step"] + 1 < step <= took["step"]]
    return {
        "steps": len(steps), "seconds_per_step_before": statistics.median(list(gaps.values())[: kill - 1]),
        "longest_pause_after": max(after.values()), "at_step": max(after, key=lambda step: after[step]),
        "seconds_per_step_meanwhile": statistics.median(late) if late else None,
        "came_at_step": came["step"] if came else None, "whole_at_step": took["step"] if took else None,
        "seconds_until_whole": took["time"] - came["time"] if took and came else None,
        "bytes": int(said[1]) if said else None, "repeated": int(said[2]) if said else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heal", default="later", choices=("wait", "later"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill", type=int, default=5, help="after so many steps")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--folder", help="for the run's files")
    print(json.dumps(measure(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
