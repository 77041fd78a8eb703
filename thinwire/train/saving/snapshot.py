"""What a checkpoint holds of one rank: names → tensors, and back.

model/<name>                   weights; with several sites those that all of them share
optim/<name>/<field>           the optimiser's, of one site; with several they are in local-…
gradient-<place>/…, …          compression between replicas; with several sites after "site-<s>/"
local-<kind>/<part>/rank<s>of<S>/…   all in which sites differ (sites/averaging.py)
rank-<r>/…                     the pipeline's memory, generators, bytes sent
boundaries/…                   learned boundaries; their tables are weights
data/…, cut, sites, …          the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.build import Parts
from thinwire.train.checkpoint import renamed
from thinwire.train.config.families import HEAD
from thinwire.train.model.tensor_parallel import concerns, plain_name, read_back, saved_name
from thinwire.train.sites.member import Member
from thinwire.train.totals import Totals

DECISION = "decision"  # its name in a checkpoint
NUMBERS = ("step", "seconds", "skips", "cut", "sites", "began")


class Position(NamedTuple):
    """Where a saved run was: step, seconds, how many sites it had, and the step at which it first had several."""

    step: int
    seconds: float
    sites: int
    began: int


@dataclass(frozen=True)
class Snapshot:
    """Takes and puts back the state of this rank.

    parts, totals: what it trains with, and counts. say: called with a line for the user.
    """

    parts: Parts
    totals: Totals
    say: Callable[[str], None]

    @property
    def own(self) -> str:
        """Before names that belong to this rank."""
        return f"rank-{dist.get_rank()}/"

    @property
    def of_site(self) -> str:
        """Before names of compression inside this site."""
        return f"site-{self.parts.mesh.site}/"

    def take(self, step: int, seconds: float, sites: Member | None) -> dict[str, Tensor]:
        """All that a run goes on from after `step` steps in `seconds`; sites: where there are several."""
        own, parts = self.own, self.parts
        held = {name: p.detach() for name, p in parts.named.items()} if sites is None else sites.averaging.anchors()
        state = {saved_name(f"model/{n}", p, p, parts.mesh.slice): held[n] for n, p in parts.named.items()}
        inside = parts.update.state_dict()
        if sites is None:
            state |= inside
        else:
            state |= {f"{self.of_site}{n}": v for n, v in inside.items() if not n.startswith("optim/")}
            state |= sites.state_dict()
        state |= {f"{own}pipeline/{name}": value for name, value in parts.engine.state_dict().items()}
        state |= {f"boundaries/{name}": value for name, value in parts.engine.learned().items()}
        state |= {f"{own}rng": torch.get_rng_state(), f"{own}sent": self.totals.state()}
        if parts.config.run.device == "cuda":
            state[f"{own}rng on card"] = torch.cuda.get_rng_state()
        state |= {f"data/{name}": torch.tensor(value) for name, value in parts.batches.state_dict().items()}
        if parts.blueprint.by_rows:  # also under the name of the copy that is not there, for runs that have it
            state |= renamed(state, HEAD, parts.blueprint.family.embedding)
        state["cut"] = self.parts.cut
        if parts.decision is not None:
            state[DECISION] = parts.decision.pack()
        state["skips"] = torch.tensor(parts.update.skips)
        return state | {"step": torch.tensor(step), "seconds": torch.tensor(seconds, dtype=torch.float64)}

    def wants(self, name: str) -> bool:
        """Is this name of a checkpoint for this rank?"""
        place = self.parts.mesh.slice
        return (
            name in NUMBERS
            or name.startswith((self.own, "data/", "boundaries/"))
            or (plain_name(name).removeprefix("model/") in self.parts.named and concerns(name, place))
            or self.parts.update.wants(name.removeprefix(self.of_site))
        )

    def put_back(self, state: dict[str, Tensor], source: str) -> Position:
        """Go on from there, all but what is between sites (`Member.load_state_dict`).

        state: as `take` returned it, of this rank at least. source: where it comes from."""
        parts, own = self.parts, self.own
        state = self.placed(state)
        before, now = int(state.get("sites", 1)), parts.config.mesh.sites
        same = self._check_split(torch.equal(state["cut"], self.parts.cut), before, now, source)
        learned = {n.removeprefix("boundaries/"): v for n, v in state.items() if n.startswith("boundaries/")}
        parts.engine.load_learned(learned, same)
        self._put_weights(state, source)
        inside = state if before == 1 else {n.removeprefix(self.of_site): v for n, v in state.items()}
        parts.update.load_state_dict(inside, same)
        memory = {n.removeprefix(f"{own}pipeline/"): v for n, v in state.items() if n.startswith(f"{own}pipeline/")}
        if memory and same:
            parts.engine.load_state_dict(memory)
        if f"{own}rng" in state:
            torch.set_rng_state(state[f"{own}rng"])
            self.totals.load(state[f"{own}sent"])
        if f"{own}rng on card" in state and parts.config.run.device == "cuda":
            torch.cuda.set_rng_state(state[f"{own}rng on card"])
        parts.batches.load_state_dict(
            {n.removeprefix("data/"): int(v) for n, v in state.items() if n.startswith("data/")}
        )
        parts.update.skips = int(state.get("skips", 0))  # older checkpoints lack it
        step = int(state["step"])
        return Position(step, float(state["seconds"]), before, int(state.get("began", step)))

    def placed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The saved state on the devices of this run: tensors on its own, numbers and generators on the host."""
        device = self.parts.config.run.device
        stays = (f"{self.own}rng", f"{self.own}sent", "data/", "cut")
        return {n: v.to(device) if v.dim() and not n.startswith(stays) else v for n, v in state.items()}

    # --- inside

    @torch.no_grad()
    def _put_weights(self, state: dict[str, Tensor], source: str) -> None:
        for name, parameter in self.parts.named.items():
            stored = read_back(f"model/{name}", state, parameter, self.parts.mesh.slice)
            if stored is None:
                raise UsageError(f"{source} has no {name}: it is a checkpoint of another model")
            if stored.shape != parameter.shape:
                shapes = f"is {tuple(stored.shape)}, here it is {tuple(parameter.shape)}"
                raise UsageError(f"{source}: {name} {shapes}: it is a checkpoint of another model")
            parameter.copy_(stored)

    def _check_split(self, same_cut: bool, before: int, now: int, source: str) -> bool:
        """Can what was remembered be used again? before, now: sites. UsageError where the run cannot go on."""
        if not same_cut and before > 1 and now > 1:
            raise UsageError(
                f"{source}: its stages are split otherwise, so what its {before} sites have not sent yet cannot be "
                "used: give [mesh] pp, schedule and split as they were, or train anew in another [run] out"
            )
        if before == now and not same_cut:
            self.say("the pipeline is split otherwise than in the checkpoint: compression starts without memory")
        elif before != now:
            self.say(f"the checkpoint is of {_sites(before)}, this run of {_sites(now)}: {_carried(before, now)}")
        return same_cut and before == now


def _sites(count: int) -> str:
    return "one site" if count == 1 else f"{count} sites"


def _carried(before: int, now: int) -> str:
    """What goes on where the number of sites has changed, and what does not."""
    if before == 1:
        return "all start from its weights and optimiser, compression without memory"
    kept = "is dropped" if now == 1 else "is shared out evenly"
    return f"it starts from the weights that all shared, with a new optimiser; what was not sent yet {kept}"
