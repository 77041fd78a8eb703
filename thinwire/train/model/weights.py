"""A stage's weights: read from safetensors (this stage's only), or random, seeded by the parameter's name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.config.families import HEAD, Family
from thinwire.train.foreign_code import pickled_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """A directory with model.safetensors, or shards and their index; tensors are read one by one."""

    def __init__(self, folder: str | Path, family: Family) -> None:
        self.folder, self.family = Path(folder), family
        self._files = self._map()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor. A tied head is the embedding; older files leave the root's name out."""
        from safetensors import SafetensorError, safe_open

        handles: dict[str, Any] = {}
        with ExitStack() as stack:
            for name in names:
                stored = self._stored(name)
                file = self._files[stored]
                try:
                    if file not in handles:
                        handles[file] = stack.enter_context(safe_open(self.folder / file, framework="pt"))
                    yield name, handles[file].get_tensor(stored)
                except (SafetensorError, OSError) as error:
                    raise UsageError(f"{self.folder / file}: cannot be read: {error}") from None

    def _stored(self, name: str) -> str:
        tried = [name, self.family.embedding] if name == HEAD else [name]
        for candidate in tried:
            for stored in (candidate, candidate.removeprefix(f"{self.family.root}.")):
                for spelt in (stored, _old_spelling(stored)):
                    if spelt in self._files:
                        return spelt
        raise UsageError(f"{self.folder}: the checkpoint has no tensor {name}")

    def may_lack(self, name: str) -> bool:
        """Is it a weight of a classifier's head that is not in the file? A pre-trained encoder has none."""
        inside = any(name.startswith(f"{module}.") for module in self.family.fresh)
        return inside and name not in self._files and name.removeprefix(f"{self.family.root}.") not in self._files

    def _map(self) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        try:
            if (self.folder / INDEX).exists():
                return _checked_map(json.loads((self.folder / INDEX).read_text())["weight_map"], self.folder / INDEX)
            if not (self.folder / SINGLE).exists():
                pickled = pickled_weights(self.folder)
                why = f", and {pickled} is a pickle, which may run code and is not read" if pickled else ""
                raise UsageError(
                    f"{self.folder}: neither {SINGLE} nor {INDEX}{why}; convert with transformers' save_pretrained"
                )
            with safe_open(self.folder / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        except (SafetensorError, OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise UsageError(f"{self.folder}: the checkpoint cannot be read: {error!r}") from None


def _old_spelling(name: str) -> str:
    """The first BERT checkpoints were converted from another framework, with its names in their norms."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _checked_map(listed: dict[str, str], index: Path) -> dict[str, str]:
    """Tensor → file, all of them safetensors in the index's own folder."""
    for file in listed.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UsageError(f"{index}: names {file!r:.60}, which is no safetensors file of this folder")
    return dict(listed)


def random_weight(name: str, shape: torch.Size, config: Any, family: Family, seed: int) -> Tensor:
    """A random weight, float32 on the CPU, distributed as in transformers, from a generator seeded by (seed, name).

    So every way to split the model starts from the same weights, and torch's own generator is not used. A tied head is
    the embedding: it is made under that name. `config`: transformers' configuration.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = config.initializer_range
    if family.residual and name.endswith(family.residual):
        std /= math.sqrt(2 * config.num_hidden_layers)
    weight = torch.empty(shape).normal_(0.0, std, generator=generator(seed, name))
    pad = config.pad_token_id if name == family.embedding else None
    if pad is not None:
        weight[pad] = 0.0
    return weight


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one named tensor of a run."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
