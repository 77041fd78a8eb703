"""What `thinwire bench scratch` trains on: Python's library, or the files of a folder, as bytes or as learned tokens.

Every tenth file is held out as a whole. With a vocabulary of more than 256 tokens a byte-level BPE tokenizer is trained
on some of the other files first (the library tokenizers, which comes with transformers).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor

from thinwire.bench.pipeline_options import VOCABULARY as BYTES
from thinwire.bench.scratch.options import Scratch
from thinwire.errors import UsageError
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.documents import read_documents

TENTH = 10  # of the files, one is held out
SUFFIXES = (".py", ".txt")  # of the files that are read in a folder
LEARNT_FROM = 16_000_000  # bytes of text that the tokenizer is trained on


def text(setup: Scratch, seed: int) -> tuple[Tensor, Tensor]:
    """Samples to train on, each once, in the order of the seed, and held-out ones: int32[samples, length + 1]."""
    need = (int(setup.steps * setup.most) + setup.opened) * setup.rows
    trained, held_out = (_cut(part, setup.length + 1) for part in _tokens(setup))
    if len(trained) < need or len(held_out) < setup.held_out:
        where = setup.text or "Python's library"
        raise UsageError(f"{need} samples of {setup.length + 1} tokens are needed, but {where} has {len(trained)}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(trained), generator=generator)[:need]
    fixed = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[: setup.held_out]
    return trained[order], held_out[fixed]


def _cut(tokens: numpy.ndarray, length: int) -> Tensor:
    whole = len(tokens) // length * length
    return torch.from_numpy(tokens[:whole].astype(numpy.int32)).view(-1, length)


def _tokens(setup: Scratch) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Of the files to train on, and of those held out; kept in the file that `cache` names."""
    of = f"{setup.text or 'the library'}, {setup.vocabulary} tokens"
    if setup.cache and Path(setup.cache).is_file():
        with numpy.load(setup.cache) as kept:  # refuses pickles
            if str(kept["of"]) != of:
                raise UsageError(f"--cache {setup.cache}: has tokens of {kept['of']}, not of {of}: name another file")
            return kept["trained"], kept["held_out"]
    parts: tuple[list[str], list[str]] = [], []
    for number, document in enumerate(_files(setup.text)):
        parts[number % TENTH == 0].append(document)
    trained, held_out = _coded(parts, setup.vocabulary)
    if setup.cache:
        partial = Path(f"{setup.cache}.partial.npz")
        numpy.savez(partial, of=of, trained=trained, held_out=held_out)
        partial.replace(setup.cache)
    return trained, held_out


def _files(folder: str) -> Iterator[str]:
    """Texts in the order of their names."""
    if not folder:
        yield from (document.text or "" for document in read_documents(DataConfig(corpus_bytes=2**40)))
        return
    for file in sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        yield file.read_bytes().decode(errors="replace")


def _coded(parts: tuple[list[str], list[str]], vocabulary: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    if vocabulary == BYTES:
        trained, held_out = (numpy.frombuffer("".join(part).encode(), dtype=numpy.uint8) for part in parts)
        return trained, held_out
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    some = "\n".join(parts[0])[:LEARNT_FROM]
    tokenizer.train_from_iterator(some.split("\n\n"), vocab_size=vocabulary, show_progress=False)
    coded = [[one.ids for one in tokenizer.encode_batch(part)] for part in parts]
    first, second = (numpy.fromiter((i for ids in part for i in ids), dtype=numpy.uint16) for part in coded)
    return first, second
