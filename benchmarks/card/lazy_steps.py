"""Steps of lazy_long.py: gradients of activations in low rank at a boundary, and a whole step as one CUDA graph.

`Boundary` is what the library's lanes do with `LowRank` and `ErrorFeedback`, with one residual and one warm start per
boundary, in operations that a graph can hold (tests/test_benchmarks_quality.py compares the two).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_quality import Model
from torch import Tensor, nn

from thinwire.codecs.lowrank import gaussian, starting_factor
from thinwire.collectives.lowrank import by_cholesky


class Boundary:
    """Backward messages of one boundary; activations pass as they are.

    rank: of the messages. lazy: is what a message left out added to the next? coded: which micro-batches. seed: of the
    first factor.
    """

    def __init__(self, rank: int, lazy: bool, coded: Sequence[int], seed: int = 0) -> None:
        self.rank, self.lazy, self.coded, self.seed, self.microbatch = rank, lazy, set(coded), seed, 0
        self.q: Tensor | None = None  # right factor of the last message
        self.e: Tensor | None = None  # what messages left out so far
        self.last: Tensor | None = None  # activations of the micro-batch before
        self.noted: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return _Backward.apply(x, self)

    def begin(self) -> None:
        self.microbatch, self.last = 0, None

    def send(self, a: Tensor, g: Tensor) -> Tensor:
        """ĝ of one micro-batch. a: its activations."""
        coded = self.microbatch in self.coded
        self.microbatch += 1
        if not coded:
            return g
        matrix = g.flatten(0, -2).float()
        if self.q is None:
            self.rank = min(self.rank, matrix.shape[1])
            self.q = gaussian(matrix.shape[1] * self.rank, self.seed, g.device).view(-1, self.rank)
            self.e = torch.zeros_like(matrix)
            self.noted = torch.zeros(3, device=g.device)
        if self.lazy and self.last is not None:
            self._compare((a - self.last).float())
        self.last = a
        wanted = matrix + self.e if self.lazy else matrix
        left = by_cholesky((wanted @ starting_factor(wanted, self.rank, self.seed, self.q))[None])[0]
        right = wanted.T @ left
        out = left @ right.T
        self.q.copy_(right)
        if self.lazy:
            self.e.add_(matrix - out)
        return out.view_as(g).to(g.dtype)

    def _compare(self, change: Tensor) -> None:
        """The authors' diagnostic, of a message before the last of the step."""
        assert self.e is not None and self.noted is not None
        error, change = self.e.flatten(), change.flatten()
        sizes = [x.square().mean().sqrt().clamp(min=1e-30) for x in (error, change)]
        self.noted.copy_(
            torch.stack(
                (error.mean() / sizes[0], change.mean() / sizes[1], (error * change).mean() / sizes[0] / sizes[1])
            )
        )

    def diagnostic(self) -> dict[str, float]:
        """Of the last step."""
        assert self.noted is not None
        return dict(zip(("error_mean", "change_mean", "cosine"), self.noted.tolist()))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:  # type: ignore[override]
        ctx.boundary, ctx.x = boundary, x.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.boundary.send(ctx.x, g.contiguous()), None


@dataclass(frozen=True)
class Steps:
    """rows: int[steps, rows of a step]. rates: float[steps]."""

    rows: Tensor
    rates: Tensor


class Training:
    """A model's steps, in order; on a card one CUDA graph from the fourth on (`how`: "graph" or "eager").

    data: bytes[samples, length + 1]. steps: what every step takes. microbatches: of a step.
    """

    def __init__(self, model: Model, data: Tensor, steps: Steps, microbatches: int, boundaries: list[Boundary]) -> None:
        self.model, self.data, self.rows, self.microbatches = model, data, steps.rows, microbatches
        self.boundaries, self.done, self.how = boundaries, 0, "eager"
        device = data.device
        self.rates, self.at = steps.rates.to(device), torch.zeros(1, dtype=torch.int64, device=device)
        card = device.type == "cuda"
        rate = torch.tensor(0.0, device=device)
        self.adam = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=card, capturable=card)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        if self.data.is_cuda and self.done == 3:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        elif self.data.is_cuda and self.done < 3:  # as capturing wants it
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._step()
        self.done += 1

    def _step(self) -> None:
        rate: Any = self.adam.param_groups[0]["lr"]
        rate.copy_(self.rates.index_select(0, self.at)[0])
        parameters = list(self.model.parameters())
        torch._foreach_zero_([p.grad for p in parameters])
        for boundary in self.boundaries:
            boundary.begin()
        rows = self.data.index_select(0, self.rows.index_select(0, self.at)[0])
        for part in rows.chunk(self.microbatches):
            (loss_of(self.model, part, self.boundaries) / self.microbatches).backward()
        self.adam.step()
        self.at += 1

    def _capture(self) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            print(f"no graph: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            self.graph, self.how = graph, "graph"


def loss_of(model: Model, rows: Tensor, boundaries: list[Boundary]) -> Tensor:
    """As gpu_quality's, without a cache of casts, which a graph must not keep."""
    rows = rows.long()
    with torch.autocast(rows.device.type, dtype=torch.bfloat16, cache_enabled=False):
        logits = model(rows[:, :-1], boundaries)  # type: ignore[arg-type]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
