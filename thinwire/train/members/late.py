"""A member whose weights and moments are still on their way takes part without samples, and the others train on.

It is in every exchange with zeros, so it gets every step's mean, which has the same bits on all members. It cannot
apply them, and keeps them in files. When the state of some step is here, it repeats the steps since then: the same
optimiser on the same means gives the same weights, to the bit. From the next step on it has samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from thinwire.collectives.messages import gather
from thinwire.elastic.healing import Healing
from thinwire.elastic.streams import Fetching
from thinwire.errors import RunFailed
from thinwire.train.data.batches import Batches
from thinwire.train.members.inside import any_rank
from thinwire.train.members.state import Shared

log = logging.getLogger("thinwire")

LARGE = 64 << 20  # bytes of weights and moments above which others do not wait for them
MOMENTS = 3  # a state has so many times the bytes of its weights
FIELDS = 4  # tensors at most that an optimiser keeps per parameter
SLACK = 1 << 20  # bytes
MOST = 10  # times that the state is asked for
AWAY = 20.0  # seconds for which those without the state wait for somebody who has it
POLL = 0.1  # seconds between two looks whether the state has come, or somebody who has it
GRADIENT = "{}.safetensors"  # a step's means


def comes_later(chosen: str, named: Mapping[str, nn.Parameter]) -> bool:
    """Do others train on while a newcomer's state is on its way? chosen: `[run] heal`. named: this rank's parameters;
    all ranks of a member ask, and are told the same."""
    mine = torch.tensor([sum(p.nbytes for p in named.values())])
    of_all = MOMENTS * int(torch.stack(gather(mine, None)).sum())
    return {"wait": False, "later": True, "auto": of_all > LARGE}[chosen]


class Late:
    """Of one rank.

    shared: whose tensors come late. healing: serves them to others. folder: where means wait. optimise: a step of the
    optimiser with .grad, of rate and norm.
    """

    def __init__(
        self, shared: Shared, healing: Healing, folder: Path, optimise: Callable[[float, float], None]
    ) -> None:
        self.shared = shared
        self.healing = healing
        self.folder = folder
        for left in folder.glob(GRADIENT.format("*")):  # of a life that was killed before its state had come
            left.unlink()
        self.optimise = optimise
        self.fetching: Fetching | None = None
        self.orphaned: float | None = None  # the time since which nobody who is there has the state
        self.failures = 0  # to get it, since this member has met the others without it
        self.asked = 0  # members in vain, so that the next one is another
        self.kept: dict[int, tuple[float, float]] = {}  # step → rate, norm
        self.members = [True]  # by place: is it whole, as all know it, so that it has samples?
        self.donors: list[str] = []  # where whole members serve this rank's part of the state

    @property
    def is_whole(self) -> bool:
        """Has this rank the weights and moments of this step?"""
        return self.shared.is_whole

    def begin(self) -> None:
        """They are another step's: they are to come."""
        self.shared.is_whole = False
        self.failures = 0
        self.close()

    def about(self) -> tuple[bool, str]:
        """What members tell each other: is this one whole, and where its state can be had."""
        return self.is_whole, self.healing.metadata()

    def meet(self, present: Sequence[Sequence[Any]], patience: float) -> str:
        """Members have met: why they cannot make a step; "" where they can. Where nobody has the state, those who have
        may come back. present: `about` of everybody. RunFailed where nobody has had it for so many seconds."""
        self.members = [whole for whole, _ in present]
        self.donors = [where for whole, where in present if whole]
        if self.donors:
            self.orphaned = None
            return ""
        self.orphaned = self.orphaned or time.monotonic()
        if any_rank(time.monotonic() > self.orphaned + patience):
            raise RunFailed("all members that had the state are gone: start anew, or from a checkpoint with --resume")
        time.sleep(POLL)
        return "nobody who is there has the others' state"

    def share(self, batches: Batches, place: int, unit: int) -> None:
        """Deal the samples to those who are whole. place: this member's. unit: sequences that stay together."""
        with_samples = [member for member, whole in enumerate(self.members) if whole]
        if place in with_samples:
            batches.share(with_samples.index(place), len(with_samples), unit)
        else:
            batches.take_none()

    def proceed(self, now: int) -> str:
        """At the beginning of a step, where the state is on its way: take it, once all ranks have their part. A line
        about it; "" where there is nothing to say. now: steps that have counted."""
        if self.is_whole:
            return ""
        self._fetch()
        return "" if any_rank(self.fetching is None or not self.fetching.done) else self._catch_up(now)

    def wait_to_the_end(self, now: int, patience: float) -> str:
        """After the last step: as `proceed`, until it is here. RunFailed where it does not come."""
        deadline = time.monotonic() + patience
        said = ""
        while not self.is_whole:
            failed = time.monotonic() > deadline or (self.fetching is not None and bool(self.fetching.failed))
            if any_rank(failed):
                raise RunFailed("the run has ended before the others' state was here")
            said = self.proceed(now)
            time.sleep(POLL)
        return said

    def _fetch(self) -> None:
        """From one of those who are whole, where that is not under way."""
        now = self.fetching
        if now is None or now.failed or (now.metadata not in self.donors and not now.done):
            if now is not None:
                now.close()
                self.asked += 1
                self._say_why(now.failed)
            largest = max(p.nbytes for p in self.shared.named.values())
            donor = self.donors[(int(self.healing.token, 16) + self.asked) % len(self.donors)]
            self.fetching = Fetching(donor, largest + SLACK, (1 + FIELDS) * len(self.shared.named))

    def _say_why(self, failed: str) -> None:
        """The state did not come. failed: the reason; "" where who sent it has left. RunFailed after MOST times."""
        if failed:
            log.warning("thinwire: the others' state did not come, and is asked for again: %s", failed)
        self.failures += bool(failed)
        if self.failures == MOST:
            raise RunFailed(f"the others' state did not come in {MOST} attempts: {failed}")

    def keep(self, step: int, rate: float, norm: float) -> None:
        """The means in .grad, of a step that counted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        means = {name: p.grad.contiguous() for name, p in self.shared.named.items() if p.grad is not None}
        try:
            save_file(means, self.folder / GRADIENT.format(step))
        except (SafetensorError, OSError) as error:  # the disk is full
            raise RunFailed(f"{self.folder}: the means of a step cannot be kept: {error}") from None
        self.kept[step] = rate, norm

    def _catch_up(self, now: int) -> str:
        """Take the state, and repeat the steps since then: a line about it."""
        assert self.fetching is not None
        found, again = self.fetching, range(self.fetching.step, now)
        if not self.kept.keys() >= set(again):
            raise RunFailed(f"the state that came is of step {found.step}, and not all means since then were kept")
        self.shared.load_tensors(found.state, "the other member")
        for step in again:
            means = load_file(self.folder / GRADIENT.format(step))
            for name, p in self.shared.named.items():
                p.grad = means.get(name)
            self.optimise(*self.kept[step])
        self.shared.is_whole = True
        received = found.received
        self.healing.received += received
        self.close()
        return f"took the others' state after step {found.step}, {received} bytes, and repeated {len(again)} steps"

    def offer(self, step: int) -> None:
        """At the beginning of a step: a copy for who has asked."""
        if self.is_whole:
            self.healing.offer(step, self.shared.tensors())

    def close(self) -> None:
        """Fetch no more, and drop what is kept."""
        if self.fetching is not None:
            self.fetching.close()
            self.fetching = None
        for step in self.kept:
            (self.folder / GRADIENT.format(step)).unlink(missing_ok=True)
        self.kept.clear()
        with suppress(OSError):  # there was none
            self.folder.rmdir()
