"""One life of a member: what it trains, and how its gradients are averaged. Used by one_run.py and faults.py.

Methods: a preset of `[wire]` (by `Reducer`), "local" (`LocalSteps` with SparseLoCo's wire), "local-dense" (with four
bits per value, and DiLoCo's outer optimiser), "torchft" (torchft alone: its all-reduce in fp32 and its own transport of
state).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.config.presets import LOCAL_PRESETS
from thinwire.elastic.require import require_torchft

CONTEXT, BATCH = 32, 64  # of the latter per member, where all are there
DOCS = Path(__file__).parents[3] / "docs"
EVERY = 10  # inner steps of a round of local steps
RATE = 1e-3
LOCAL = {
    "local": {"preset": "sparseloco", "every": EVERY},
    "local-dense": {"preset": "diloco", "wire": "max", "every": EVERY},
}
PRELOAD = ("torch", "torch._dynamo", "torchft", "member")  # imported once per lab


def warm_up() -> None:
    """Before members are forked: what each of them would import and compile again."""
    import torch._dynamo

    from thinwire.config.wire import Wire
    from thinwire.data_parallel.precompile import try_exchange

    require_torchft()
    import torchft  # noqa: F401

    torch.set_num_threads(1)
    for wire in ("max", {"gradient": LOCAL_PRESETS["sparseloco"]["wire"]["gradient"]}):
        reduction = Wire.of(wire).gradient
        assert reduction is not None
        try_exchange(reduction, {"weight": (128, 128), "bias": (128,)}, torch.zeros(1))


class NextByte(nn.Module):
    """About a million parameters with width 400."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.body = nn.Sequential(nn.Linear(64 * CONTEXT, width), nn.ReLU(), nn.Linear(width, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding(x).flatten(1))


def pages() -> bytes:
    """This project's documentation, but for the log."""
    return b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")) if path.name != "log.md")


def text() -> tuple[Tensor, Tensor]:
    """(to train on, held out), bytes of the documentation."""
    data = torch.frombuffer(bytearray(pages()), dtype=torch.uint8).long()
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def batch(data: Tensor, g: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=g)
    windows = data.unfold(0, CONTEXT + 1, 1)[starts]
    return windows[:, :-1], windows[:, -1]


def generator(*about: int) -> torch.Generator:
    """Numbers that follow from `about`."""
    return torch.Generator().manual_seed(hash(about) % 2**62)


class Life:
    """A model, its optimiser, and its place among the members; `step` makes one step or round.

    options: seed, method, members, steps, width, min_members, timeout, patience; rest: seconds before every step or
    round, 0 where it is not given. data: to train on.

    The samples of a step follow from its number, and are dealt to those who are there, so that runs with and without
    deaths train on the same ones. Local steps take them from one row of batches: a round begins where those end that
    counted so far, and every site takes ten by its place in the last round. A run of local steps ends after as many
    samples as `steps` rounds of all members have.
    """

    def __init__(self, options: dict[str, Any], data: Tensor, host: str, lighthouse: str, name: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(options["seed"])
        self.options = options
        self.data = data
        self.model = NextByte(options["width"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), RATE)
        self.method = options["method"]
        self.reducer: Any = None
        self.local: Any = None
        limits = {key: options[key] for key in ("min_members", "timeout", "patience")}
        if self.method == "torchft":
            self._join_torchft(host, lighthouse, name, limits)
            return
        state = {} if self.method in LOCAL else {"model": self.model, "optimizer": self.optimizer}
        self.quorum = tw.elastic.Quorum(state, lighthouse, host=host, name=name, **limits)
        if self.method in LOCAL:
            self.local = tw.parallel.LocalSteps(
                self.model.named_parameters(), self.optimizer, LOCAL[self.method], self.quorum, seed=options["seed"]
            )
        else:
            self.reducer = tw.parallel.Reducer(self.model.named_parameters(), self.method, self.quorum)

    def _join_torchft(self, host: str, lighthouse: str, name: str, limits: dict[str, Any]) -> None:
        import torch.distributed as dist
        from torchft import Manager, ProcessGroupGloo

        limit = timedelta(seconds=limits["timeout"])
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit), load_state_dict=self._load, state_dict=self._state,
            min_replica_size=limits["min_members"], use_async_quorum=False, timeout=limit, connect_timeout=limit,
            quorum_timeout=timedelta(seconds=limits["patience"]), rank=0, world_size=1, store_addr=host,
            store_port=self.store.port, lighthouse_addr=lighthouse, hostname=host, replica_id=name,
        )  # fmt: skip

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    # --- where it is

    @property
    def steps(self) -> int:
        return int(self.manager.current_step() if self.method == "torchft" else self.quorum.steps)

    @property
    def progress(self) -> float:
        """The share of the run's samples that have counted."""
        if self.local is None:
            return self.steps / self.options["steps"]
        return self.local.meetings.tokens / (self.options["steps"] * self.options["members"] * EVERY)

    def about(self) -> dict[str, Any]:
        """What is noted of a step."""
        if self.method == "torchft":
            return {"size": self.manager.num_participants(), "residual": None, "sent": 0, "healed": 0, "progress": 0}
        exchange = self.local.site.exchange if self.local is not None else self.reducer.exchange
        size = self.local.site.sites if self.local is not None else self.reducer.size
        return {
            "size": size, "residual": exchange.residual_norm(), "sent": exchange.sent,
            "healed": self.quorum.healing.received, "progress": self.progress,
        }  # fmt: skip

    def digest(self) -> str:
        """Of the weights that all members share."""
        weights = [p.detach() for p in self.model.parameters()]
        if self.local is not None:
            weights = [f.anchors[name] for f in self.local.fragments for name in f.anchors]
        return hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights)).hexdigest()[:16]

    # --- a step

    def step(self) -> bool:
        """One step, or one round of local steps: did it count?"""
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * max(0.02, 1 - self.progress)
        time.sleep(self.options.get("rest", 0.0))
        if self.local is not None:
            return self._round()
        if self.method == "torchft":
            self.manager.start_quorum()
        else:
            self.quorum.begin()
        self._backward()
        counts = self._average()
        if counts:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return counts

    def _round(self) -> bool:
        for x, y in self._inner():
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.local.step():
                return True
        raise AssertionError("a round has no end")

    def _inner(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of a site in a round."""
        place = self.local.site.exchange.place[1]
        g = generator(self.options["seed"], round(self.local.meetings.tokens / EVERY) + place)
        while True:
            yield batch(self.data, g, BATCH)

    def _backward(self) -> None:
        """This member's share of the step's samples. One that has no place (its state did not come) computes on all."""
        if self.method == "torchft":
            place, size = self.manager.participating_rank() or 0, max(1, self.manager.num_participants())
        else:
            size, place = self._place()
        whole = BATCH * self.options["members"]
        x, y = batch(self.data, generator(self.options["seed"], self.steps), whole)
        loss = nn.functional.cross_entropy(self.model(x[place::size]), y[place::size], reduction="sum")
        (loss * (size / whole)).backward()

    def _place(self) -> tuple[int, int]:
        """(members, this one's place)."""
        try:
            return self.quorum.world()
        except RuntimeError:  # no connections: this step will not count
            return 1, 0

    def _average(self) -> bool:
        if self.method != "torchft":
            self.reducer.finish()
            return self.quorum.commit()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.manager.allreduce(flat).wait()
        counts = self.manager.should_commit()
        sizes = [p.numel() for p in self.model.parameters()]
        for parameter, part in zip(self.model.parameters(), flat.split(sizes)):
            parameter.grad = part.view_as(parameter)
        return counts

    def close(self) -> None:
        """Leave; the others go on."""
        if self.method == "torchft":
            self.manager.shutdown(wait=False)
        else:
            self.quorum.close()
            (self.local or self.reducer).close()


def train(
    notes: Path, options: dict[str, Any], host: str, lighthouse: str, name: str, ended: Callable[[Life], bool]
) -> float:  # fmt: skip
    """One life, until `ended`: the held-out loss. notes: a line per step goes there."""
    data, held_out = text()
    one = Life(options, data, host, lighthouse, name)
    with notes.open("w", buffering=1) as file:
        while not ended(one):
            counts = one.step()
            said = {"step": one.steps - counts, "at": time.monotonic(), "counts": counts}
            said |= {"weights": one.digest(), **one.about()}
            file.write(json.dumps(said) + "\n")
    x, y = batch(held_out, torch.Generator().manual_seed(0), 8192)
    model = one.model
    with torch.no_grad():
        if one.local is None:
            loss = float(nn.functional.cross_entropy(model(x), y))
        else:
            with one.local.at_anchor():
                loss = float(nn.functional.cross_entropy(model(x), y))
    one.close()
    return loss
