"""Labelled texts as samples of a run: tokenised once, each with an id that its content gives it.

A text (or a pair) is one sample, cut to seq_len tokens and padded to it. Its *segments* say of each token whether it is
padding (0), of the first text (1), or of the second (2). From them every stage makes its attention mask: all ranks read
the data, so no mask is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.records import Record, read_records
from thinwire.train.data.samples import IGNORED, Ints, distinct, share
from thinwire.train.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Examples:
    """Every labelled sample of a run. `train` and `held_out` are sample numbers; no content is on both sides."""

    stream: NDArray[np.int32]  # tokens of all samples
    parts: NDArray[np.int8]  # of each token: 1 or 2, the first text or the second
    starts: Ints  # [samples]
    ends: Ints  # [samples]
    labels: Ints  # [samples], numbers of `names`
    names: tuple[str, ...]
    ids: Ints  # [samples], 63 bits, all different
    train: Ints
    held_out: Ints
    seq_len: int
    pad: int

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs [rows, seq_len] and labels [rows], int64; a negative number gives a row of padding."""
        wanted = list(numbers)
        inputs = np.full((len(wanted), self.seq_len), self.pad, np.int64)
        for row, number in enumerate(wanted):
            if number >= 0:
                own = self.stream[self.starts[number] : self.ends[number]]
                inputs[row, : len(own)] = own
        labels = [self.labels[number] if number >= 0 else IGNORED for number in wanted]
        return torch.from_numpy(inputs), torch.tensor(labels, dtype=torch.int64)

    def segments(self, numbers: Iterable[int]) -> Tensor:
        """[rows, seq_len]: 0 on padding, 1 on the first text, 2 on the second. A row of padding begins with 1: a row
        whose attention is all masked would have no defined value."""
        wanted = list(numbers)
        out = np.zeros((len(wanted), self.seq_len), np.int64)
        for row, number in enumerate(wanted):
            own = self.parts[self.starts[number] : self.ends[number]] if number >= 0 else np.ones(1, np.int8)
            out[row, : len(own)] = own
        return torch.from_numpy(out)

    def labelled(self, numbers: Iterable[int]) -> int:
        """How many of these samples count in the loss."""
        return sum(number >= 0 for number in numbers)

    @property
    def digest(self) -> str:
        """The same on two machines only if they read the same data with the same settings."""
        parts = (self.ids, self.train, self.held_out, self.labels, np.array([self.seq_len, self.pad]))
        said = "\0".join(self.names).encode()
        return hashlib.blake2b(b"".join([*(part.tobytes() for part in parts), said]), digest_size=8).hexdigest()


def make_examples(
    config: DataConfig, tokenizer: Tokenizer, labels: Sequence[str] | None, known: Sequence[str] = ()
) -> Examples:
    """Read, tokenise and number everything that `[data]` names.

    labels: `[task] labels`. known: the checkpoint's, taken in their order where the data has the same ones.
    """
    records = list(read_records(config))
    if config.samples:
        records = records[: config.samples]
    if not records:
        raise UsageError(f"[data] paths = {list(config.paths)}: nothing to train on: no record in them")
    names = _names(records, labels, known)
    coded = tokenizer.pairs([record.texts for record in records], config.seq_len)
    ends = np.cumsum([len(tokens) for tokens, _ in coded])
    contents = [_content_hash(tokens, parts) for tokens, parts in coded]
    numbers = {name: number for number, name in enumerate(names)}
    given = np.array([numbers[record.label] for record in records], np.int64)
    kept_out = np.array([share(content) < config.held_out for content in contents])
    every = np.arange(len(records))
    return Examples(
        np.concatenate([tokens for tokens, _ in coded]).astype(np.int32),
        np.concatenate([parts for _, parts in coded]).astype(np.int8),
        np.concatenate([[0], ends[:-1]]), ends, given, names,
        distinct([_with_label(content, label) for content, label in zip(contents, given.tolist())]),
        every[~kept_out], every[kept_out], config.seq_len, tokenizer.pad,
    )  # fmt: skip


def _names(records: Sequence[Record], labels: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """The labels in the order of the head's outputs: as given, as the checkpoint has them, or sorted."""
    found = {record.label: record.where for record in reversed(records)}
    if labels is not None:
        for label, where in found.items():
            if label not in labels:
                raise UsageError(f"{where}: the label {label!r} is not among [task] labels = {list(labels)}")
        return tuple(labels)
    if len(found) < 2:
        only = next(iter(found))
        raise UsageError(
            f"[data]: all {len(records)} records have the label {only!r}; give [task] labels, or more data"
        )
    if {*known} == {*found}:
        return tuple(known)
    whole = all(label.removeprefix("-").isdecimal() for label in found)
    return tuple(sorted(found, key=(lambda label: (int(label), label)) if whole else (lambda label: (0, label))))


def _content_hash(tokens: Ints, parts: Ints) -> int:
    hashed = hashlib.blake2b(tokens.astype(np.int32).tobytes(), digest_size=8)
    hashed.update(parts.astype(np.int8).tobytes())
    return int.from_bytes(hashed.digest(), "little")


def _with_label(content: int, label: int) -> int:
    """A text under another label is another sample; both are on one side, though."""
    return int.from_bytes(hashlib.blake2b(f"{content}:{label}".encode(), digest_size=8).digest(), "little")
