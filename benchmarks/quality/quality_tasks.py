"""The tasks of quality.py: a small Llama-class decoder and an LSTM on bytes of source text, and a CNN on digits.

Data comes from what is installed: the standard library's source, cut by file into training and held-out text, and
scikit-learn's digits. It is written to one file, so that a machine without scikit-learn, or with another Python,
can train on the same.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 128  # other characters become 127
CONTEXT = 64
TEXT = 4_000_000  # bytes of training text
HELD_WINDOWS = 512
TRAIN_IMAGES = 1_200
RANKS = 4

Data = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def load(path: Path) -> Data:
    """The data of all tasks, made and written on first use."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**_text(), **_digits()}, path)
    data: Data = torch.load(path, weights_only=True)
    return data


def digest(data: Data) -> str:
    """What runs on the same data have in common."""
    whole = hashlib.sha256()
    for name in sorted(data):
        whole.update(data[name].numpy().tobytes())
    return whole.hexdigest()[:12]


def _text() -> Data:
    """Every tenth module of the standard library is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: dict[str, list[bytes]] = {"train": [], "held": []}
    for i, file in enumerate(files):
        parts["held" if i % 10 == 5 else "train"].append(file.read_bytes())
    whole = {name: torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for name, part in parts.items()}
    return {name: text[:TEXT].clamp(max=BYTES - 1) for name, text in whole.items()}


def _digits() -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)[order]
    return {"images": images, "labels": torch.from_numpy(digits.target).long()[order]}


# --- models


class Llama(nn.Module):
    """Llama's decoder, small: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, width: int = 112, layers: int = 2, inner: int = 304) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if parameter is self.embed.weight else parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:  # long[batch, context] → float[batch, context, BYTES]
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (
            nn.Linear(width, n * self.size, bias=False) for n in (heads, groups, groups)
        )  # fmt: skip
        self.merge = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        angle = torch.arange(CONTEXT)[:, None] * 10_000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("turn", torch.stack((angle.cos(), angle.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k = self._turned(self._split(self.query(h))), self._turned(self._split(self.key(h)))
        mixed = F.scaled_dot_product_attention(q, k, self._split(self.value(h)), is_causal=True, enable_gqa=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        cos, sin = self.turn[:, : x.shape[2]]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Lstm(nn.Module):
    def __init__(self, width: int = 64, inner: int = 192) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(BYTES, width), nn.LSTM(width, inner, batch_first=True)
        self.out = nn.Linear(inner, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0])


def Cnn() -> nn.Module:
    def conv(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()]  # no statistics that ranks would share

    return nn.Sequential(
        *conv(1, 16), *conv(16, 32), nn.MaxPool2d(2), *conv(32, 64), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


# --- tasks


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    build: Callable[[], nn.Module]
    optimiser: str
    rates: tuple[float, ...]
    steps: int
    batch: int  # a rank's
    text: bool = True

    def batch_of(self, data: Data, generator: torch.Generator) -> Batch:
        """A rank's next batch."""
        if self.text:
            start = torch.randint(len(data["train"]) - CONTEXT - 1, (self.batch, 1), generator=generator)
            return _windows(data["train"], start)
        picked = torch.randint(TRAIN_IMAGES, (self.batch,), generator=generator)
        return data["images"][picked], data["labels"][picked]

    def held_out(self, data: Data, rank: int) -> Batch:
        """A rank's share of what is held out; shares are of one size, but for the last of the digits."""
        if self.text:
            start = torch.linspace(0, len(data["held"]) - CONTEXT - 1, HELD_WINDOWS).long()[rank::RANKS, None]
            return _windows(data["held"], start)
        return data["images"][TRAIN_IMAGES + rank :: RANKS], data["labels"][TRAIN_IMAGES + rank :: RANKS]

    def optimiser_of(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        if self.optimiser == "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[1].flatten(), reduction=reduction)


def _windows(text: Tensor, start: Tensor) -> Batch:
    window = text[start + torch.arange(CONTEXT + 1)].long()
    return window[:, :-1], window[:, 1:]


TASKS = {
    task.name: task
    for task in (
        Task("llama", "Llama-class, bytes of Python source, AdamW", Llama, "AdamW", (2e-3, 4e-3, 8e-3), 300, 2),
        Task("lstm", "LSTM, bytes of Python source, AdamW", Lstm, "AdamW", (4e-3, 8e-3, 1.6e-2), 300, 2),
        Task("cnn", "CNN, digits, SGD with momentum", Cnn, "SGD", (0.02, 0.05, 0.1), 150, 16, text=False),
    )
}
