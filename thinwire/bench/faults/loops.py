"""What runs while something goes wrong: four small trainings, as a user would write them.

Each is a program for `watched`. It ends with status 0 and a result, or, as any program that catches its errors, with
one line and another status. The result has the loss and a digest of the weights after every step.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.faults.injury import Trouble
from thinwire.bench.faults.watched import RESULT
from thinwire.config.wire import Wire
from thinwire.data_parallel.ddp import compress_ddp
from thinwire.data_parallel.fsdp import compress_fsdp
from thinwire.errors import RunFailed, UsageError
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage
from thinwire.train.config.sections import TrainConfig
from thinwire.train.local import FAILED, MISTAKE, PREFIX
from thinwire.train.loop import Trainer
from thinwire.train.rank import train_rank

STEPS, BATCH, WIDTH, CLASSES = 6, 16, 64, 10
SAMPLES = 2 * BATCH  # so that every sample comes three times
MICROBATCHES = 4
STORE = "store"  # of a pipeline's mirrors, in the folder that the rank stands in
WIRE: dict[str, Any] = {
    "preset": "max",
    "forward": {
        "codec": "quantize",
        "bits": 3,
        "memory": {"memory": "delta", "cold": {"codec": "quantize", "bits": 8}, "path": STORE},
    },
}
Step = Callable[[int], tuple[float, bool]]  # the step's number → its loss, and whether it was kept


def ddp(trouble: Trouble, patience: float) -> int:
    """Data parallel over all ranks."""
    return _told(lambda: _ddp(trouble, patience))


def fsdp(trouble: Trouble, patience: float) -> int:
    """Two sites of half of the ranks each: sharded inside, averaged between."""
    return _told(lambda: _fsdp(trouble, patience))


def pipeline(trouble: Trouble, patience: float) -> int:
    """One stage per rank; mirrors of samples in a file."""
    return _told(lambda: _pipeline(trouble, patience))


def train(trouble: Trouble, patience: float, config: TrainConfig, resume: bool) -> int:
    """The 3D trainer, as `thinwire train --local` starts its ranks."""
    step = Trainer._train_step

    def struck(trainer: Trainer) -> None:
        trouble.at(trainer.step + 1)
        step(trainer)

    mock.patch.object(Trainer, "_train_step", struck).start()
    try:
        trouble.at(0)
        return train_rank(config, resume, patience=patience, show=False)
    except (UsageError, RunFailed) as error:
        print(f"{PREFIX}{error}", file=sys.stderr)
        return MISTAKE if isinstance(error, UsageError) else FAILED


def _told(program: Callable[[], None]) -> int:
    """What a careful program does: one line for whatever went wrong."""
    try:
        program()
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        print(f"{PREFIX}{type(error).__name__}: {said[0]}", file=sys.stderr, flush=True)
        return FAILED
    return 0


def _join(trouble: Trouble, patience: float) -> tuple[int, int]:
    trouble.at(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    return dist.get_rank(), dist.get_world_size()


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _repeat(step: Step, parameters: Iterable[Tensor]) -> None:
    """All steps; the result on a line."""
    kept = list(parameters)
    losses: list[str] = []
    weights: list[str] = []
    dropped: list[int] = []
    for number in range(1, STEPS + 1):
        loss, done = step(number)
        losses.append(loss.hex())
        weights.append(_digest(kept))
        if not done:
            dropped.append(number)
    print(RESULT + json.dumps({"losses": losses, "weights": weights, "dropped": dropped}), flush=True)
    dist.destroy_process_group()


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for one in tensors:
        local = one.to_local() if hasattr(one, "to_local") else one
        found.update(local.detach().numpy().tobytes())
    return found.hexdigest()


def _ddp(trouble: Trouble, patience: float) -> None:
    rank, size = _join(trouble, patience)
    x, y = _data()
    model = DistributedDataParallel(_model())
    handle = compress_ddp(model, "max")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> tuple[float, bool]:
        mine = torch.arange(rank, BATCH, size) + BATCH * (number % 2)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        trouble.at(number)
        loss.backward()
        if not handle.skipped:
            optimizer.step()
        return loss.item(), not handle.skipped

    _repeat(step, model.parameters())
    handle.close()


def _fsdp(trouble: Trouble, patience: float) -> None:
    rank, size = _join(trouble, patience)
    x, y = _data()
    half, limit = size // 2, timedelta(seconds=patience)
    sites = [dist.new_group(list(ranks), timeout=limit) for ranks in (range(half), range(half, size))]
    pairs = [dist.new_group([one, one + half], timeout=limit) for one in range(half)]
    shards = DeviceMesh.from_group(sites[rank // half], "cpu", mesh_dim_names=("shard",))
    replicas = DeviceMesh.from_group(pairs[rank % half], "cpu", mesh_dim_names=("replica",))
    model = _model()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=shards)
    handle = compress_fsdp(model, "max", replicas=replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> tuple[float, bool]:
        mine = torch.arange(rank, BATCH, size) + BATCH * (number % 2)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        trouble.at(number)
        loss.backward()
        if not handle.skipped:
            optimizer.step()
        return loss.item(), not handle.skipped

    _repeat(step, model.parameters())
    handle.close()


def _pipeline(trouble: Trouble, patience: float) -> None:
    rank, size = _join(trouble, patience)
    x, y = _data()
    first, last = rank == 0, rank == size - 1
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES if last else WIDTH))
    stage = CompressedStage(module, rank, size, torch.device("cpu"), wire=Wire.of(WIRE))
    pipe = Pipeline([stage])
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> tuple[float, bool]:
        ids = torch.arange(BATCH) + BATCH * (number % 2)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        trouble.at(number)
        with pipe.step(ids=ids.tolist()):
            target: dict[str, Any] = {"target": y[ids], "losses": losses} if last else {}
            schedule.step(*([x[ids]] if first else []), **target)
        if not pipe.skipped:
            optimizer.step()
        return float(torch.stack(losses).mean()) if last else 0.0, not pipe.skipped

    _repeat(step, module.parameters())
