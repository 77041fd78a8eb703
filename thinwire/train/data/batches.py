"""Which samples a step takes, on which replica: shuffled anew each epoch, pinned to replicas, resumable.

A step's batch has `batch` lanes. Samples are assigned to lanes once, by the hash of their ids; each epoch every lane
is put in a new order, and step t takes the t-th sample of every lane. Replica r of R, over all sites, owns lanes
[r·batch/R, (r+1)·batch/R). So a sample is always on the same replica, lanes differ by one sample at most, and the
batch of a step is the same whatever R is. An epoch has ⌊samples / batch⌋ steps, so no batch is short; a lane with one
sample more leaves one out, a different one in each epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.data.examples import Examples
from thinwire.train.data.samples import Ints, Samples

CHANGED = {  # by setting that a checkpoint records: the error where this run has another value
    "data": "its samples are not these: other text, tokenizer, seq_len or held-out share ([data])",
    "batch": "[optim] batch was {}, now it is {}",
    "shuffle": "[data] seed was {}, now it is {}",
}


class Batch(NamedTuple):
    """One replica's part of a step.

    `labelled` counts the labels of all replicas' parts, in training of this site's: a loss summed and divided by it is
    the mean over the step, however the labels are spread.
    """

    ids: Tensor  # [rows] int64; negative for a row of padding
    inputs: Tensor  # [rows, seq] token ids
    labels: Tensor  # [rows, seq], already shifted, or [rows] of classes; −100 is skipped
    labelled: int
    segments: Tensor | None = None  # [rows, seq], of classification: 0 padding, 1 first text, 2 second

    def split(self, parts: int) -> list[Batch]:
        """Its rows in so many parts; each keeps the step's count of labels."""
        columns = (column.chunk(parts) for column in (self.ids, self.inputs, self.labels))
        inner = [None] * parts if self.segments is None else self.segments.chunk(parts)
        return [Batch(ids, inputs, labels, self.labelled, part) for ids, inputs, labels, part in zip(*columns, inner)]

    def trimmed(self) -> Batch:
        """Texts without what is padding in all of them; a language model's rows are whole."""
        if self.segments is None or not len(self.ids):
            return self
        longest = int((self.segments > 0).any(0).nonzero().max()) + 1
        return self._replace(inputs=self.inputs[:, :longest], segments=self.segments[:, :longest])


class Batches:
    """The training batches of one replica, one after another; the position is (epoch, index of the next step).

    batch: sequences per step over all replicas. seed: of the shuffling. replica, replicas: which one of how many.
    sites: over how many sites the replicas are spread.
    """

    def __init__(
        self, samples: Samples | Examples, batch: int, seed: int, replica: int = 0, replicas: int = 1, sites: int = 1
    ) -> None:
        if batch % replicas:
            raise UsageError(f"[optim] batch = {batch}: must be a multiple of dp = {replicas}")
        if len(samples.train) < batch:
            raise UsageError(
                f"[optim] batch = {batch}: there are only {len(samples.train)} samples of {samples.seq_len} tokens"
            )
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self._mine = slice(replica * batch // replicas, (replica + 1) * batch // replicas)
        site = replica * sites // replicas
        self._site = slice(site * batch // sites, (site + 1) * batch // sites)
        dealt = samples.train[_order(samples.ids[samples.train], seed, "deal")]
        self._lanes = [dealt[lane::batch] for lane in range(batch)]
        self.epoch, self.index = 0, 0
        self._epoch_order: tuple[int, Ints] | None = None  # of the last epoch asked for: [lanes, steps]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.samples.train) // self.batch

    def next(self) -> Batch:
        """The next step's samples; moves the position."""
        numbers = self._step()
        last = self.index + 1 == self.steps_per_epoch
        if last:
            self.epoch += 1
        self.index = 0 if last else self.index + 1
        return _batch(self.samples, numbers, self._mine, self._site)

    def share(self, replica: int, replicas: int, unit: int = 1) -> None:
        """From now on this replica's part, of so many as there are now; parts differ by `unit` sequences at most."""
        units = self.batch // unit
        self._mine = slice(unit * (replica * units // replicas), unit * ((replica + 1) * units // replicas))

    def take_none(self) -> None:
        """From now on this replica has no samples: the others have them all."""
        self._mine = slice(0, 0)

    def go_to(self, step: int) -> None:
        """The position of that step of the run."""
        self.epoch, self.index = divmod(step, self.steps_per_epoch)

    def peek(self) -> Tensor:
        """The ids of the batch that `next` would return; the position stays."""
        return torch.from_numpy(self.samples.ids[self._step()[self._mine]])

    def peek_inputs(self) -> Tensor:
        """[rows, seq]: the token ids of the batch that `next` would return; the position stays."""
        return self.samples.rows(self._step()[self._mine])[0]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index, **self._settings()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a saved position; other data, batch or seed would make it mean something else, and are refused."""
        for name, mine in self._settings().items():
            if state.get(name) != mine:
                what = CHANGED[name].format(state.get(name), mine)
                raise UsageError(f"the checkpoint cannot go on here: {what}; train anew in another [run] out")
        self.epoch, self.index = int(state["epoch"]), int(state["index"])

    def _settings(self) -> dict[str, int]:
        return {"data": int(self.samples.digest, 16) >> 1, "batch": self.batch, "shuffle": self.seed}

    def _step(self) -> Ints:
        """The sample of every lane, of all replicas, at the position."""
        if self._epoch_order is None or self._epoch_order[0] != self.epoch:
            ids, salt = self.samples.ids, f"epoch {self.epoch}"
            shuffled = [lane[_order(ids[lane], self.seed, salt)] for lane in self._lanes]
            self._epoch_order = self.epoch, np.stack([lane[: self.steps_per_epoch] for lane in shuffled])
        return self._epoch_order[1][:, self.index]


def held_out_batches(samples: Samples | Examples, batch: int, replica: int = 0, replicas: int = 1) -> Iterator[Batch]:
    """The held-out samples in a fixed order, `batch` sequences per batch over all replicas; the last batch is filled
    up with rows of padding."""
    mine = slice(replica * batch // replicas, (replica + 1) * batch // replicas)
    count = len(samples.held_out)
    filler = np.arange(-1, -1 - (-count % batch), -1)
    for numbers in np.concatenate([samples.held_out, filler]).reshape(-1, batch):
        yield _batch(samples, numbers, mine, slice(None))


def _batch(samples: Samples | Examples, numbers: Ints, mine: slice, counted: slice) -> Batch:
    """The lanes `mine` of a step; its labels are counted over the lanes `counted`."""
    part = numbers[mine]
    inputs, labels = samples.rows(part)
    ids = np.where(part >= 0, samples.ids[part], part)
    return Batch(torch.from_numpy(ids), inputs, labels, samples.labelled(numbers[counted]), samples.segments(part))


def _order(ids: Ints, seed: int, salt: str) -> Ints:
    """A permutation that depends on ids, seed and salt alone: sorted by a hash, the same on every machine."""
    mixed = ids.astype(np.uint64) ^ np.uint64(_salted(seed, salt))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's finaliser
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def _salted(seed: int, salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{salt}".encode(), digest_size=8).digest(), "little")
