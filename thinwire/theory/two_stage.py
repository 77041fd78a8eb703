"""A two-stage model whose activation is sent exactly, compressed directly, or compressed as a delta keyed by sample.

Stage I computes a = tanh(ξ + θ), stage II predicts v·y from what it received, y ≈ a; the loss ½(v·y − target)²
is non-convex in (θ, v). Stage II sends ∂loss/∂y back exactly. AQ-SGD (NeurIPS 2022): with deltas and γ ∝ 1/√T
the mean of ‖∇f‖² over T steps falls as 1/√T. Compressed directly it stops falling: E y yᵀ = a aᵀ + Cov, so even
an unbiased codec moves the point at which the mean gradient vanishes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.codecs import Codec, Dither, Identity, Ternary
from thinwire.kernels.random import derive
from thinwire.memory import Delta, Memory, Plain
from thinwire.theory.simulate import one_thread, seeds_of

SAMPLES = 64
WIDTH = 8
BATCH = 2
NOISE = 0.5  # of the targets: no parameters fit them all, so the gradients stay noisy
RATE = 1.0  # γ = RATE/√T
INSIDE = Dither(5)  # ω = WIDTH/5² = 0.32
LOOKS = 160  # measurements of ‖∇f‖² per run


@dataclass(frozen=True)
class Line:
    """How activations are sent: a codec and a memory; `name` is its line in the figure."""

    name: str
    codec: Codec
    memory: Memory


@dataclass
class Model:
    """S runs side by side: inputs [S, N, w], targets [S, N], θ and v [S, w]."""

    inputs: Tensor
    targets: Tensor
    theta: Tensor
    v: Tensor

    def activation(self, x: Tensor) -> Tensor:
        """a = tanh(ξ + θ): [S, B, w]."""
        return torch.tanh(x + self.theta[:, None])

    def gradients(self, target: Tensor, a: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(∂f/∂θ, ∂f/∂v), means over the batch: stage II works on the y it received, stage I on its own a."""
        off = (torch.bmm(y, self.v[:, :, None])[:, :, 0] - target) / target.shape[1]  # [S, B]
        back = off[:, :, None] * self.v[:, None]  # ∂loss/∂y, sent back
        return (back * (1 - a * a)).sum(dim=1), torch.bmm(off[:, None], y)[:, 0]

    def stationarity(self) -> Tensor:
        """‖∇f‖² of the uncompressed objective over all samples: [S]."""
        a = self.activation(self.inputs)
        return torch.cat(self.gradients(self.targets, a, a), dim=1).square().sum(dim=1)


def lines(codec: Codec | None = None) -> list[Line]:
    """What is compared: exact, compressed directly, compressed as deltas (None: by Ternary). Ternary's ω = .914 shows
    the floor and lies outside AQ-SGD's theorem, which asks for ω < ½; "delta, ω < ½" lies inside."""
    codec = codec or Ternary()
    return [
        Line("exact", Identity(), Plain()),
        Line("direct", codec, Plain()),
        Line("delta", codec, Delta(store="native", gate=False)),
        Line("delta, ω < ½", INSIDE, Delta(store="native", gate=False)),
    ]


def model(runs: Sequence[int]) -> Model:
    """One model per seed in `runs`: Gaussian inputs, targets of a teacher of the same form plus noise, θ = v = 0."""
    inputs, targets = [], []
    for run in runs:
        g = torch.Generator().manual_seed(derive("two-stage", run))
        x = torch.randn(SAMPLES, WIDTH, generator=g, dtype=torch.float64)
        theta, v = torch.randn(2, WIDTH, generator=g, dtype=torch.float64)
        noise = torch.randn(SAMPLES, generator=g, dtype=torch.float64)
        inputs.append(x)
        targets.append(torch.tanh(x + theta) @ v + NOISE * noise)
    zero = torch.zeros(len(runs), WIDTH, dtype=torch.float64)
    return Model(torch.stack(inputs), torch.stack(targets), zero, zero)


def looks(horizon: int) -> dict[int, int]:
    """At which steps ‖∇f‖² is measured, densely at first, where it falls fast, and how many steps each stands for."""
    times = sorted({int(horizon * (k / LOOKS) ** 3) for k in range(LOOKS)} | {horizon})
    return {t: after - t for t, after in pairwise(times)}


@dataclass
class Boundary:
    """The link between the stages, with the mirrors of its samples: h [S, N, w], and `warm`: which samples have one."""

    line: Line
    h: Tensor
    warm: Tensor

    def cross(self, a: Tensor, at: tuple[Tensor, Tensor], seeds: list[int]) -> Tensor:
        """What stage II receives for activations a [S, B, w] of the samples `at` (run, id)."""
        memory, codec = self.line.memory, self.line.codec
        h = self.h[at] if memory.mirrored else None
        u = memory.outgoing(a, None, h)
        d = codec.rows(u.reshape(-1, WIDTH), seeds).view_as(u)
        if h is None:
            return d
        step = torch.where(self.warm[at], d, a) if memory.cold_start else d  # a first visit is sent in full
        self.h[at] = memory.shifted(h, step, memory.alpha_for(codec, WIDTH))
        self.warm[at] = True
        return self.h[at]


def train(line: Line, runs: Sequence[int], horizon: int, rate: float = RATE) -> list[float]:
    """SGD for T = `horizon` steps at γ = rate/√T; per run the mean of ‖∇f‖² over the steps."""
    net = model(runs)
    gamma = rate / math.sqrt(horizon)
    moments = looks(horizon)
    line.memory.check(line.codec, WIDTH)
    empty = torch.zeros(len(runs), SAMPLES, WIDTH, dtype=torch.float64)
    boundary = Boundary(line, empty, torch.zeros(len(runs), SAMPLES, 1, dtype=torch.bool))
    run, total = torch.arange(len(runs))[:, None], torch.zeros(len(runs), dtype=torch.float64)
    with one_thread():
        for t, seeds in zip(range(horizon), seeds_of(runs, BATCH)):
            if t in moments:
                total += moments[t] * net.stationarity()
            at = run, torch.tensor(seeds).view(len(runs), BATCH) % SAMPLES
            a = net.activation(net.inputs[at])
            d_theta, d_v = net.gradients(net.targets[at], a, boundary.cross(a, at, seeds))
            net.theta = net.theta - gamma * d_theta
            net.v = net.v - gamma * d_v
    return (total / horizon).tolist()
