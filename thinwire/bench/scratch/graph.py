"""A row of `thinwire bench scratch` without messages: a step as one CUDA graph on a card, the same formulas on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.pipeline_options import Setup
from thinwire.bench.pipeline_ranks import loss_of, stages_of
from thinwire.bench.scratch.codes import Code, TransformCode, code_of
from thinwire.bench.scratch.corpus import text
from thinwire.bench.scratch.options import Scratch
from thinwire.bench.scratch.rows import Row

EAGER = 8  # steps before a graph is captured


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, there: Code, back: Code) -> Tensor:
        ctx.back, ctx.tokens = back, tokens
        with torch.autocast(x.device.type, enabled=False):
            return there(x, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0].contiguous(), ctx.tokens), None, None, None


class Run:
    """A model of a row and a seed.

    length: steps over dense's, after which the rate has fallen to 0 (over the last `setup.decay` of the steps).
    eager: on a card, no graph.
    """

    def __init__(self, row: Row, setup: Scratch, seed: int, length: float = 1.0, eager: bool = False) -> None:
        self.row, self.setup = row, setup
        self.steps = round(setup.steps * length)
        device = torch.device(setup.device)
        torch.manual_seed(1000 + seed)
        size = Setup(setup.stages, width=setup.width, length=setup.length, seed=seed, vocabulary=setup.vocabulary)
        self.stages = nn.ModuleList(module.to(device) for module in stages_of(size))
        ways = (row.codec, row.tokens), (row.back or row.codec, 0.0)
        self.codes = [
            [code_of(way, setup.width, setup.vocabulary, tokens, device) for way, tokens in ways]
            for _ in range(setup.stages - 1)
        ]
        self.rate = torch.zeros((), device=device)
        self.fast, self.eager = device.type == "cuda", eager or device.type != "cuda"
        more: dict[str, Any] = {"fused": True, "capturable": self.fast}
        self.optimiser = torch.optim.AdamW(self.stages.parameters(), lr=self.rate, betas=(0.9, 0.95), **more)
        self.samples, self.held_out = (part.to(device) for part in text(setup, seed))
        self.batch = torch.zeros(setup.rows, setup.length + 1, dtype=torch.int64, device=device)
        self.graph: Any = None
        self.stream = (
            torch.cuda.Stream() if self.fast else None
        )  # of all steps: a graph is not captured on the default one
        if self.fast:
            torch.set_float32_matmul_precision("high")

    def train(self, advance: Callable[[str, int], None], end: float = float("inf")) -> dict[str, Any]:
        """Held-out losses by step. advance(note, steps): called at evaluations. end: on the monotonic clock; a run
        that is not through by then has `done` below its steps."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return self._train(advance, end)

    def _train(self, advance: Callable[[str, int], None], end: float) -> dict[str, Any]:
        losses: list[tuple[int, float]] = []
        began = time.perf_counter()
        step = 0
        for step in range(self.steps):
            self._one(step)
            if (step + 1) % self.setup.every == 0 or step + 1 == self.steps:
                losses.append((step + 1, self.evaluate()))
                advance(f"{self.row.name}, step {step + 1}: {losses[-1][1]:.4f}", self.setup.every)
                if time.monotonic() > end:
                    break
        return {
            "losses": losses, "done": step + 1, "steps": self.steps,
            "seconds": (time.perf_counter() - began) / (step + 1), "errors": self.errors(),
        }  # fmt: skip

    def errors(self) -> list[list[float]]:
        """Per direction and boundary: energy of errors over that of values around their mean, since the last call."""
        out = []
        for codes in zip(*self.codes):
            sums = [code.errors for code in codes if isinstance(code, TransformCode)]
            out.append([float(f"{float(one[0] / one[1]):.4g}") for one in sums])
            for one in sums:
                one.zero_()
        return out

    def _one(self, step: int) -> None:
        again = False
        for boundary in self.codes:
            for code in boundary:
                again |= code.before(step)
        for share, *bits in self.row.phases:
            if step == round(share * self.steps):
                for boundary in self.codes:
                    for code, number in zip(boundary, bits):
                        code.set_bits(number)
        self.rate.fill_(self.setup.rate_at(step, self.steps))
        rows = self.setup.rows
        self.batch.copy_(self.samples[step * rows : (step + 1) * rows])
        if again:
            self.graph = None
        if self.eager or step < EAGER:
            self._step()
            return
        if self.graph is None:
            self._capture()
        self.graph.replay()

    def _step(self) -> None:
        self.optimiser.zero_grad(set_to_none=False)
        x, tokens = self.batch[:, :-1], self.batch[:, :-1].contiguous()
        with torch.autocast(self.batch.device.type, torch.bfloat16, enabled=self.fast):
            for index, stage in enumerate(self.stages):
                x = stage(x)
                if index < len(self.codes):
                    x = _Cross.apply(x, tokens, *self.codes[index])
            loss = loss_of(x, self.batch[:, 1:])
        loss.backward()
        self.optimiser.step()

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._step()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The held-out loss, with nothing coded."""
        total = torch.zeros((), device=self.held_out.device)
        for part in self.held_out.long().split(64):
            x = part[:, :-1]
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.fast):
                for stage in self.stages:
                    x = stage(x)
            total += loss_of(x.float(), part[:, 1:]) * len(part)
        return float(total / len(self.held_out))
