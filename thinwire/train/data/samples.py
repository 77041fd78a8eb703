"""Documents cut into samples of seq_len tokens, once, each with an id that its content gives it.

Sample i covers tokens [start, start + seq_len] of the stream: seq_len inputs, and the label of each is the token
after it (so neighbours share one token). Labels are −100 where no loss is taken: on the user's turns, on padding.
Packed, the stream is all documents one after another, each with its end token; attention is not stopped at a
document's end. Not packed, a document begins a sample of its own. What is short is padded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.documents import Document, read_documents
from thinwire.train.data.tokenizer import Tokenizer

IGNORED = -100
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Every sample of a run. `train` and `held_out` are sample numbers; no content is on both sides."""

    stream: NDArray[np.int32]  # tokens of all documents
    scored: NDArray[np.bool_]  # whether a token's prediction counts
    starts: Ints  # [samples]
    ends: Ints  # [samples], one after the last label
    ids: Ints  # [samples], 63 bits, all different
    train: Ints
    held_out: Ints
    seq_len: int
    pad: int

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and labels [rows, seq_len], int64; a negative number gives a row of padding."""
        wanted = list(numbers)
        inputs = np.full((len(wanted), self.seq_len), self.pad, np.int64)
        labels = np.full((len(wanted), self.seq_len), IGNORED, np.int64)
        for row, number in enumerate(wanted):
            if number >= 0:
                start, end = self.starts[number], self.ends[number]
                size = end - start - 1
                inputs[row, :size] = self.stream[start : end - 1]
                labels[row, :size] = np.where(self.scored[start + 1 : end], self.stream[start + 1 : end], IGNORED)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def labelled(self, numbers: Iterable[int]) -> int:
        """How many labels of these samples count in the loss."""
        return sum(int(self.scored[self.starts[n] + 1 : self.ends[n]].sum()) for n in numbers if n >= 0)

    def segments(self, numbers: Iterable[int]) -> None:
        """None: a language model sees all that comes before a token."""

    @property
    def digest(self) -> str:
        """The same on two machines only if they read the same data with the same settings."""
        parts = (self.ids, self.train, self.held_out, np.array([self.seq_len, self.pad]))
        return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8).hexdigest()


def make_samples(config: DataConfig, tokenizer: Tokenizer) -> Samples:
    """Read, tokenise, cut and number everything that `[data]` names."""
    stream, scored, bounds = _streams(read_documents(config), config, tokenizer)
    windows = [w for bound in bounds for w in _windows(*bound, config.seq_len) if scored[w[0] + 1 : w[1]].any()]
    if config.samples:
        windows = windows[: config.samples]
    if not windows:
        raise UsageError("[data]: nothing to train on: no document has two tokens with a label")
    starts, ends = (np.array(column, np.int64) for column in zip(*windows))
    contents = [_content_hash(stream, scored, start, end) for start, end in windows]
    kept_out = np.array([share(content) < config.held_out for content in contents])
    numbers = np.arange(len(windows))
    return Samples(
        stream, scored, starts, ends, distinct(contents),
        numbers[~kept_out], numbers[kept_out], config.seq_len, tokenizer.pad,
    )  # fmt: skip


def _streams(
    documents: Iterable[Document], config: DataConfig, tokenizer: Tokenizer
) -> tuple[NDArray[np.int32], NDArray[np.bool_], list[tuple[int, int]]]:
    """All tokens, whether each is scored, and the stretches that samples may not cross."""
    tokens = []
    masks = []
    bounds = []
    at = 0
    for document in documents:
        coded, mask = document.coded(tokenizer)
        tokens.append(coded.astype(np.int32))
        masks.append(mask)
        bounds.append((at, at + len(coded)))
        at += len(coded)
    if not tokens:
        raise UsageError(f"[data] paths = {list(config.paths)}: nothing to train on: no document in them")
    return np.concatenate(tokens), np.concatenate(masks), [(0, at)] if config.packing else bounds


def _windows(start: int, end: int, seq_len: int) -> Iterator[tuple[int, int]]:
    """[start, end) of each sample: seq_len inputs and one label more, neighbours sharing a token; the last is short."""
    for at in range(start, end - 1, seq_len):
        yield at, min(at + seq_len + 1, end)


def _content_hash(stream: NDArray[np.int32], scored: NDArray[np.bool_], start: int, end: int) -> int:
    hashed = hashlib.blake2b(stream[start:end].tobytes(), digest_size=8)
    hashed.update(scored[start + 1 : end].tobytes())
    return int.from_bytes(hashed.digest(), "little")


def share(content: int) -> float:
    """A number in [0, 1) that says on which side a content falls, whatever the seed."""
    digest = hashlib.blake2b(b"held out" + content.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def distinct(contents: list[int]) -> Ints:
    """A 63-bit id for each content; copies of one content get ids of their own, in order."""
    seen: Counter[int] = Counter()
    ids, taken = np.empty(len(contents), np.int64), set()
    for i, content in enumerate(contents):
        while True:
            digest = hashlib.blake2b(f"{content}:{seen[content]}".encode(), digest_size=8).digest()
            seen[content] += 1
            number = int.from_bytes(digest, "little") >> 1
            if number not in taken:
                break
        taken.add(number)
        ids[i] = number
    return ids
