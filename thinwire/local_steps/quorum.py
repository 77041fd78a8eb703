"""Local steps of sites that come and go: every round is a step of the quorum, and is repeated until it counts.

A site that dies is missed in the next round: the round is repeated by the others, with the same outer gradients. A
newcomer waits for a round, takes anchors, the outer optimiser and the inner one's moments from a site, and has no
weight in that round: it has trained on nothing yet.

It takes that site's residual too. With a newcomer everybody's residual counts for less: three of weight 1/3 become four
of 1/4. A fourth of 0 would take a quarter off the mean residual, and with sparse wires that is many rounds' learning.
With a copy of one of the three the mean is, on average, what it was.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from thinwire.collectives.members import Elastic, Saved
from thinwire.config.local import Local, OuterFactory
from thinwire.data_parallel.parameters import describe_parameters
from thinwire.data_parallel.quorum import Following
from thinwire.distributed.config_check import describe
from thinwire.distributed.thread import CommunicationThread
from thinwire.errors import UsageError
from thinwire.local_steps.fragment import Fragment, own_part, start_anew
from thinwire.local_steps.pace import Pace
from thinwire.local_steps.round import Round, Site
from thinwire.local_steps.schedule import Schedule
from thinwire.local_steps.state import load_fragments, load_optimizer, site_state


def check_settings(settings: Local, parts: object, copies: object) -> None:
    """UsageError where local steps cannot be so in a quorum. settings, parts, copies: LocalSteps'."""
    if settings.delay or settings.warmup or parts is not None or copies is not None:
        raise UsageError(
            f"LocalSteps in a quorum: delay = {settings.delay}, warmup = {settings.warmup}: both must be 0, and a site "
            "is one rank (no parts, no copies)"
        )


def check_not_met(meetings: Meetings | None) -> None:
    """UsageError in a quorum, once this site has met the others."""
    if meetings is not None:
        raise UsageError("LocalSteps in a quorum: LocalSteps(…, state=…), since who has met the others has theirs")


class Meetings:
    """The rounds of a site in a quorum.

    quorum: of the sites. site: with the exchange between them. about: LocalSteps' settings, outer and seed, equal on
    all sites, and compared when one comes. fragments, inner: whose state a newcomer takes. thread: on which rounds run.
    schedule: of the rounds.
    """

    def __init__(
        self, quorum: Elastic, site: Site, about: tuple[Local, OuterFactory | None, int], fragments: list[Fragment],
        inner: Optimizer, thread: CommunicationThread, schedule: Schedule,
    ) -> None:  # fmt: skip
        self.quorum = quorum
        self.site = site
        self.fragments = fragments
        self.inner = inner
        self.parameters = {name: p for fragment in fragments for name, p in fragment.parameters.items()}
        self.thread = thread
        self.number = 0  # of the fragment whose round it is
        self.steps = 0  # inner steps, equal on all sites when they meet
        self.pace = Pace(quorum.slow, schedule)
        self.tokens = 0.0  # of all sites, in the rounds that counted
        settings, outer, seed = about
        config = describe(settings, "local") | {"seed": repr(seed), "outer": "by default" if outer is None else "given"}
        config |= describe_parameters({name: own_part(p) for name, p in self.parameters.items()})
        home = fragments[0].home
        self.site.following = Following(quorum, site.exchange, "thinwire outer gradients", config, home)
        quorum.register("thinwire local steps", self._load, self._save)

    def meet(self, number: int, steps: int, send: Callable[[Fragment, int, float], Round]) -> int:
        """One round that counts: the number of the fragment whose it was, which is the others' where this site has
        taken their state.

        number: of the fragment that is due here. steps: inner steps of this site. send: starts a fragment's round
        after so many inner steps, each of so many seconds.
        """
        self.number = number
        self.steps = steps
        seconds = self.pace.seconds()
        while True:
            self.quorum.begin()
            fragment = self.fragments[self.number]
            tokens = fragment.tokens
            weight, seconds_of_all = 0.0, [0.0]
            try:
                self.thread.submit(self._follow)
                self.thread.wait()
                round = send(fragment, self.steps, seconds)
                round.wait()
                self.thread.wait()
                weight, seconds_of_all = 0.0 if round.dropped else round.weight, round.seconds
            except RuntimeError as error:
                self.quorum.report(error)
            if self.quorum.commit():
                self.tokens += weight / len(self.fragments)
                self.pace.compare(self.site.exchange.place[1], seconds_of_all)
                self.pace.begin_round()
                return self.number
            fragment.tokens = tokens

    def _follow(self) -> None:
        assert self.site.following is not None
        self.site.following.follow()
        self.site.sites = self.site.exchange.size

    def _save(self) -> Saved:
        state = site_state(self.inner, self.parameters, self.fragments)
        kept = {name: value for name, value in state.items() if not name.startswith("weight/")}
        about = {"number": self.number, "steps": self.steps, "tokens": self.tokens}
        return about | {"state": kept, "residual": self._residuals()}

    def _residuals(self) -> dict[str, Tensor]:
        """By unit, after the last round that counted."""
        before = self.site.exchange.residuals_before  # of a round that may have to be repeated
        units = self.site.exchange.compressed
        found = {u.name: before[u] if u in before else self.site.residual(u) for u in units}
        return {name: left.clone() for name, left in found.items() if left is not None}

    def _load(self, told: Saved) -> None:
        state = told["state"]
        assert isinstance(state, dict)
        state = state | {f"weight/{n.removeprefix('anchor/')}": x for n, x in state.items() if n.startswith("anchor/")}
        load_fragments(self.fragments, state)
        load_optimizer(self.inner, self.parameters, "inner", state)
        if not self._residuals():  # one that was cut off, and comes back, has its own
            self._take_residuals(told["residual"])
        start_anew(self.fragments)
        self.number = int(str(told["number"]))
        self.steps = int(str(told["steps"]))
        self.tokens = float(str(told["tokens"]))

    def _take_residuals(self, theirs: object) -> None:
        assert isinstance(theirs, dict)
        for unit in self.site.exchange.compressed:
            if unit.name in theirs:
                left = theirs[unit.name].to(self.fragments[0].home)
                self.site.exchange.channels[unit].state.write("e", unit.name, left)
