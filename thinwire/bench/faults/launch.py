"""Ranks on a network of the lab with something going wrong, watched from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.bench.faults.injury import DONE, STRUCK, Injury
from thinwire.bench.faults.watched import Ended, watched
from thinwire.lab import Job, LabError, Network

RANKS = 4
PRELOAD = ("torch", "torch.distributed.checkpoint", "transformers", "thinwire.bench.faults.loops")
START_SECONDS = 120.0  # in which a run must have come to its fault, or to its end
EXTRA_SECONDS = 20.0  # beside the time-outs of the program: to find out who is lost, and on a busy machine
WATCH = 0.1
CALM = 60.0  # patience of an undisturbed run: it may have to compile kernels first


@dataclass(frozen=True)
class Launched:
    """ended: by rank. seconds: from the fault (without one, from the start) to the end of the last rank. struck: the
    fault happened."""

    ended: list[Ended]
    seconds: float
    struck: bool


class Launcher:
    """net: four hosts. patience: seconds that a program lets its ranks wait for each other."""

    def __init__(self, net: Network, patience: float) -> None:
        self.net = net
        self.patience = patience

    def limit(self, injury: Injury | None, cable: float) -> float:
        """Seconds after a fault in which every rank must have ended: the program's patience twice, since one rank may
        notice by its own time-out that another has left, and what the fault itself takes."""
        took = (injury.seconds if injury and injury.kind == "freeze" else 0.0) + (cable if cable < float("inf") else 0)
        return 2 * self.patience + EXTRA_SECONDS + took

    def launch(
        self, program: Callable[..., int], injury: Injury | None, folder: Path, *arguments: Any, cable: float = 0.0
    ) -> Launched:
        """Run `program` on every host, with the injury. folder: the cell's own, new. cable: for how many seconds the
        injured rank's is pulled (infinity: for good); 0: it is not."""
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        patience = self.patience if injury else max(self.patience, CALM)
        job = self.net.start(watched, program, injury, str(folder), patience, *arguments, echo=False)
        watch = _Watch(self, injury, folder, cable)
        try:
            while not job.watch(WATCH):
                if watch.late(began):
                    job.stop()
        finally:
            if watch.pulled:
                self.net.link_up(watch.host)
        ended = _ended(job)
        since = began if watch.struck is None else watch.struck
        return Launched(ended, max(one.at for one in ended) - since, watch.struck is not None)


class _Watch:
    """Of one launch: has the fault struck, is the cable to be pulled or put back, is the time over?"""

    def __init__(self, launcher: Launcher, injury: Injury | None, folder: Path, cable: float) -> None:
        self.launcher = launcher
        self.folder = folder
        self.cable = cable
        self.limit = launcher.limit(injury, cable)
        self.host = injury.rank if injury else 0
        self.struck: float | None = None
        self.pulled = False
        self.restore_at = float("inf")

    def late(self, began: float) -> bool:
        """Look once; true where the ranks have had their time."""
        now = time.monotonic()
        if self.struck is None and (self.folder / STRUCK).exists():
            self.struck = float((self.folder / STRUCK).read_text())
            if self.cable:
                self.launcher.net.link_down(self.host)
                self.pulled = True
                self.restore_at = now + self.cable
            (self.folder / DONE).touch()
        if now >= self.restore_at:
            self.restore_at = float("inf")
            self.pulled = False
            self.launcher.net.link_up(self.host)
        return now > (began + START_SECONDS if self.struck is None else self.struck + self.limit)


def _ended(job: Job) -> list[Ended]:
    """How the ranks' programs ended; where a rank itself had to be killed, its program hung."""
    try:
        return list(job.results())
    except LabError:
        now = time.monotonic()
        return [Ended(status or 0, job.output(rank), now, True) for rank, status in enumerate(job.statuses)]
