"""One averaging of a fragment between sites, on the communication thread.

    1. ranks of a site agree whether its Δ is finite; sites tell each other what theirs weigh (tokens, 0 for NaN)
    2. x_i = P·w_i·Δ_i with Σ w_i = 1 goes through the wire: u_i = x_i + e_i, (mean, own_i), e_i ← β(u_i − own_i)
    3. all agree whether the mean counts: where it is not finite, or a message was damaged, nothing is kept
    4. copies inside a site, which sent nothing, get the mean from the rank that did

A residual keeps the weight of the round that it was left in. A site with NaN sends zeros, and keeps its residual.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.base import is_finite
from thinwire.collectives.groups import world
from thinwire.collectives.messages import gather, maximum
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_units import Unit
from thinwire.data_parallel.quorum import Following
from thinwire.errors import InvalidExchange, UsageError
from thinwire.memory.group_reduce import beside

log = logging.getLogger("thinwire")


@dataclass
class Site:
    """The groups of a rank.

    exchange: between the sites; of a group of one where this rank is a copy that sends nothing.
    sites: how many there are. parts: ranks of this site that hold other parts of the model. copies: ranks of this site
    that hold the same part, the first of which sends. following: the quorum, where sites come and go. keep: the
    share of the residual that stays in the weights; copies have to know it then.
    """

    exchange: Exchange
    sites: int
    parts: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None
    following: Following | None = None
    keep: float = 0.0

    @property
    def sends(self) -> bool:
        """Does this rank speak for its copies?"""
        return self.copies is None or world(self.copies)[1] == 0

    def residual(self, unit: Unit) -> Tensor | None:
        """What this site has not sent of a unit; None where there is nothing."""
        return self.exchange.channels[unit].state.read("e", unit.name)

    def end_step(self, counts: bool) -> None:
        """Keep what a round wrote, or drop it; in a quorum it is kept where the vote says so."""
        if not counts:
            self.exchange.rollback()
            return
        self.exchange.finish_step()
        if self.following is None:
            self.exchange.commit()
        else:
            self.following.group.stage(self.following.settle)

    def any_inside(self, flag: bool, device: torch.device) -> bool:
        """Is it so on any rank of the site?"""
        value = torch.tensor([flag], dtype=torch.uint8, device=device)
        for group in (self.parts, self.copies):
            value = value if group is None else maximum(value, group)
        return bool(value)


@dataclass
class Round:
    """A fragment's outer gradient on its way.

    fragment: its number. step: the inner step after which it was sent. values: Δ by unit. tokens: what it weighs.
    exact: nothing is compressed. sent: the weights as they were, where the mean is applied later.
    means: by unit, once it has `arrived`. returns: this site's Δ was not finite. dropped: no mean counts. weight: the
    tokens of all sites. seconds: of this site's inner step, where sites come and go; afterwards of every site's.
    """

    fragment: int
    step: int
    values: dict[Unit, Tensor]
    tokens: float
    exact: bool = False
    sent: dict[str, Tensor] = field(default_factory=dict)
    means: dict[Unit, Tensor] = field(default_factory=dict)
    returns: bool = False
    dropped: bool = False
    weight: float = 0.0
    seconds: list[float] = field(default_factory=lambda: [0.0])
    arrived: threading.Event = field(default_factory=threading.Event)
    ready: torch.cuda.Event | None = None

    def run(self, site: Site) -> None:
        """On the communication thread."""
        device = next(iter(self.values.values())).device
        finite = all(bool(is_finite(x)) for x in self.values.values())
        self.returns = site.any_inside(not finite, device)
        if site.sends:
            self._between(site, device)
        if site.copies is not None:
            self._share(site, site.copies, device)
        if device.type == "cuda":
            self.ready = torch.cuda.current_stream(device).record_event()
        self.values = {}
        self.arrived.set()

    def wait(self) -> None:
        """On the caller's thread, until the mean is there; its stream then waits for the communication's."""
        self.arrived.wait()
        if self.ready is not None:
            for mean in self.means.values():
                mean.record_stream(torch.cuda.current_stream(mean.device))
            self.ready.wait()

    def _between(self, site: Site, device: torch.device) -> None:
        if site.sites == 1:
            self.dropped = self.returns or (site.following is not None and not self.tokens)  # it has just come
            self.weight = self.tokens
            self.means = {} if self.dropped else self.values
            return
        factor = self._weight(site, device)
        if factor is None:
            self.dropped = True
            if self.step:  # else all sites have just come
                log.warning(
                    "thinwire: no site has finite weights or tokens: the round is dropped, all return to the anchor"
                )
            return
        means, valid = {}, True
        for unit, x in self.values.items():
            try:
                means[unit] = reduce_unit(site.exchange, unit, x, 0.0 if self.returns else factor, self.exact)
            except InvalidExchange as error:
                log.warning("thinwire: a round is dropped: %s", error)
                valid = False
        flag = torch.tensor([not valid], dtype=torch.uint8, device=device)
        agreed = site.exchange.agree(flag)[:1]
        self.dropped = bool(agreed if site.parts is None else maximum(agreed, site.parts))
        site.end_step(not self.dropped)
        self.means = {} if self.dropped else means

    def _weight(self, site: Site, device: torch.device) -> float | None:
        """P·w of this site; None where nobody has any weight. UsageError where sites are not at the same round."""
        beside = [] if site.following is None else self.seconds
        mine = torch.tensor(
            [0.0 if self.returns else self.tokens, self.fragment, self.step, *beside],
            dtype=torch.float64, device=device,
        )  # fmt: skip
        everyone = torch.stack(gather(mine, site.exchange.flag_group)).tolist()
        self.seconds = [float(second) for *_, second in everyone] if beside else self.seconds
        for rank, (_, fragment, step, *_) in enumerate(everyone):
            if (fragment, step) != (self.fragment, self.step):
                raise UsageError(
                    f"LocalSteps: site {rank} averages fragment {fragment:.0f} after step {step:.0f}, this one "
                    f"{self.fragment} after step {self.step}: all sites make as many inner steps"
                )
        self.weight = sum(tokens for tokens, *_ in everyone)
        return site.sites * float(mine[0]) / self.weight if self.weight > 0 else None

    def _share(self, site: Site, copies: dist.ProcessGroup, device: torch.device) -> None:
        """From the first copy: does the mean count, the mean, and, where residuals stay in weights, the residuals."""
        told = torch.tensor([self.dropped, site.exchange.steps], device=device)
        dist.broadcast(told, group=copies, group_src=0)
        self.dropped = bool(told[0])
        for unit, x in self.values.items() if not self.dropped else ():
            self.means.setdefault(unit, torch.empty_like(x))
            dist.broadcast(self.means[unit], group=copies, group_src=0)
            if site.keep and not unit.exact:
                _share_residual(site, unit, x, copies)
        if not site.sends:
            site.exchange.go_on_from(int(told[1]))


def _share_residual(site: Site, unit: Unit, like: Tensor, copies: dist.ProcessGroup) -> None:
    """The first copy's, on all of them. like: a tensor of the unit."""
    own = site.residual(unit) if site.sends else None
    left = torch.zeros_like(like) if own is None else own.clone()
    dist.broadcast(left, group=copies, group_src=0)
    if not site.sends:
        site.exchange.channels[unit].state.write("e", unit.name, left)


def reduce_unit(exchange: Exchange, unit: Unit, x: Tensor, factor: float, exact: bool) -> Tensor:
    """The weighted mean of a unit; factor: P·w of this site, 0 where its values are NaN.

    With 0 the site sends u = 0, so that its residual is not sent either, and the residual stays as it was, but for what
    the exchange itself charges to it (the second hop's error of the chunk that it owns).
    """
    if factor:
        return exchange.reduce(unit, x if factor == 1 else x * factor, exact)
    channel = exchange.channels[unit]
    before = beside(channel.state.read("e", unit.name), x)
    mean = exchange.reduce(unit, torch.zeros_like(x) if before is None else -before, exact)
    charged = channel.state.read("e", unit.name)
    if before is not None:
        channel.state.write("e", unit.name, before if charged is None else before + charged)
    return mean
