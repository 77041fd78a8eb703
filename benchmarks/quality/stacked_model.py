"""A decoder on bytes of which several copies train side by side: every weight has the copies as its first dimension.

No parameter has one dimension (norms have no weights), so that what is exchanged is matrices only, and one batched
product per layer trains all copies.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Size:
    """width: of the model; a head has 64 of it, or all. layers: how many. length: bytes per sequence."""

    width: int = 512
    layers: int = 8
    length: int = 256

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Every parameter's, by name."""
        d = self.width
        out = {"embed": (VOCABULARY, d), "place": (self.length, d)}
        for i in range(self.layers):
            out |= {f"layers.{i}.qkv": (d, 3 * d), f"layers.{i}.out": (d, d)}
            out |= {f"layers.{i}.up": (d, 4 * d), f"layers.{i}.down": (4 * d, d)}
        return out | {"head": (d, VOCABULARY)}

    def parameters(self) -> int:
        """How many values all of them have."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, seed: int) -> Tensor:
        """float32[parameters]: Gaussian, 0.02; what adds to the residual stream smaller by √(2·layers)."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for name, shape in self.shapes().items():
            small = name.endswith((".out", ".down"))
            scale = 0.02 / math.sqrt(2 * self.layers) if small else 0.02
            parts.append(scale * torch.randn(math.prod(shape), generator=generator))
        return torch.cat(parts)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Weights by name of flat[copies, parameters]; they share its memory."""
        out, start = {}, 0
        for name, shape in self.shapes().items():
            end = start + math.prod(shape)
            out[name] = flat[:, start:end].unflatten(1, shape)
            start = end
        return out

    pretrained = False
    at_once = 64  # sequences that are evaluated together
    looks = 20  # evaluations on the way

    def losses(self, weights: Weights, rows: Tensor) -> Tensor:
        """float32[copies], of `views` and int64[copies, sequences, length + 1]."""
        return losses(weights, rows, self)

    def read(self, path: Path) -> tuple[Tensor, Tensor]:
        """(text, held-out text)."""
        return read_corpus(path)

    def starts(self, text: Tensor, seed: int, steps: int, sites: int, per_site: int, apart: bool) -> Tensor:
        """int64[steps, sites, per site]: where sequences begin."""
        return starts(text, seed, steps, sites, per_site, apart)


def losses(weights: Weights, rows: Tensor, size: Size) -> Tensor:
    """float32[copies]: every copy's mean loss on its own rows, int64[copies, sequences, length + 1]."""
    x, target = rows[:, :, :-1], rows[:, :, 1:]
    copies, count, length = x.shape
    dtype, d = weights["embed"].dtype, size.width
    heads = max(1, d // 64)
    one_hot = (x.reshape(copies, -1, 1) == torch.arange(VOCABULARY, device=x.device)).to(dtype)
    h = one_hot @ weights["embed"] + weights["place"][:, :length].repeat(1, count, 1)
    for i in range(size.layers):
        qkv = F.layer_norm(h, (d,)) @ weights[f"layers.{i}.qkv"]
        split = qkv.view(copies * count, length, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        h = h + mixed.transpose(1, 2).reshape(copies, -1, d) @ weights[f"layers.{i}.out"]
        inside = F.gelu(F.layer_norm(h, (d,)) @ weights[f"layers.{i}.up"], approximate="tanh")
        h = h + inside @ weights[f"layers.{i}.down"]
    logits = (F.layer_norm(h, (d,)) @ weights["head"]).float()
    every = F.cross_entropy(logits.view(-1, VOCABULARY), target.reshape(-1), reduction="none")
    return every.view(copies, -1).mean(1)


class Decoder(nn.Module):
    """One copy, as a module: rows int64[sequences, length + 1] → their mean loss. seed: of the first weights."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        self.size = size
        first = size.views(size.initial(seed)[None])
        self.names = {name.replace(".", "_"): name for name in first}  # a module's own have no dots
        self.weights = nn.ParameterDict({given: nn.Parameter(first[n][0].clone()) for given, n in self.names.items()})

    def forward(self, rows: Tensor) -> Tensor:
        stacked = {name: self.weights[given][None] for given, name in self.names.items()}
        return losses(stacked, rows[None], self.size)[0]


# --- text


def read_corpus(path: Path) -> tuple[Tensor, Tensor]:
    """(bytes to train on, held-out bytes) of a file that `pack` wrote."""
    raw = lzma.decompress(path.read_bytes())
    held = int.from_bytes(raw[:8], "little")
    text = torch.frombuffer(bytearray(raw[8:]), dtype=torch.uint8)
    return text[held:], text[:held]


def pack(folders: list[Path], path: Path, limit: int) -> tuple[int, int]:
    """Write Python files of folders, sorted, to one file; every fiftieth is held out. Returns the bytes of both.

    limit: of bytes to train on; where there are more, files are left out evenly.
    """
    files = [f for folder in folders for f in sorted(folder.rglob("*.py")) if 2000 < f.stat().st_size < 200_000]
    text = [data for f in files if (data := f.read_bytes()).isascii()]
    held = b"".join(text[::50])
    train = [data for i, data in enumerate(text) if i % 50]
    share = min(1.0, limit / sum(map(len, train)))
    kept = [data for i, data in enumerate(train) if int((i + 1) * share) > int(i * share)]
    body = b"".join(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(len(held).to_bytes(8, "little") + held + body, preset=0))
    return len(body), len(held)


def starts(text: Tensor, seed: int, steps: int, sites: int, per_site: int, apart: bool) -> Tensor:
    """int64[steps, sites, per site]: where sequences begin. The same for any number of sites, unless they are `apart`:
    then each draws from a part of the text of its own, which are other packages."""
    draw = torch.rand(steps, sites * per_site, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    draw = draw.view(steps, sites, per_site)
    room = text.numel() - 1024
    if not apart:
        return (draw * room).long()
    first = torch.arange(sites)[None, :, None] * (room // sites)
    return (draw * (room // sites)).long() + first


def sequences(text: Tensor, begin: Tensor, length: int) -> Tensor:
    """int64[…, length + 1] of the text's bytes, on its device."""
    place = begin.to(text.device)[..., None] + torch.arange(length + 1, device=text.device)
    return text[place].long()
