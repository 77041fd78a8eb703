"""A codec and a memory of your own: in a channel, on the theory bench, under DDP and along a pipeline.

    python examples/own_method.py                          # the codec's promises, a channel, a convex problem
    torchrun --nproc-per-node 2 examples/own_method.py     # DDP, then a pipeline of two stages

docs/extend.md explains the two classes.

Its data are scikit-learn's digits: pip install scikit-learn, or thinwire's extra `theory`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

HEADER = 16  # bytes of two float64
HELD_OUT, BATCH = 360, 64


@dataclass(frozen=True)
class MinMax(tw.Codec):
    """Each value as a byte: one of `steps` steps between the tensor's least and largest, rounded without bias."""

    steps: int = 255

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return HEADER + math.prod(shape)

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        low, high = torch.aminmax(x.double())
        noise = tw.kernels.random.uniform(x.numel(), seed, x.device)
        place = (x.double().flatten() - low) / ((high - low) / self.steps).clamp(min=1e-300)
        codes = (place + noise).floor().clamp(0, self.steps).to(torch.uint8)
        return torch.cat((torch.stack((low, high)).view(torch.uint8), codes))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        low, high = wire[:HEADER].clone().view(torch.float64)
        return (low + wire[HEADER:].double() * ((high - low) / self.steps)).to(dtype)

    def omega(self, numel: int) -> float:
        """Rounding has variance ≤ step²/4, and a step is at most 2‖x‖/steps: ω = n/steps²."""
        return numel / self.steps**2


@dataclass(frozen=True)
class Capped(tw.Memory):
    """Error feedback with a bound: what is left over is never longer than `limit` times what was to be sent."""

    limit: float = 1.0

    def residual(self, x: Tensor, e: Tensor | None, b: Tensor | None, own: Tensor) -> Tensor:
        left = super().residual(x, e, b, own)
        length, most = (t.norm(dim=-1, keepdim=True) for t in (left, x))
        return left * (self.limit * most / length.clamp(min=1e-30)).clamp(max=1.0)


def capped(limit: float) -> Capped:
    return Capped("Capped", eta=1.0, beta=1.0, limit=limit)


def promises(codec: tw.Codec) -> None:
    """What thinwire relies on: the size is known, an unbiased codec's mean is x and its error within ω."""
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    message = codec.encode(x, seed=1)
    assert message.numel() == codec.nbytes(x.shape, x.dtype)
    assert torch.equal(message, codec.encode(x, seed=1))  # nothing but x and the seed decides
    draws = torch.stack([codec.decode(codec.encode(x, s), x.shape, x.dtype, s) for s in range(400)])
    error = (draws - x).square().sum((1, 2)).mean() / x.square().sum()
    assert error <= codec.omega(x.numel())
    assert (draws.mean(0) - x).norm() < 0.1 * (draws[0] - x).norm()
    print(f"{codec}: {message.numel()} bytes for {x.numel()} values, error {error:.1e} of ω = {codec.omega(2000):.1e}")


def channel() -> None:
    """Both ends of one wire: a sample's second visit is sent as a change, which has a smaller range."""
    here, there = (tw.Channel(MinMax(), tw.memory.Delta()) for _ in range(2))
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for visit in range(3):
        y = there.recv("sample 7", here.send("sample 7", x), x.shape, x.dtype)
        print(f"channel, visit {visit}: off by {(y - x).abs().max():.1e}")
        x = x + 0.01


def convex() -> None:
    """DIANA learns shifts, so it gets to the solution with any unbiased codec; without a memory it stalls before."""
    from thinwire.theory import methods, problems
    from thinwire.theory.simulate import simulate

    problem = problems.ridge([0], samples=40, dim=10)
    for method in (methods.dcgd(MinMax(7)), methods.diana(MinMax(7))):
        trace = simulate(method, problem, [0], stop=1e-14, limit=400)
        print(f"{method.name}: relative error {trace.error[-1][0]:.1e} after {trace.steps[-1]} steps")


def data() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]


def ddp(rank: int, size: int) -> None:
    x, y = data()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    wire = tw.Wire(gradient=(tw.collectives.TwoHop(MinMax()), capped(1.0)))  # yours
    handle = tw.parallel.compress_ddp(model, wire)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(150):
        ids = torch.randint(HELD_OUT, len(x), (BATCH,), generator=torch.Generator().manual_seed(step * size + rank))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        optimiser.step()
    right = (model.module(x[:HELD_OUT]).argmax(1) == y[:HELD_OUT]).float().mean()
    if rank == 0:
        print(f"DDP: held-out accuracy {right:.3f}, {handle.sent / 1e6:.1f} MB sent by a rank")


def pipeline(rank: int, size: int) -> None:
    x, y = data()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU()) if rank == 0 else nn.Linear(256, 10)
    wire = tw.Wire(forward=(MinMax(), tw.memory.Delta()), backward=(MinMax(), capped(0.5)))  # yours
    stage = tw.parallel.CompressedStage(module, rank, size, torch.device("cpu"), wire=wire)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.cross_entropy)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    for _ in range(4):
        for ids in torch.arange(HELD_OUT, len(x)).split(BATCH)[:-1]:
            optimiser.zero_grad()
            with stage.step(ids=ids.tolist()):
                schedule.step(*([x[ids]] if rank == 0 else []), **({"target": y[ids]} if rank else {}))
            optimiser.step()
    with stage.step(train=False, shape=x[:HELD_OUT].shape):
        answer = schedule.eval(*([x[:HELD_OUT]] if rank == 0 else []), **({"target": y[:HELD_OUT]} if rank else {}))
    if answer is not None:
        right = (answer.argmax(1) == y[:HELD_OUT]).float().mean()
        ratio = stage.pipeline.stats.raw_bytes / stage.pipeline.stats.backward_bytes
        print(f"pipeline: held-out accuracy {right:.3f}, backward {ratio:.1f} times smaller")


def main() -> None:
    if "RANK" not in os.environ:
        promises(MinMax())
        channel()
        convex()
        return
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp(rank, size)
    pipeline(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
