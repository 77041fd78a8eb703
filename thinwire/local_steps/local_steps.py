"""Sites that train by themselves, and average seldom:

    every H inner steps:   Δ_i = anchor − keep·e_i − θ_i ;  u_i = Δ_i + e_i ;  (mean, own_i) = exchange(u_i)
                           e_i ← β(u_i − own_i) ;  anchor ← OuterOptimiser(anchor, mean)
                           θ_i ← anchor − keep·e_i + (θ_i − θ_i as it was sent)

DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), SparseLoCo (2508.15706) and LocalSGD are settings of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from thinwire.collectives import Dense
from thinwire.collectives.groups import ALONE, Group, destroy, elastic, twin, world
from thinwire.config.local import Local, OuterFactory
from thinwire.config.wire import Reduction, WireLike, warmup_steps
from thinwire.data_parallel.checkpoint import RankState, read_state
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_units import Shape, Unit, make_units
from thinwire.data_parallel.parameters import trainable_parameters
from thinwire.data_parallel.precompile import precompile_averaging
from thinwire.distributed.streams import settled_streams
from thinwire.distributed.summary import Summary
from thinwire.distributed.thread import CommunicationThread
from thinwire.local_steps.checks import check_alike, check_tokens, check_trained, shard_group
from thinwire.local_steps.fragment import Fragment, at_anchors, own_part, start_anew
from thinwire.local_steps.last import other_wire
from thinwire.local_steps.quorum import Meetings, check_not_met, check_settings
from thinwire.local_steps.round import Round, Site
from thinwire.local_steps.schedule import Schedule, split_fragments
from thinwire.local_steps.state import bring, load_fragments, load_optimizer, part_of, round_state, site_state


class LocalSteps:
    """Averages the weights of several sites every so many inner steps. On all ranks, with equal arguments and weights.

        local = tw.parallel.LocalSteps(model.named_parameters(), inner, "sparseloco")
        for batch in loader:
            loss(model, batch).backward(); inner.step(); inner.zero_grad()
            local.step()

    named_parameters: pairs such as model.named_parameters() gives; those that require no gradient are left out, and
    buffers are never averaged. FSDP2's are averaged shard by shard.
    inner: the optimiser of these parameters. Its state is saved with the rest, and forgotten where it is not finite.
    wire: a preset of local steps (diloco, streaming-diloco, sparseloco, local-max, local-signs), whose settings the
    arguments below override; a table `[local]`; or what `Reducer` takes: a tw.Wire, a preset's name, a collective.
    group: the process group, or 1-D mesh, of one rank per site: those that hold the same part of the model. None is
    torch's default one. In a quorum (tw.elastic.Quorum) it waits for the others' next round, and begins with them.
    every: inner steps between two averagings of a fragment, 30 unless the preset says otherwise. grow: rounds become
    rarer, after inner step t the next is t/grow steps later, until they are `every` apart; 0: they are from the start.
    outer: parameters → torch.optim.Optimizer, of the anchors; by default SGD with Nesterov (0.7, 0.9) or the preset's.
    fragments: parts of the model, each averaged at its own offset. delay: inner steps between sending a fragment and
    applying its mean, less than `every`; sending goes on meanwhile on a thread.
    mix: "carry" keeps what a site has learnt since sending, θ ← base + (θ − θ_sent); a share α from 0 to under 1 is
    θ ← α·θ + (1 − α)·base. keep: the share, from 0 to 1, of what was not sent that stays in a site's weights, whose
    base is then anchor − keep·e; 0 unless the preset says otherwise.
    warmup: the first inner steps, after each of which weights are averaged exactly. host: anchors, the outer
    optimiser's state and residuals are kept in host memory, and exchanged from there, over Gloo. seed: of all chance.
    parts: ranks of this site that hold other parts of the model (tensor parallel, pipeline; of FSDP2 they are known).
    copies: ranks of this site that hold the same part (DDP): the first of them sends, the others are told the mean.
    state: as for load_state_dict; in a quorum it is given here, since who has met the others has theirs.

    UsageError where an argument is not allowed, or ranks differ in configuration or weights.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], inner: Optimizer, wire: Local | WireLike,
        group: Group | DeviceMesh = None, *, every: int | None = None, outer: OuterFactory | None = None,
        fragments: int | None = None, delay: int | None = None, mix: str | float | None = None,
        keep: float | None = None, warmup: int | None = None, grow: int | None = None, host: bool | None = None,
        seed: int = 0, parts: Group = None, copies: Group = None, state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.settings = Local.of(wire).but(
            every=every, fragments=fragments, delay=delay, mix=mix, keep=keep, warmup=warmup, grow=grow, host=host
        )
        self.parameters = trainable_parameters(named_parameters)
        check_trained(self.parameters, inner)
        self.inner = inner
        self.reduction = self.settings.wire.gradient or Reduction(Dense())
        self.exact_rounds = warmup_steps("gradient", self.reduction)
        self.group: Group = group.get_group() if isinstance(group, DeviceMesh) else group
        parts = shard_group(self.parameters) if parts is None else parts
        quorum, settings = elastic(self.group), self.settings
        if quorum is not None:
            check_settings(settings, parts, copies)
        else:
            check_alike(settings, self.parameters, outer, seed, (self.group, parts, copies))
        self.schedule = Schedule.of(settings)
        shapes = {name: tuple(own_part(p).shape) for name, p in self.parameters.items()}
        names = split_fragments(shapes, settings.fragments)
        units = [make_units({n: shapes[n] for n in some}, self.reduction) for some in names]
        self.site = self._join(shapes, [u for some in units for u in some], seed, parts, copies)
        self.fragments = [
            Fragment(i, {n: self.parameters[n] for n in some}, units[i], settings, outer, self.site.residual)
            for i, some in enumerate(names)
        ]
        self.thread = CommunicationThread("thinwire local steps")
        self.in_flight: dict[int, Round] = {}
        self.steps = self.resumed = 0  # inner steps, those of a loaded state included; of them, those of the state
        self.rounds = 0  # fragments' means that were applied or dropped
        self.skips = self.returns = 0  # of them, those dropped; those in which this site's weights were not finite
        self.meetings: Meetings | None = None
        if state is not None:
            self.load_state_dict(state)
        if quorum is not None:
            about = settings, outer, seed
            self.meetings = Meetings(quorum, self.site, about, self.fragments, inner, self.thread, self.schedule)
            self._meet(0)

    def _join(self, shapes: Mapping[str, Shape], units: list[Unit], seed: int, parts: Group, copies: Group) -> Site:
        """Process groups of its own, and the exchange between the sites."""
        sites, self.rank = world(self.group) if elastic(self.group) is None else (1, 0)
        backend = "gloo" if self.settings.host else None  # what is exchanged is then in host memory
        inside = [twin(g, backend) if g is not None and world(g)[0] > 1 else None for g in (parts, copies)]
        self.sends = inside[1] is None or world(inside[1])[1] == 0
        own = twin(self.group, backend) if sites > 1 else None
        self.shard = f"shard{world(parts)[1]}of{world(parts)[0]}" if inside[0] is not None else None
        tensors = {name: own_part(p) for name, p in self.parameters.items()}
        precompile_averaging("outer gradients", self.reduction, tensors, 2 if elastic(self.group) else sites)
        streams = settled_streams(self.settings.wire.streams, own or ALONE)
        seed = seed if parts is None else seed * world(parts)[0] + world(parts)[1]
        exchange = Exchange(shapes, self.reduction, own or ALONE, seed, streams=streams, units=units)
        self.groups = [g for g in (own, *inside) if g is not None]
        self.checkpoint = RankState(exchange, self.rank, sites, elastic(self.group) is not None)
        return Site(exchange, sites, inside[0], inside[1], keep=self.settings.keep)

    # --- a step

    def step(self, tokens: float = 1.0) -> bool:
        """After the inner optimiser's step, on all ranks: was a mean applied?

        tokens: what this step weighs in the mean over sites, such as the number of tokens that the site has trained
        on; equal on all ranks of a site.
        """
        check_tokens(tokens)
        self.steps = self.steps + 1 if self.meetings is None else self.meetings.pace.advance(self.steps)
        for fragment in self.fragments:
            fragment.tokens += tokens
        if self.schedule.is_warmup(self.steps):
            self._average(self.site, exact=True)
            return True
        due = self.schedule.applied(self.steps)
        if self.meetings is not None:
            for number in due:
                self._meet(number)
            return bool(due)
        for number in (late := [number for number in due if number in self.in_flight]):
            self._apply(number)
        for number in self.schedule.sent(self.steps):
            self._send(self.fragments[number])
        for number in set(due) - set(late):
            self._apply(number)
        return bool(due)

    def finish(self, last: WireLike | None = None) -> None:
        """At the end of training, on all ranks: one last round of every fragment. All sites then hold the anchor.

        last: that round's own wire, such as "max". It then sends residuals too, and goes past the outer optimiser.
        """
        self._apply_all()
        if last is not None:
            with other_wire(self.site, last, self.fragments) as other:
                self._average(other, exact=False)
        for fragment in self.fragments if last is None else ():
            if self.meetings is not None:
                self._meet(fragment.number)
            elif fragment.tokens:
                self._send(fragment)
        self._apply_all()
        for fragment in self.fragments:
            fragment.take_anchor()

    def at_anchor(self) -> AbstractContextManager[None]:
        """Inside, the model has the anchor's weights, which all sites share: evaluate and save there."""
        return at_anchors(self.fragments)

    def summary(self) -> Summary:
        """What was sent between sites so far, beside fp32 data parallel that averages gradients after every step."""
        sites, steps = self.site.sites, self.steps - self.resumed
        values = sum(own_part(p).numel() for p in self.parameters.values())
        dense = 2 * 4 * values * (sites - 1) // sites * steps if self.sends else 0
        return Summary(steps, self.site.exchange.sent, dense, self.skips)

    def _meet(self, number: int) -> None:
        """In a quorum: one round that counts, and its mean; none where all sites have just come."""
        assert self.meetings is not None
        number = self.meetings.meet(number, self.steps, self._send_after)
        _, self.rank = self.checkpoint.follow()
        if self.steps:
            self._apply(number)

    def _send_after(self, fragment: Fragment, steps: int, seconds: float) -> Round:
        """In a quorum: after so many inner steps, those of others where this site has taken their state."""
        self.resumed, self.steps = self.resumed + steps - self.steps, steps
        self.in_flight.clear()  # of a round that did not count
        return self._send(fragment, took=seconds)

    def _send(self, part: Fragment, site: Site | None = None, exact: bool | None = None, took: float = 0.0) -> Round:
        sent = {name: w.clone() for name, w in part.weights().items()} if self.schedule.delay else {}
        exact = self.site.exchange.steps < self.exact_rounds if exact is None else exact
        round = Round(part.number, self.steps, part.outer_gradient(), part.tokens, exact, sent, seconds=[took])
        part.tokens = 0.0
        self.in_flight[part.number] = round
        self.thread.submit(partial(round.run, site or self.site), part.home, lambda error: round.arrived.set())
        return round

    def _arrived(self, number: int) -> Round:
        round = self.in_flight[number]
        round.wait()
        if self.thread.error is not None:
            self.thread.wait()
        return round

    def _apply(self, number: int) -> None:
        """The mean that was sent `delay` steps ago, unless `finish` has applied it already."""
        if number in self.in_flight:
            round, fragment = self._arrived(number), self.fragments[number]
            del self.in_flight[number]
            if not round.dropped:
                fragment.step(round.means)
            self._bring(fragment, round, self.settings.mix)

    def _apply_all(self) -> None:
        for number in sorted(self.in_flight, key=lambda n: self.in_flight[n].step):
            self._apply(number)

    def _average(self, site: Site, exact: bool) -> None:
        """θ ← mean of θ over the sites, past the outer optimiser: the warm-up's step, or the last round."""
        for fragment in self.fragments:
            self._send(fragment, site, exact)
        for fragment in self.fragments:
            round = self._arrived(fragment.number)
            del self.in_flight[fragment.number]
            if not round.dropped:
                fragment.move(round.means)
            self._bring(fragment, round, mix=0.0)

    def _bring(self, fragment: Fragment, round: Round, mix: str | float) -> None:
        """θ after a round."""
        self.rounds += 1
        self.skips += round.dropped
        self.returns += round.returns
        bring(fragment, round, mix, self.inner)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on with the same bits, under names that hold its rank: this site's weights and
        inner optimiser, anchors, outer optimiser, residuals, and means under way. Called on all ranks together, since
        it waits for what is being sent. Where the model is in parts, it is {"shard<i>of<n>": …}."""
        out = {"step": torch.tensor(self.steps)} | site_state(self.inner, self.parameters, self.fragments)
        for number in self.in_flight:
            out |= round_state(self._arrived(number))
        if self.sends or self.site.keep:  # other copies have no residual, and torch keeps one of equal names
            out |= {f"exchange/{name}": value for name, value in self.site.exchange.state_dict().items()}
        ranked = {f"rank{self.rank}of{self.site.sites}/{name}": value for name, value in out.items()}
        return ranked if self.shard is None else {self.shard: ranked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave on this rank, or, from another number of sites, what it gave on all of them.

        The same number of sites goes on with the same bits, in a quorum a site from its own part alone. On another
        number every site starts from the anchor, after what was under way has been applied, with the mean of all
        residuals and a new inner optimiser.
        """
        check_not_met(self.meetings)
        exchanged, mine, same = part_of(state, self.shard, self.rank, self.site.sites, self.checkpoint.elastic)
        if self.sends or self.site.keep:
            self.checkpoint.load_state_dict(exchanged)
        self.resumed, self.steps = self.resumed + int(mine["step"]) - self.steps, int(mine["step"])
        self.in_flight = load_fragments(self.fragments, mine)
        if same:
            load_optimizer(self.inner, self.parameters, "inner", mine)
        else:
            self._apply_all()
            start_anew(self.fragments)

    def read_state(self, path: str | PathLike[str], prefix: str) -> dict[str, Any]:
        """What load_state_dict needs, from dcp.save({prefix: local.state_dict(), …}, checkpoint_id=path); path: the
        checkpoint's folder, prefix: the state's name in it."""
        name, found = self.shard, read_state(path, f"{prefix}.{self.shard}" if self.shard else prefix, self.group)
        return found if name is None else {name: found}

    def close(self) -> None:
        """End the communication thread, and destroy the process groups that were made here."""
        self.thread.close()
        for group in (*self.groups, *self.reduction.collective.leave_groups(self.site.exchange.group)):
            destroy(group)
        self.groups = []
        self.site.exchange.leave_group()
