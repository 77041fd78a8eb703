"""The models of `thinwire bench scratch`, cut into stages.

gpt         the small GPT of `thinwire bench pipeline`, for AdamW
yardstick   of the yardstick's kind, for Muon (optimisers.py): RMS norms, queries and keys normalised and rotated by
            their places, squared ReLU, logits that cannot pass 15, and blocks that begin as nothing, so that at first
            a hidden state is its token's embedding
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.bench import pipeline_ranks
from thinwire.bench.pipeline_options import Setup
from thinwire.bench.scratch.options import YARDSTICK, Scratch
from thinwire.kernels.random import derive

HEAD = 64  # values of a head, at most
MOST = 15.0  # of a logit
TURNS = 1024.0  # the slowest rotation of a place is so many times slower than the fastest
SHARP = 0.12  # of scores, whose queries and keys are normalised


class Attention(nn.Module):
    """Causal, float[rows, length, width] → the same; nothing at first."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.size = min(HEAD, width // 4)
        self.query, self.key, self.value = (nn.Parameter(drawn(width, width)) for _ in range(3))
        self.merge = nn.Parameter(torch.zeros(width, width))
        # the first half of a head's pairs turn, the others stay
        speed = TURNS ** -torch.linspace(0, 1, self.size // 4)
        angles = torch.arange(length)[:, None] * torch.cat((speed, torch.zeros(self.size // 2 - len(speed))))
        self.register_buffer("cosine", angles.cos()[:, None], persistent=False)
        self.register_buffer("sine", angles.sin()[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """What heads find for `x`, float[rows, length, width]."""
        q, k, v = (self._heads(x, weight) for weight in (self.query, self.key, self.value))
        q, k = self._turned(q), self._turned(k)
        found = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=SHARP
        )
        return functional.linear(found.transpose(1, 2).flatten(2), self.merge.to(x.dtype))

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight.to(x.dtype)).unflatten(-1, (-1, self.size))

    def _turned(self, x: Tensor) -> Tensor:
        """Normalised, and rotated by place: float[rows, length, heads, size]."""
        a, b = functional.rms_norm(x, x.shape[-1:]).float().chunk(2, -1)
        cosine, sine = self.cosine[: x.shape[1]], self.sine[: x.shape[1]]
        return torch.cat((a * cosine + b * sine, b * cosine - a * sine), -1).to(x.dtype)


class Block(nn.Module):
    """Attention and feed-forward, float[rows, length, width] → the same."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, length)
        self.wide, self.narrow = nn.Parameter(drawn(4 * width, width)), nn.Parameter(torch.zeros(width, 4 * width))
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """What the block makes of `x`."""
        x = x + self.attention(self.first(x).to(x.dtype))
        inner = functional.linear(self.second(x).to(x.dtype), self.wide.to(x.dtype)).relu().square()
        return x + functional.linear(inner, self.narrow.to(x.dtype))


class Embed(nn.Module):
    """int64[rows, length] → float[rows, length, width], normalised. dtype: of what comes out."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Parameter(torch.randn(vocabulary, width)), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The vectors of `x`; under autocast in its dtype, as all that follows."""
        out = self.norm(functional.embedding(x, self.tokens))
        return out.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else out


class Head(nn.Module):
    """float[rows, length, width] → logits, float32[rows, length, vocabulary]; all equal at first."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.weight = nn.RMSNorm(width), nn.Parameter(torch.zeros(vocabulary, width))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of `x`."""
        logits = functional.linear(self.norm(x).to(x.dtype), self.weight.to(x.dtype)).float()
        return MOST * logits * (logits.square() + MOST**2).rsqrt()


def drawn(out: int, width: int) -> Tensor:
    """A matrix as torch would draw a layer's, float32[out, width]."""
    return torch.randn(out, width) * (3 * width) ** -0.5


def stages_of(setup: Scratch, seed: int) -> list[nn.Module]:
    """The model of `setup`, cut into stages of one layer; its weights follow from the seed."""
    if setup.model != YARDSTICK:
        size = Setup(setup.stages, width=setup.width, length=setup.length, seed=seed, vocabulary=setup.vocabulary)
        return pipeline_ranks.stages_of(size)
    with torch.random.fork_rng():
        torch.manual_seed(derive("bench scratch", seed) % 2**32)
        out: list[nn.Module] = []
        for index in range(setup.stages):
            parts: list[nn.Module] = [Embed(setup.width, setup.vocabulary)] if index == 0 else []
            parts.append(Block(setup.width, setup.length))
            if index == setup.stages - 1:
                parts.append(Head(setup.width, setup.vocabulary))
            out.append(nn.Sequential(*parts))
    return out


@torch.no_grad()
def first_hidden(stages: list[nn.Module]) -> Tensor:
    """What a hidden state of the yardstick's model is at first of each token, float[vocabulary, width]."""
    embed = stages[0][0]  # type: ignore[index]
    return embed.norm(embed.tokens)
