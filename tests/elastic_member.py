"""One member of an elastic run: trains a small model, does to itself what its events say, and notes every step.

wire: a key of WIRES, or "local": local steps, or "site": a member is an FSDP site of two ranks, "a0" and "a1", which
have a process each; "feedback" is DDP's. events: {step: event}, where a step is a number of
steps that have counted: "die" (kill -9 before the exchange), "die agreeing" (after it, before members agree that it is
whole), "die between" (there, after it has told member 0 and before it tells the others), "freeze" (until the test thaws
it), "nan".
out: a file with a line of JSON per step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw

SLOW = float(os.environ.get("THINWIRE_TEST_SLOW", "1"))
LIMITS = {"timeout": 4 * SLOW, "patience": 40 * SLOW}
WIRES = {
    "feedback": tw.Reduction(tw.collectives.Quantized(4), tw.memory.ErrorFeedback()),
    "shift": tw.Reduction(tw.collectives.TopkAllgather(0.05), tw.memory.EControl(0.5)),
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


def train_locally(address: str, name: str, steps: int, events: dict[int, str], out: str) -> None:
    """Three inner steps per round; steps and events count rounds. Site b is slow, and makes fewer."""
    slow = 2.0 if name == "b" else None
    model = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 10))
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    quorum = tw.elastic.Quorum({}, address, name=name, min_members=first_members(out), slow=slow, **LIMITS)
    wait_for_the_test(out)
    local = tw.parallel.LocalSteps(
        model.named_parameters(), inner, tw.Wire(gradient=WIRES["feedback"]), quorum, every=6, fragments=2
    )
    let_others_die(quorum)
    joined = {"rounds": quorum.steps, "inner": len(inner.state), "residual": local.site.exchange.residual_norm()}
    with open(out, "w", buffering=1) as notes:
        notes.write(json.dumps({"joined": joined}) + "\n")
        while quorum.steps < steps:
            at = quorum.steps
            event = events.pop(at, "") if local.schedule.applied(local.steps + 1) else ""
            time.sleep(0.3 if name == "b" else 0.05)
            (model(torch.randn(8, 60)) - 1).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
            if event == "nan":
                with torch.no_grad():
                    model[0].weight[0, 0] = torch.nan
            happen(event, quorum, local.site.exchange)
            local.step(tokens=8)
            anchors = [fragment.anchors[name] for fragment in local.fragments for name in fragment.anchors]
            found = {
                "step": at, "quorum": quorum.number, "size": local.site.sites, "counts": True, "inner": local.steps,
                "weights": digest(*anchors), "returns": local.returns, "skips": local.skips,
                "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
                "residual": local.site.exchange.residual_norm(),
            }  # fmt: skip
            notes.write(json.dumps(found) + "\n")
        quorum.close()
        local.close()
        notes.write(json.dumps({"done": str(local.summary())}) + "\n")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def happen(event: str, quorum: tw.elastic.Quorum, exchange: object) -> None:
    """What is to happen before the exchange of a step, or in it."""

    def tell_one(receives: list, sends: list) -> None:
        for work in [quorum.irecv(x, peer) for x, peer in receives] + [
            quorum.isend(x, 0) for x, to in sends if to == 0
        ]:
            work.wait()
        time.sleep(0.5)
        die()

    agree = exchange.agree

    def agree_and_die(flags: torch.Tensor) -> torch.Tensor:
        if event == "die agreeing":
            die()
        quorum.post = tell_one
        return agree(flags)

    if event == "die":
        die()
    if event == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if event in ("die agreeing", "die between"):
        exchange.agree = agree_and_die


def first_members(out: str) -> int:
    """How many must be there for the first step to count: all three that begin, so that all see the events; two for one
    that comes later."""
    return 2 if os.path.exists(f"{out}.hold") else 3


def let_others_die(quorum: tw.elastic.Quorum) -> None:
    """From now on two are enough."""
    quorum.manager._min_replica_size = 2


def wait_for_the_test(out: str) -> None:
    """Until it lets this member come."""
    while os.path.exists(f"{out}.hold"):
        time.sleep(0.02)


def main(address: str, name: str, wire: str, steps: int, events: dict[int, str], out: str) -> None:
    model = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    quorum = tw.elastic.Quorum(
        {"model": model, "optimizer": optimizer}, address, name=name, min_members=first_members(out), **LIMITS
    )
    if wire == "feedback":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        forward = nn.parallel.DistributedDataParallel(model)
        reducer = tw.parallel.compress_ddp(forward, tw.Wire(gradient=WIRES[wire]), group=quorum).reducer
    else:
        forward = model
        reducer = tw.parallel.Reducer(model.named_parameters(), tw.Wire(gradient=WIRES[wire]), quorum)
    wait_for_the_test(out)
    averaged: dict[str, torch.Tensor] = {}
    with open(out, "w", buffering=1) as notes:
        while quorum.steps < steps:
            quorum.begin()
            event = events.pop(quorum.steps, "")
            at = quorum.steps
            time.sleep(0.05)
            first = states(reducer)  # healed already
            happen(event, quorum, reducer.exchange)
            x = torch.randn(8, 60)
            x[0] = torch.nan if event == "nan" else 1.0
            forward(x).pow(2).mean().backward()
            if forward is model:
                reducer.finish()
            means = {"x": torch.zeros(1)}
            if forward is not model:  # in a death between two messages the step is to count for some
                means = tw.all_reduce({"x": torch.randn(200)}, tw.collectives.Quantized(4), quorum, averaged)
            counts = quorum.commit()
            if counts:
                let_others_die(quorum)
                optimizer.step()
            optimizer.zero_grad()
            moments = [value for state in optimizer.state.values() for value in state.values()]
            found = {
                "step": at, "quorum": quorum.number, "size": reducer.size, "rank": reducer.rank, "counts": counts,
                "weights": digest(*model.parameters()), "moments": digest(*moments), "before": first,
                "after": states(reducer), "skips": reducer.skips, "mean": digest(means["x"]),
                "averaged_in": int(averaged.get("quorum", -1)), "averaged_steps": int(averaged.get("step", -1)),
            }  # fmt: skip
            notes.write(json.dumps(found) + "\n")
        quorum.close()
        reducer.close()
        notes.write(json.dumps({"done": str(reducer.summary())}) + "\n")


def train_site(address: str, name: str, steps: int, events: dict[int, str], out: str) -> None:
    """One rank of an FSDP site."""
    rank = int(name[-1])
    comes_later = os.path.exists(f"{out}.hold")
    wait_for_the_test(out)
    store = dist.FileStore(f"{out[:-1]}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60 * SLOW))
    torch.manual_seed(int(comes_later))
    model = nn.Sequential(nn.Linear(60, 61), nn.Tanh(), nn.Linear(61, 10))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    quorum = tw.elastic.Quorum(
        {"site": tw.elastic.Shards(model, optimizer)}, address, name=name[:-1], min_members=2, inside=mesh.get_group(),
        **LIMITS,
    )  # fmt: skip
    handle = tw.parallel.compress_fsdp(model, tw.Wire(gradient=WIRES["feedback"]), replicas=quorum)
    torch.manual_seed(sum(name.encode()))
    with open(out, "w", buffering=1) as notes:
        while quorum.steps < steps:
            quorum.begin()
            at, event = quorum.steps, events.pop(quorum.steps, "")
            if event == "die":
                die()
            x = torch.randn(8, 60)
            x[0] = torch.nan if event == "nan" else 1.0
            model(x).pow(2).mean().backward()
            counts = quorum.commit()
            if counts:
                optimizer.step()
            optimizer.zero_grad()
            moments = [value for state in optimizer.state.values() for value in state.values()]
            local = [value.to_local() if isinstance(value, DTensor) else value for value in moments]
            found = {
                "step": at, "quorum": quorum.number, "size": handle.reducer.size, "counts": counts,
                "weights": digest(*(p.to_local() for p in model.parameters())), "moments": digest(*local),
                "residual": handle.reducer.exchange.residual_norm(), "mean": 0, "averaged_in": 0, "averaged_steps": 0,
            }  # fmt: skip
            notes.write(json.dumps(found) + "\n")
        quorum.close()
        handle.close()
        notes.write(json.dumps({"done": True}) + "\n")


def live(address: str, name: str, wire: str, steps: int, events: dict[int, str], out: str) -> None:
    """A member's process."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "error"}
    log = open(f"{out}.log", "w")  # noqa: SIM115  (as long as the process lives)
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    train = {"local": train_locally, "site": train_site}.get(wire, partial(main, wire=wire))
    train(address, name, steps=steps, events=events, out=out)
