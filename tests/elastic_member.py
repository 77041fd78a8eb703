"""One member of an elastic run: trains a small model, does to itself what its events say, and notes every step.

    python elastic_member.py LIGHTHOUSE NAME MODE WIRE STEPS EVENTS OUT

MODE: all_reduce or reducer. WIRE: a key of WIRES. EVENTS: {step: event}, where a step is a number of steps that have
counted: "die" (kill -9 after backward), "die sent" (after its part of the exchange, before the vote), "nan".
OUT: a line of JSON per step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch
from torch import nn

import thinwire as tw

WIRES = {
    "feedback": tw.Reduction(tw.collectives.Quantized(4), tw.memory.ErrorFeedback()),
    "ef21": tw.Reduction(tw.collectives.TopkAllgather(0.05), tw.memory.EF21()),
    "oktopk": tw.Reduction(tw.collectives.OkTopk(0.05), tw.memory.ErrorFeedback()),
}


def digest(*tensors: torch.Tensor) -> str:
    """Of their bits."""
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:12]


def states(reducer: tw.parallel.Reducer) -> dict[str, object]:
    """Residual, shift and mean shift of the largest unit, and what its collective keeps."""
    unit = max(reducer.units, key=lambda unit: unit.numel)
    channel = reducer.exchange.channels[unit]
    slots = {slot: channel.state.read(slot, unit.name) for slot in "ehm"}
    return {
        "residual": None if slots["e"] is None else digest(slots["e"]),
        "residual_norm": None if slots["e"] is None else float(slots["e"].norm()),
        "shift": None if slots["h"] is None else slots["h"][:20].tolist(),
        "mean_shift": None if slots["m"] is None else slots["m"][:20].tolist(),
        "own": digest(*channel.collective_state.get(unit.name, {}).values()),
    }


def main(address: str, name: str, wire: str, steps: int, events: dict[int, str], out: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    model = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    quorum = tw.elastic.Quorum(
        {"model": model, "optimizer": optimizer}, address, name=name, min_members=2, timeout=5, patience=30
    )
    reducer = tw.parallel.Reducer(model.named_parameters(), tw.Wire(gradient=WIRES[wire]), quorum)
    while os.path.exists(f"{out}.hold"):  # until the test lets it come
        time.sleep(0.02)
    with open(out, "w", buffering=1) as notes:
        while quorum.steps < steps:
            quorum.begin()
            event = events.pop(quorum.steps, "")
            at = quorum.steps
            time.sleep(0.05)
            first = states(reducer)  # healed already
            model(torch.randn(8, 60)).pow(2).mean().backward()
            if event == "nan":
                model[0].weight.grad[0, 0] = torch.nan
            if event == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            reducer.finish()
            if event == "die sent":
                os.kill(os.getpid(), signal.SIGKILL)
            counts = quorum.commit()
            if counts:
                optimizer.step()
            optimizer.zero_grad()
            moments = [value for state in optimizer.state.values() for value in state.values()]
            found = {
                "step": at, "quorum": quorum.number, "size": reducer.size, "rank": reducer.rank, "counts": counts,
                "weights": digest(*model.parameters()), "moments": digest(*moments), "before": first,
                "after": states(reducer), "skips": reducer.skips,
            }  # fmt: skip
            notes.write(json.dumps(found) + "\n")
        quorum.close()
        reducer.close()
        notes.write(json.dumps({"done": str(reducer.summary())}) + "\n")


if __name__ == "__main__":
    address, name, wire, steps, events, out = sys.argv[1:]
    main(address, name, wire, int(steps), {int(k): v for k, v in json.loads(events).items()}, out)
