"""Runs that train side by side in one process, all copies of the model in one batched forward and backward pass."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from site_adam import BLOCK, NoiseRatio, SignalAdamW, SiteAdamW
from stacked_llama import Llama
from stacked_model import Size, sequences
from stacked_sites import LocalSites, PerStep, per_step_wire, table_of
from torch import Tensor, nn

EXACT = ("fp32 per step", "large batch")  # one copy of the model will do
PER_STEP: dict[str, str] = {"fp32 per step": "off", "4 bits per step": "max", "large batch": "off"}
AVERAGED = 200  # times that shared weights enter a moving average, of the last fortieth of the run
HELD = 512  # sequences, at the end; on the way a quarter of them


@dataclass(frozen=True)
class Job:
    """One run. every: H, 0 where it is none. table: `[local]`, but for `every`, as JSON would have it. apart: sites
    have text of their own. batch: sequences per step, over all sites. flush: the last round sends all that is left, in
    four bits per value. site_adam: the inner optimiser is SiteAdamW, not AdamW. beta2: how slowly its second moments
    forget. moments: whose they are: a site's "own", or what it takes the common batch's to be (SignalAdamW: "signal").
    late: {"share", "every", "table"}: the last share of the steps has this H, and this wire where one is given."""

    method: str
    sites: int
    every: int
    seed: int
    steps: int
    lr: float
    table: dict[str, Any] = field(default_factory=dict, hash=False)
    flush: bool = False
    apart: bool = False
    batch: int = 16
    size: Size | Llama = field(default_factory=Size)
    site_adam: bool = False
    moments: str = "own"
    late: dict[str, Any] = field(default_factory=dict, hash=False)
    beta2: float = 0.95

    @property
    def copies(self) -> int:
        """Of the model, that train."""
        return 1 if self.method in EXACT and not self.apart else self.sites

    @property
    def work(self) -> float:
        """Operations of all passes, roughly: six per parameter and token."""
        return 6.0 * self.size.parameters() * self.batch * self.size.length * self.steps

    @property
    def together(self) -> int:
        """Batches per step of the optimiser."""
        return self.every if self.method == "large batch" else 1

    def rate(self, step: int) -> float:
        """Warm-up over a twentieth, then a cosine to a tenth."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


class _Trainee:
    """A job under way: its part of the fleet's tensors.

    weights, gradients: float32[copies, n] of the fleet's.
    """

    def __init__(self, job: Job, weights: Tensor, gradients: Tensor) -> None:
        self.job, self.gradients = job, gradients
        self.parameter = nn.Parameter(weights)
        self.sum: Tensor | None = torch.zeros_like(gradients) if job.together > 1 else None
        self.local: LocalSites | None = None
        self.curve: list[tuple[int, float]] = []
        self.average: Tensor | None = None  # of what was shared, over the last looks
        if job.method in PER_STEP:
            self.per_step = PerStep(per_step_wire(PER_STEP[job.method]), job.size, job.sites)
        else:
            self.local = LocalSites(self.parameter.data, table_of(job.table, job.every), job.size)

    @torch.no_grad()
    def before(self, step: int, group: dict[str, Any]) -> None:
        """Gradients as the optimiser takes them; none where it waits for more of them."""
        job = self.job
        group["lr"] = job.rate(step)
        self.parameter.grad = self.gradients
        if self.sum is not None:
            self.sum += self.gradients
            if (step + 1) % job.together and step + 1 < job.steps:
                self.parameter.grad = None
                return
            self.gradients.copy_(self.sum / (step % job.together + 1))
            self.sum.zero_()
        if self.local is None:
            self.per_step.average(self.gradients)
        clip(self.gradients)

    @torch.no_grad()
    def after(self, step: int) -> None:
        """The optimiser has made its step."""
        if self.local is not None:
            self.local.step()
            late = self.job.late
            if late and step + 1 == round(self.job.steps * (1 - late["share"])):
                self.local.go_on(table_of(late.get("table", self.job.table), late["every"]))
        if step % max(1, self.job.steps // AVERAGED) == 0:
            now = self.shared()
            self.average = now.clone() if self.average is None else self.average.lerp_(now, 0.2)

    def shared(self) -> Tensor:
        """float32[n]: the weights that all sites share."""
        return self.parameter.detach()[0] if self.local is None else self.local.at_anchor()

    @property
    def bytes(self) -> int:
        """That the busiest site has sent."""
        job = self.job
        ratios = 2 * -(-job.size.parameters() // BLOCK) * job.steps if job.site_adam else 0  # numbers, of fp32
        return 8 * ratios * (job.sites - 1) // job.sites + (self.per_step if self.local is None else self.local).bytes


def _optimizer(run: _Trainee, fused: bool) -> torch.optim.Optimizer:
    """Of a run's inner steps."""
    how: dict[str, Any] = {"lr": run.job.lr, "betas": (0.9, run.job.beta2), "weight_decay": 0.1}
    if run.job.site_adam:
        return SiteAdamW(run.parameter, NoiseRatio(lambda x: x.mean(0), run.job.sites), **how)
    if run.job.moments != "own":
        return SignalAdamW(run.parameter, run.job.sites, run.job.moments, **how)
    return torch.optim.AdamW([run.parameter], fused=fused, **how)


def clip(gradients: Tensor) -> None:
    """Every row's norm to 1 at most."""
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    gradients.mul_((1.0 / (norms + 1e-6)).clamp(max=1.0))


class Fleet:
    """Jobs with as many copies, steps and equal sizes, trained together.

    text, held: bytes, on the device. graph: capture the forward and backward pass once, and replay it.
    """

    def __init__(self, jobs: list[Job], text: Tensor, held: Tensor, graph: bool) -> None:
        first = jobs[0]
        alike = {(job.copies, job.steps, job.batch, job.size) for job in jobs}
        if len(alike) > 1:
            raise ValueError("jobs of a fleet have equal copies, steps, batches and sizes")
        self.size, self.text, self.held, self.steps = first.size, text, held, first.steps
        device, per = text.device, first.batch // first.copies
        initial = [job.size.initial(job.seed).to(device).expand(job.copies, -1) for job in jobs]
        self.weights, self.first = torch.cat(initial), initial[0][0]
        del initial
        self.gradients = torch.zeros_like(self.weights)
        self.dtype = torch.bfloat16 if text.is_cuda else torch.float32
        self.low = torch.empty_like(self.weights, dtype=self.dtype)
        self.leaves = {n: v.detach().requires_grad_() for n, v in self.size.views(self.low).items()}
        parts = (first.copies,) * len(jobs)
        self.runs = [_Trainee(*one) for one in zip(jobs, self.weights.split(parts), self.gradients.split(parts))]
        self.inner = [_optimizer(run, text.is_cuda) for run in self.runs]
        begin = [job.size.starts(text, job.seed + 1, job.steps, job.copies, per, job.apart) for job in jobs]
        self.begin = torch.cat(begin, 1).to(device)
        self.rows = torch.zeros(len(jobs) * first.copies, per, self.size.length + 1, dtype=torch.long, device=device)
        self.graph = self._captured() if graph else None

    def train(self) -> None:
        """All steps, and the sites' last round."""
        every = max(1, self.steps // self.size.looks)
        for step in range(self.steps):
            self.rows.copy_(sequences(self.text, self.begin[step], self.size.length))
            if self.graph is None:
                self._pass()
            else:
                self.graph.replay()
            for run, inner in zip(self.runs, self.inner):
                run.before(step, inner.param_groups[0])
                inner.step()
            for run in self.runs:
                run.after(step)
            if (step + 1) % every == 0:
                self._look(step + 1)

    def _look(self, step: int) -> None:
        for run in self.runs:
            run.curve.append((step, self.evaluate(run.shared(), HELD // 4)))

    def rows_found(self, seconds: float) -> list[dict[str, Any]]:
        """One per job, after the last step."""
        out = []
        for run in self.runs:
            job, n, found = run.job, run.job.size.parameters(), {}
            if run.local is not None:
                weights, more = run.local.flushed()
                found = {"held_flush": self.evaluate(weights, HELD), "flush_bytes": more}
                run.local.finish()
            held, sent = self.evaluate(run.shared(), HELD), run.bytes
            found["held_anchor"] = held
            assert run.average is not None
            found["held_average"] = self.evaluate(run.average, HELD)
            if job.flush:
                last = run.local.last_bytes if run.local is not None else 0
                held, sent = found["held_flush"], sent - last + found["flush_bytes"]
            tokens = job.steps * job.batch * job.size.length
            dense = 8 * n * (job.sites - 1) / job.sites / (job.batch * job.size.length)
            found |= {"held": held, "bytes": sent, "tokens": tokens, "parameters": n, "curve": run.curve}
            found |= {"bytes_per_token": sent / tokens, "fp32_bytes_per_token": dense}
            if job.size.pretrained:
                found["start"] = self.evaluate(self.first, HELD)
            out.append(asdict(job) | found | {"seconds": seconds / len(self.runs), "fleet": len(self.runs)})
            out[-1] |= {"work": job.work, "teraflops": 1e-12 * len(self.runs) * job.work / seconds}
        return out

    @torch.no_grad()
    def evaluate(self, flat: Tensor, count: int) -> float:
        """Mean loss of these weights on held-out sequences, the same ones every time."""
        length = self.size.length
        begin = torch.linspace(0, self.held.numel() - length - 2, count).long()
        weights = self.size.views(flat[None].to(self.dtype))
        parts = begin.split(self.size.at_once)
        found = [self.size.losses(weights, sequences(self.held, some, length)[None]) for some in parts]
        return float(torch.cat(found).mean())

    def _pass(self) -> None:
        """Gradients of all copies, in float32."""
        self.low.copy_(self.weights)
        total = self.size.losses(self.leaves, self.rows).sum()
        found = torch.autograd.grad(total, list(self.leaves.values()))
        torch.cat([g.flatten(1) for g in found], 1, out=self.gradients)

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._pass()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._pass()
        return graph


def run_jobs(jobs: list[Job], text: Tensor, held: Tensor, graph: bool) -> list[dict[str, Any]]:
    """Rows of jobs that train together."""
    began = time.perf_counter()
    fleet = Fleet(jobs, text, held, graph)
    fleet.train()
    if text.is_cuda:
        torch.cuda.synchronize()
    return fleet.rows_found(time.perf_counter() - began)
