"""A row of `thinwire bench scratch` without messages: a step as one CUDA graph on a card, the same formulas on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.pipeline_ranks import loss_of
from thinwire.bench.scratch import formulas
from thinwire.bench.scratch.codes import Code, FittedCode, Tokens, books, looked_at
from thinwire.bench.scratch.corpus import text
from thinwire.bench.scratch.optimisers import Optimisers
from thinwire.bench.scratch.options import Scratch
from thinwire.bench.scratch.rows import Row
from thinwire.bench.scratch.training import bounded_stages
from thinwire.bench.scratch.ways import codes_of
from thinwire.boundaries.projected import BoundedStage
from thinwire.memory import scale_gradient
from thinwire.memory.token_means import following
from thinwire.torch_private.compiling import many_shapes

EAGER = 8  # steps before a graph is captured
BOOKS = 100  # steps between those that are looked at where there are no books


@formulas.fused
def through_code(gradient: Tensor, z: Tensor, error: Tensor) -> Tensor:
    """Of memory/scale_gradient.py, one kernel on a card."""
    return scale_gradient.through_code(gradient, z, error)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: tuple[Tokens, Tokens], there: Code, back: Code) -> Tensor:
        ctx.back, ctx.following = back, tokens[1]
        with torch.autocast(x.device.type, enabled=False):
            y, ctx.kept = there.send(x, tokens[0])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        g = ctx.back(gradients[0].contiguous(), ctx.following)
        return g if ctx.kept is None else through_code(g, *ctx.kept), None, None, None


def through(stage: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    """What a stage makes of x."""
    return stage(x, tokens=tokens) if isinstance(stage, BoundedStage) else stage(x)


def to_loss(stage: nn.Module, x: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
    """What the last stage makes of x, beside what is right."""
    return loss_of(through(stage, x, tokens), target)


class Run:
    """A model of a row and a seed.

    length: steps over dense's, after which the rate has fallen to 0 (over the last `setup.decay` of the steps).
    eager: on a card, neither graphs nor what torch compiles. uncompiled: graphs of torch's own kernels.
    """

    def __init__(
        self, row: Row, setup: Scratch, seed: int, length: float = 1.0, eager: bool = False, uncompiled: bool = False
    ) -> None:
        self.row, self.setup = row, setup
        self.steps = round(setup.steps * length)
        device = torch.device(setup.device)
        torch.manual_seed(1000 + seed)
        self.stages = nn.ModuleList(stage.to(device) for stage in bounded_stages(row, setup, seed))
        self.codes = codes_of(row, setup.stages - 1, setup.width, setup.vocabulary, device)
        self.fast, self.eager = device.type == "cuda", eager or device.type != "cuda"
        self.through, self.to_loss = through, to_loss
        formulas.COMPILED = set() if self.eager or uncompiled else {"cuda"}
        if self.fast and formulas.COMPILED:
            many_shapes(64)  # one function for all stages
            self.through, self.to_loss = (torch.compile(one, dynamic=False) for one in (through, to_loss))
        self.optimiser = Optimisers(setup, list(self.stages))
        self.samples, self.held_out = (part.to(device) for part in text(setup, seed))
        self.batch = torch.zeros(setup.rows, setup.length + 1, dtype=torch.int64, device=device)
        self.graphs: dict[bool, Any] = {}  # with codes that look at what they send, and without
        # of all steps: a graph is not captured on the default stream
        self.stream = torch.cuda.Stream() if self.fast else None
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
        began = first = time.perf_counter()
        step = 0
        for step in range(self.steps):
            self._one(step)
            if step == 2 * EAGER:
                first = time.perf_counter()
            if (step + 1) % self.setup.every == 0 or step + 1 == self.steps:
                losses.append((step + 1, self.evaluate()))
                advance(f"{self.row.name}, step {step + 1}: {losses[-1][1]:.4f}", self.setup.every)
                if time.monotonic() > end:
                    break
        return {
            "losses": losses, "done": step + 1, "steps": self.steps,
            "seconds": (time.perf_counter() - first) / max(1, step - 2 * EAGER), "began": first - began,
            "errors": self.errors(),
        }  # fmt: skip

    def errors(self) -> list[list[float]]:
        """Per direction and boundary: energy of errors over that of values around their mean, since the last call, in
        the steps whose messages were looked at."""
        out = []
        for codes in zip(*self.codes):
            sums = [code.errors for code in codes if isinstance(code, FittedCode)]
            out.append([float(f"{float(one[0] / one[1]):.4g}") for one in sums])
            for one in sums:
                one.zero_()
        return out

    def _one(self, step: int) -> None:
        codes = [code for boundary in self.codes for code in boundary]
        again = books(codes)
        looking = looked_at(step, self.row.codec.get("every", 0) or BOOKS)
        for code in codes:
            code.looking = looking
            code.before(step)
        for share, *bits in self.row.phases:
            if step == round(share * self.steps):
                self._set_bits(bits)
        self.optimiser.set_rate(self.setup.rate_at(step, self.steps))
        rows = self.setup.rows
        self.batch.copy_(self.samples[step * rows : (step + 1) * rows])
        if again:
            self.graphs.clear()
        if self.eager or step < EAGER:
            self._step()
            return
        if looking not in self.graphs:
            self._capture(looking)
        self.graphs[looking].replay()

    def _set_bits(self, bits: Sequence[float]) -> None:
        for boundary in self.codes:
            for code, number in zip(boundary, bits):
                code.set_bits(number)

    def _step(self) -> None:
        self.optimiser.zero_grad(set_to_none=False)
        x = ids = self.batch[:, :-1].contiguous()
        tokens = Tokens.of(ids, self.setup.vocabulary), Tokens.of(following(ids), 1 + self.setup.vocabulary)
        with torch.autocast(self.batch.device.type, torch.bfloat16, enabled=self.fast):
            for stage, codes in zip(self.stages, self.codes):
                x = _Cross.apply(self.through(stage, x, ids), tokens, *codes)
            loss = self.to_loss(self.stages[-1], x, ids, self.batch[:, 1:].contiguous())
        loss.backward()
        self.optimiser.step()

    def _capture(self, looking: bool) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._step()
        self.graphs[looking] = graph

    @torch.no_grad()
    def evaluate(self) -> float:
        """The held-out loss, with nothing coded; what lies outside of a subspace is lost as in training."""
        total = torch.zeros((), device=self.held_out.device)
        for part in self.held_out.long().split(64):
            x = ids = part[:, :-1]
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.fast):
                for stage in self.stages:
                    x = through(stage, x, ids)
            total += loss_of(x.float(), part[:, 1:]) * len(part)
        return float(total / len(self.held_out))
