"""A step's numbers over all ranks: each one's part travels with its vote (vote.py)."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.train.engine import Alone, Piped
from thinwire.train.task.scores import hits, summary
from thinwire.train.update import Update

COUNTS = ("forward_bytes", "backward_bytes", "gradient_bytes", "embedding_bytes", "raw_bytes", "cold", "warm")
BYTES = 5  # of these are bytes; the others are visits of samples
ERRORS = ("forward", "backward", "gradient")
NUMBERS = 1 + len(COUNTS) + 2 * len(ERRORS) + 2  # the last two: right predictions of a classifier, of how many


class Totals:
    """Counters of this rank since the start of the run, the part before a resume included.

    replicas: how many ranks compute the same loss (dp · tp).
    """

    def __init__(self, engine: Alone | Piped, update: Update, replicas: int) -> None:
        self.engine = engine
        self.update = update
        self.replicas = replicas
        self.before = torch.zeros(len(COUNTS), dtype=torch.float64)
        self.last = torch.zeros(len(COUNTS), dtype=torch.float64)  # after the last step
        self.bytes = 0  # of all ranks, after the last step

    def mine(self, losses: Sequence[Tensor | None]) -> Tensor:
        """This rank's part of a step's numbers, NUMBERS of them; `losses`: of its pipeline passes, None where another
        rank has them."""
        errors, now = self._errors(), self._counts()
        scores = self.engine.scores
        seen = (0, 0) if scores is None else hits(scores.take())
        visits = (now - self.last)[BYTES:]
        self.last = now
        loss, right = (torch.tensor(values, dtype=torch.float64) for values in ([_sum(losses)], seen))
        return torch.cat((loss, now[:BYTES], visits, *errors.values(), right))

    def step(self, everyone: Sequence[Tensor]) -> dict[str, Any]:
        """Of all ranks together: the step's loss, bytes since the start, and the step's samples that were sent whole
        (`cold`) or as a change (`warm`), with their share (`hit_rate`); relative errors; a classifier's accuracy.
        Where there are several ranks: what each one sent, and its errors (`ranks`).
        everyone: each one's `mine`.
        """
        loss, *rest, right, predicted = torch.stack(list(everyone)).sum(0).tolist()
        counts = dict(zip(COUNTS, map(int, rest)))
        cold, warm = counts["cold"], counts["warm"]
        self.bytes = sum(counts[name] for name in COUNTS[:4])
        pairs = zip(ERRORS, rest[len(COUNTS) :: 2], rest[len(COUNTS) + 1 :: 2])
        return {
            "loss": loss / self.replicas, **counts, "hit_rate": warm / (cold + warm) if cold + warm else None,
            "errors": {name: total / count for name, total, count in pairs if count},
            **({"accuracy": right / predicted} if predicted else {}),
            **({"ranks": by_rank(everyone)} if len(everyone) > 1 else {}),
        }  # fmt: skip

    def mean_loss(self, losses: Sequence[tuple[Sequence[Tensor | None], int]]) -> float:
        """Over the labels of all batches and replicas; NaN where there were none."""
        labels = sum(labelled for _, labelled in losses)
        total = torch.tensor([sum(_sum(parts) * labelled for parts, labelled in losses)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / (self.replicas * labels) if labels else math.nan

    def scores(self) -> dict[str, float]:
        """Of a classifier, over what all ranks have predicted since the last step: accuracy, Matthews' correlation."""
        scores = self.engine.scores
        return {} if scores is None else summary(scores.take_all())

    def state(self) -> Tensor:
        return self._counts()

    def load(self, counts: Tensor) -> None:
        """Go on counting from there."""
        self.before += counts - self._counts()
        self.last = counts

    leave_out = load  # what was sent since that state was taken does not belong to training

    def _counts(self) -> Tensor:
        stats = self.engine.pipeline.stats if isinstance(self.engine, Piped) else None
        pipe = [stats.forward_bytes, stats.backward_bytes] if stats else [0, 0]
        raw = (stats.raw_bytes if stats else 0) + self.update.raw_sent
        visits = [stats.cold, stats.warm] if stats else [0, 0]
        now = [*pipe, self.update.gradient_sent + self.engine.boundary_sent, self.update.embedding_sent, raw, *visits]
        return self.before + torch.tensor(now, dtype=torch.float64)

    def _errors(self) -> dict[str, Tensor]:
        """Per kind of traffic (sum of relative errors, how many were measured) on this rank."""
        found = {name: torch.zeros(2, dtype=torch.float64) for name in ERRORS}
        lanes = self.engine.pipeline.lanes() if isinstance(self.engine, Piped) else []
        for lane in lanes:
            for _, channel in lane.channels():
                if lane.end == "send" and channel.stats.measured:
                    kind = "forward" if lane.name.startswith("forward") else "backward"
                    found[kind] += torch.tensor([channel.stats.error_sum, channel.stats.measured], dtype=torch.float64)
        error = self.update.gradient_error
        if error is not None:
            found["gradient"] += torch.tensor([error, 1.0], dtype=torch.float64)
        return found


def by_rank(everyone: Sequence[Tensor]) -> dict[str, Any]:
    """What each rank has sent since the start, in bytes, and its relative errors; None where it measured none.

    everyone: each one's `Totals.mine`."""
    rows = [numbers.tolist() for numbers in everyone]
    first = 1 + len(COUNTS)  # where the errors begin
    errors = {
        name: [_ratio(*row[first + 2 * at : first + 2 * at + 2]) for row in rows] for at, name in enumerate(ERRORS)
    }
    measured = {name: values for name, values in errors.items() if any(value is not None for value in values)}
    return {"sent": [int(sum(row[1:BYTES])) for row in rows], "errors": measured}


def peak_memory(device: str) -> list[int]:
    """The most bytes that each rank has taken so far: of its card where device is "cuda", else of the host's memory.

    Called by all ranks together.
    """
    own = torch.cuda.max_memory_allocated() if device == "cuda" else _host_peak()
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([own]))
    return [int(one) for one in found]


def _host_peak() -> int:
    """Of this process, in bytes. Linux says it exactly; elsewhere a forked process may have its parent's."""
    with suppress(FileNotFoundError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _ratio(total: float, count: float) -> float | None:
    return float(f"{total / count:.4g}") if count else None


def _sum(losses: Sequence[Tensor | None]) -> float:
    return sum(float(loss) for loss in losses if loss is not None)
