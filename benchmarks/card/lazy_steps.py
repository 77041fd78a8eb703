"""Steps of lazy_long.py: many runs at once, a stack of weights each, and a whole step as one CUDA graph.

Runs share the shapes of everything, so a kernel does the work of all of them: on a card a run alone is a thousand small
kernels per step. `Boundary` is what the library's lanes do with `LowRank` and `ErrorFeedback`, one residual and one
warm start per run and boundary, in operations that a graph can hold (tests/test_benchmarks_quality.py compares both).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from gpu_quality import STAGES, Model, Size
from torch import Tensor, nn

from thinwire.codecs.lowrank import gaussian, starting_factor

Weights = dict[str, Tensor]  # by name of Model's parameters, each [runs, ...]


@dataclass(frozen=True)
class Coding:
    """Gradients of activations of one run. rank: 0: exact. lazy: is what a message left out added to the next?
    epilogue: only the last micro-batches, as many as there are stages after the boundary."""

    rank: int = 0
    lazy: bool = False
    epilogue: bool = False


class Group:
    """Neighbours in a stack that are coded alike: the right factors of their last messages, and what those left out.

    runs: which of the stack. coding: of all of them. seed: of the first factor.
    """

    def __init__(self, runs: slice, coding: Coding, seed: int) -> None:
        self.runs, self.coding, self.seed = runs, coding, seed
        self.q: Tensor | None = None  # [runs, width, rank]
        self.e: Tensor | None = None  # [runs, tokens, width]

    def send(self, matrix: Tensor) -> Tensor:
        """What arrives. matrix: float32[runs, tokens, width]."""
        if self.q is None:
            rank = min(self.coding.rank, matrix.shape[2])
            first = gaussian(matrix.shape[2] * rank, self.seed, matrix.device).view(1, -1, rank)
            self.q, self.e = first.repeat(len(matrix), 1, 1), torch.zeros_like(matrix)
        wanted = matrix + self.e if self.coding.lazy else matrix
        left = orthonormal(wanted @ starting_factor(wanted[0], self.q.shape[2], self.seed, self.q))
        right = wanted.mT @ left
        out = left @ right.mT
        self.q.copy_(right)
        if self.coding.lazy:
            torch.sub(wanted, out, out=self.e)
        return out


def orthonormal(factor: Tensor) -> Tensor:
    """As the library's by_cholesky; the triangle is inverted, since cuBLAS solves thousands of rows slowly. One matrix
    after another, as cuSOLVER is known to be captured."""
    wide = factor.double()
    wide = wide / torch.linalg.vector_norm(wide, dim=-2, keepdim=True).clamp(min=1e-150)
    gram = wide.mT @ wide
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-14)
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    lower = torch.cat([torch.linalg.cholesky_ex(matrix).L for matrix in gram.split(1)])
    inverse = torch.linalg.solve_triangular(lower, one, upper=False)
    return (wide @ inverse.mT).to(factor.dtype)


class Boundary:
    """Backward messages of one boundary, of all runs; activations pass as they are.

    codings: of the runs; equal ones are neighbours. index: of the boundary. microbatches: of a step.
    """

    def __init__(self, codings: Sequence[Coding], index: int, microbatches: int) -> None:
        self.groups, start = [], 0
        for coding, same in groupby(codings):
            self.groups.append(Group(slice(start, start := start + len(list(same))), coding, index))
        self.epilogue = range(max(0, microbatches - (STAGES - 1 - index)), microbatches)
        self.microbatch, self.watched = 0, False
        self.last: Tensor | None = None  # activations of the micro-batch before
        self.noted: dict[int, Tensor] = {}  # by run

    def __call__(self, x: Tensor) -> Tensor:
        return _Backward.apply(x, self)

    def begin(self, watched: bool) -> None:
        self.microbatch, self.watched, self.last = 0, watched, None

    def send(self, a: Tensor, g: Tensor) -> Tensor:
        """ĝ of one micro-batch, float[runs, rows, length, width]. a: its activations."""
        out = g.float()  # no copy, where it is that already: gradients of a residual stream are ours alone
        for group in self.groups:
            if group.coding.rank and (not group.coding.epilogue or self.microbatch in self.epilogue):
                if self.watched and group.coding.lazy and group.e is not None and self.last is not None:
                    self._compare(group, (a - self.last)[group.runs].float())
                out[group.runs] = group.send(out[group.runs].flatten(1, -2)).view_as(out[group.runs])
        self.microbatch += 1
        self.last = a if self.watched else None
        return out.to(g.dtype)

    def _compare(self, group: Group, change: Tensor) -> None:
        """The authors' diagnostic, of a message before the last of the step."""
        assert group.e is not None
        for run, error, one in zip(range(group.runs.start, group.runs.stop), group.e.flatten(1), change.flatten(1)):
            sizes = [x.square().mean().sqrt().clamp(min=1e-30) for x in (error, one)]
            means = error.mean() / sizes[0], one.mean() / sizes[1], (error * one).mean() / sizes[0] / sizes[1]
            self.noted[run] = torch.stack(means)

    def diagnostic(self, run: int) -> dict[str, float]:
        """Of the last watched step."""
        return dict(zip(("error_mean", "change_mean", "cosine"), self.noted[run].tolist()))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:  # type: ignore[override]
        ctx.boundary, ctx.x = boundary, x.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.boundary.send(ctx.x, g.contiguous()), None


# --- gpu_quality's Model, of many runs


def stacked(size: Size, seeds: Sequence[int], device: torch.device) -> Weights:
    """First weights of a run per seed."""
    made = []
    for seed in seeds:
        torch.manual_seed(seed)
        made.append(dict(Model(size).named_parameters()))
    return {name: torch.stack([one[name].detach() for one in made]).to(device).requires_grad_() for name in made[0]}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """bf16[runs, tokens, out], as autocast has it."""
    half = torch.bfloat16
    if bias is None:
        return x.to(half) @ weight.to(half).mT
    return torch.baddbmm(bias.to(half)[:, None], x.to(half), weight.to(half).mT)


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:]) * weight[:, None] + bias[:, None]


def block(x: Tensor, heads: int, length: int, w: Sequence[Tensor]) -> Tensor:
    """One layer. x: float32[runs, tokens, width]. w: its parameters, in Model's order."""
    first, first_bias, second, second_bias, attend, attend_bias, merge, merge_bias, wide, wide_bias, narrow, bias = w
    qkv = linear(normed(x, first, first_bias), attend, attend_bias)
    q, k, v = qkv.view(-1, length, 3, heads, x.shape[-1] // heads).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + linear(mixed.transpose(1, 2).reshape(x.shape), merge, merge_bias)
    inner = nn.functional.gelu(linear(normed(x, second, second_bias), wide, wide_bias))
    return x + linear(inner, narrow, bias)


def losses(
    w: Weights, rows: Tensor, size: Size, boundaries: Sequence[Boundary] = (), layer: Callable[..., Tensor] = block
) -> Tensor:
    """float[runs]. rows: int[runs, rows, length + 1]. layer: `block`, or the same compiled."""
    runs, count, length = rows.shape[0], rows.shape[1], rows.shape[2] - 1
    rows = rows.long()
    own = torch.arange(runs, device=rows.device).view(-1, 1, 1) * 256
    h = nn.functional.embedding(rows[:, :, :-1] + own, w["bytes.weight"].flatten(0, 1))
    h = (h + w["places.weight"][:, None, :length]).flatten(1, 2)
    per = size.layers // STAGES
    for i in range(size.layers):
        if boundaries and i and i % per == 0:
            h = boundaries[i // per - 1](h.view(runs, count, length, -1)).flatten(1, 2)
        h = layer(h, size.heads, length, [w[name] for name in w if name.startswith(f"blocks.{i}.")])
    logits = linear(normed(h, w["norm.weight"], w["norm.bias"]), w["out.weight"], None)
    each = nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, :, 1:].flatten(), reduction="none")
    return each.view(runs, -1).mean(1)


@torch.no_grad()
def held_out_losses(w: Weights, rows: Tensor, size: Size) -> list[float]:
    """By run. rows: int[samples, length + 1]."""
    runs = len(w["out.weight"])
    parts = [losses(w, part.expand(runs, *part.shape), size) for part in rows.split(128)]
    return [float(one) for one in torch.stack(parts).mean(0)]


def compiled(w: Weights, size: Size, tokens: int) -> Callable[..., Tensor]:
    """`block`, compiled and tried once there and back; as it is, where that fails."""
    layer: Callable[..., Tensor] = torch.compile(block, dynamic=False)
    own = [w[name] for name in w if name.startswith("blocks.0.")]
    x = torch.randn(len(own[0]), tokens, size.width, device=own[0].device, requires_grad=True)
    try:
        torch.autograd.grad(layer(x, size.heads, size.length, own).sum(), [x, *own])
    except Exception as error:
        print(f"not compiled: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return block
    return layer


# --- training


@dataclass(frozen=True)
class Steps:
    """rows: int[steps, runs, rows of a step]. rates: float[steps]."""

    rows: Tensor
    rates: Tensor


class Training:
    """A stack's steps, in order; on a card one CUDA graph from the fourth on (`how`: "graph" or "eager").

    w: weights. data: bytes[samples, length + 1]. steps: what every step takes. codings: of the runs.
    """

    def __init__(
        self, w: Weights, size: Size, data: Tensor, steps: Steps, microbatches: int, codings: Sequence[Coding]
    ) -> None:
        self.w, self.size, self.data, self.rows, self.microbatches = w, size, data, steps.rows, microbatches
        self.boundaries = [Boundary(codings, index, microbatches) for index in range(STAGES - 1)]
        self.done, self.how, self.layer = 0, "eager", block
        device = data.device
        self.rates, self.at = steps.rates.to(device), torch.zeros(1, dtype=torch.int64, device=device)
        card = device.type == "cuda"
        if card:
            self.layer = compiled(w, size, steps.rows.shape[2] // microbatches * size.length)
        rate = torch.tensor(0.0, device=device)
        self.adam = torch.optim.AdamW(w.values(), lr=rate, betas=(0.9, 0.95), fused=card, capturable=card)
        for parameter in w.values():
            parameter.grad = torch.zeros_like(parameter)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, watched: bool = False) -> None:
        """watched: note the diagnostic."""
        if self.data.is_cuda and self.done == 3:
            self._capture()
        if self.graph is not None and not watched:
            self.graph.replay()
        elif self.data.is_cuda and self.done < 3:  # as capturing wants it
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(watched)
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._step(watched)
        self.done += 1

    def _step(self, watched: bool) -> None:
        rate: Any = self.adam.param_groups[0]["lr"]
        rate.copy_(self.rates.index_select(0, self.at)[0])
        torch._foreach_zero_([p.grad for p in self.w.values()])
        for boundary in self.boundaries:
            boundary.begin(watched)
        chosen = self.rows.index_select(0, self.at)[0]
        rows = self.data.index_select(0, chosen.flatten()).view(*chosen.shape, -1)
        for part in rows.chunk(self.microbatches, dim=1):
            (losses(self.w, part, self.size, self.boundaries, self.layer).sum() / self.microbatches).backward()
        self.adam.step()
        self.at += 1

    def _capture(self) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step(False)
        except RuntimeError as error:
            print(f"no graph: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            self.graph, self.how = graph, "graph"
