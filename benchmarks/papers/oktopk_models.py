"""A small Llama-class decoder: RMSNorm, rotary positions, SwiGLU, tied embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.attend(self.first(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q, turn), rotated(k, turn), v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs of features (i, i + half) turned by an angle that grows with the position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn[0].to(x.dtype), turn[1].to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Llama(nn.Module):
    """vocabulary: tokens. layers, width, heads, hidden: of the decoder."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        half = width // heads // 2
        angle = torch.arange(4096)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        """[rows, length] → [rows, length, vocabulary]."""
        x = self.tokens(rows)
        turn = self.cos[: rows.shape[1]], self.sin[: rows.shape[1]]
        for block in self.blocks:
            x = block(x, turn)
        return F.linear(self.norm(x), self.tokens.weight)
