"""What every rank of `thinwire bench pipeline` runs: a small GPT on bytes of Python's library, one stage per rank."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Any

import numba
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from thinwire.bench.pipeline_modes import Mode
from thinwire.bench.pipeline_options import VOCABULARY, Setup
from thinwire.kernels.random import derive
from thinwire.pipeline.message_choice import Plan
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage


class Block(nn.Module):
    """Attention and feed-forward, float[rows, length, width] → the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = nn.Linear(width, 3 * width)
        self.merge, self.wide, self.narrow = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """What the block makes of `x`."""
        rows, length, width = x.shape
        q, k, v = self.heads(self.first(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Embed(nn.Module):
    """int64[rows, length] → float[rows, length, width]."""

    def __init__(self, width: int, length: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.bytes, self.place = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """The vectors of `x`, with their places."""
        return self.bytes(x) + self.place[: x.shape[1]]


def stages_of(setup: Setup) -> list[nn.Module]:
    """The model of `setup`, cut; its weights follow from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(derive("bench pipeline", setup.seed) % 2**32)
        out: list[nn.Module] = []
        for index in range(setup.stages):
            parts: list[nn.Module] = [Embed(setup.width, setup.length, setup.vocabulary)] if index == 0 else []
            parts += [Block(setup.width) for _ in range(setup.layers)]
            if index == setup.stages - 1:
                parts += [nn.LayerNorm(setup.width), nn.Linear(setup.width, setup.vocabulary)]
            out.append(nn.Sequential(*parts))
    return out


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of `output`, float[…, vocabulary], where `target` is right."""
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def text(setup: Setup) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of the standard library's modules as `setup` wants them, three disjoint parts: pre-training, fine-tuning,
    held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    need = (setup.samples + setup.held_out) * (setup.length + 1)
    data = bytearray()
    for file in files:
        data += file.read_bytes()
        if len(data) >= 4 * need + 2_000_000:
            break
    raw = torch.frombuffer(data, dtype=torch.uint8).long()
    windows = raw[: len(raw) // (setup.length + 1) * (setup.length + 1)].view(-1, setup.length + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(setup.seed))
    return windows[order].split((len(windows) - setup.samples - setup.held_out, setup.samples, setup.held_out))


def pretrain(setup: Setup, path: str) -> float:
    """Train the whole model of `setup` in one process and save its stages' weights to `path`; returns the held-out
    loss."""
    modules, (before, _, held_out) = stages_of(setup), text(setup)
    model = nn.Sequential(*modules)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4 * setup.rate)
    g = torch.Generator().manual_seed(setup.seed)
    for _ in range(setup.pretrain):
        rows = before[torch.randint(len(before), (setup.batch,), generator=g)]
        optimiser.zero_grad()
        loss_of(model(rows[:, :-1]), rows[:, 1:]).backward()
        optimiser.step()
    torch.save([module.state_dict() for module in modules], path)
    with torch.no_grad():
        return float(loss_of(model(held_out[:, :-1]), held_out[:, 1:]))


class Rank:
    """This rank's stage under `mode`, as `setup` says, with the pre-trained `weights` (a file; "": as drawn)."""

    def __init__(self, mode: Mode, setup: Setup, weights: str) -> None:
        numba.config.NUMBA_NUM_THREADS = torch.get_num_threads()  # type: ignore[attr-defined]
        dist.init_process_group("gloo")
        self.rank, self.setup, device = dist.get_rank(), setup, torch.device("cpu")
        self.first, self.last = self.rank == 0, self.rank == setup.stages - 1
        module = stages_of(setup)[self.rank]
        if weights:
            module.load_state_dict(torch.load(weights, weights_only=True)[self.rank])
        name = mode.schedule or setup.schedule
        self.pipe: Pipeline | None = None
        if mode.wire is None:
            stage: PipelineStage = PipelineStage(module, self.rank, setup.stages, device)
        else:
            stage = CompressedStage(module, self.rank, setup.stages, device, wire=mode.wire, seed=setup.seed)
            self.pipe = Pipeline([stage], plan=Plan(name), row=(setup.length, setup.width))
        kind: Any = get_schedule_class(name)
        self.schedule = kind(stage, setup.microbatches, loss_fn=loss_of)
        self.optimiser = torch.optim.AdamW(module.parameters(), lr=setup.rate)

    def step(self, ids: list[int], rows: Tensor) -> None:
        """Train on `rows`, whose samples are `ids`."""
        self.optimiser.zero_grad()
        if self.pipe is None:
            self._torch(rows)
        else:
            with self.pipe.step(ids=ids):
                self._torch(rows)
        if self.pipe is None or not self.pipe.skipped:
            self.optimiser.step()

    def _torch(self, rows: Tensor) -> None:
        inputs = (rows[:, :-1],) if self.first else ()
        self.schedule.step(*inputs, target=rows[:, 1:] if self.last else None)

    def held_out_loss(self, rows: Tensor) -> float:
        """Of `rows`, uncompressed; on every rank."""
        inputs = (rows[:, :-1],) if self.first else ()
        with torch.no_grad():
            answer = self.schedule.eval(*inputs, target=rows[:, 1:] if self.last else None)
        loss = torch.zeros(1) if answer is None else loss_of(answer, rows[:, 1:]).reshape(1)
        dist.broadcast(loss, src=self.setup.stages - 1)
        return float(loss)

    def counts(self) -> dict[str, int]:
        """What this rank has sent and met so far."""
        if self.pipe is None:
            return {"forward": 0, "backward": 0, "cold": 0, "warm": 0, "skips": 0}
        s = self.pipe.stats
        return {
            "forward": s.forward_bytes,
            "backward": s.backward_bytes,
            "cold": s.cold,
            "warm": s.warm,
            "skips": s.skips,
        }


def train(mode: Mode, setup: Setup, weights: str) -> dict[str, Any]:
    """Fine-tune in `mode` as `setup` says, from the file `weights`; held-out loss after each epoch, and what was sent
    in each."""
    rank, (_, samples, held_out) = Rank(mode, setup, weights), text(setup)
    losses, epochs = [rank.held_out_loss(held_out)], []
    for epoch in range(setup.epochs):
        before = rank.counts()
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1000 * setup.seed + epoch))
        for ids in order[: len(order) // setup.batch * setup.batch].split(setup.batch):
            rank.step(ids.tolist(), samples[ids])
        losses.append(rank.held_out_loss(held_out))
        epochs.append({name: count - before[name] for name, count in rank.counts().items()})
    dist.destroy_process_group()
    return {"losses": losses, "epochs": epochs}


def time_steps(mode: Mode, setup: Setup, steps: int) -> dict[str, Any]:
    """Seconds of `steps` cold steps in `mode` (every sample new; where samples are remembered), then of as many warm
    ones, as `setup` says; one of each kind before, not counted."""
    rank, (_, samples, _) = Rank(mode, setup, ""), text(setup)
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(2 if mode.per_sample else 1):
        rank.step([-1 - i for i in range(setup.batch)], samples[: setup.batch])
    for kind in ("cold", "warm") if mode.per_sample else ("warm",):
        for step in range(steps):
            ids = [setup.batch * step + i for i in range(setup.batch)]
            dist.barrier()
            began = time.perf_counter()
            rank.step(ids, samples[: setup.batch])
            seconds[kind].append(time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": seconds, "counts": rank.counts()}
