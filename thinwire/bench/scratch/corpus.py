"""What `thinwire bench scratch` trains on: Python's library, or the files of folders, as bytes or as learned tokens.

Every tenth file is held out as a whole, and a file that was met before is left out. With a vocabulary of more than 256
tokens a byte-level BPE tokenizer is trained on some of the other files first (the library tokenizers, which comes with
transformers).
"""

from __future__ import annotations

import hashlib
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
SUFFIXES = (".py", ".txt", ".pyi", ".h", ".hpp", ".cuh", ".rst")  # of the files that are read in a folder
LEARNT_FROM = 16_000_000  # characters of text that the tokenizer is trained on
AT_ONCE = 2000  # documents that are made tokens of together


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
    if not all(parts):
        raise UsageError(f"{setup.text or 'the library'}: no text there, or too few files to hold some out")
    trained, held_out = _coded(parts, setup.vocabulary)
    if setup.cache:
        partial = Path(f"{setup.cache}.partial.npz")
        numpy.savez(partial, of=of, trained=trained, held_out=held_out)
        partial.replace(setup.cache)
    return trained, held_out


def _files(folders: str) -> Iterator[str]:
    """Texts in the order of their folders and names, each once."""
    if not folders:
        yield from (document.text or "" for document in read_documents(DataConfig(corpus_bytes=2**40)))
        return
    met = set()
    for folder in folders.split(","):
        for file in sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            raw = file.read_bytes()
            digest = hashlib.sha256(raw).digest()
            if digest not in met:
                yield raw.decode(errors="replace")
            met.add(digest)


def _coded(parts: tuple[list[str], list[str]], vocabulary: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    if vocabulary == BYTES:
        trained, held_out = (numpy.frombuffer("".join(part).encode(), dtype=numpy.uint8) for part in parts)
        return trained, held_out
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    some = "\n".join(parts[0])[:LEARNT_FROM]
    tokenizer.train_from_iterator(some.split("\n\n"), vocab_size=vocabulary, show_progress=False)
    coded: list[list[numpy.ndarray]] = [[], []]
    for part, out in zip(parts, coded):
        for at in range(0, len(part), AT_ONCE):
            out += [numpy.array(one.ids, numpy.uint16) for one in tokenizer.encode_batch(part[at : at + AT_ONCE])]
    return numpy.concatenate(coded[0]), numpy.concatenate(coded[1])
