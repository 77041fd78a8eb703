"""Cases of the DDP tests: checkpoints, on as many ranks and on another number of them."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_support import SPARSE, backward, wrap
from rank_cases import Case, check_equal, check_ranks_agree
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.collectives import LowRank, OkTopk, Quantized
from thinwire.parallel import compress_ddp, read_state

WIRES = {
    "oktopk": SPARSE,
    "oktopk coded": tw.Wire(gradient=tw.Reduction(OkTopk(0.1, 4, 3, "int8", "coded"), unit_mb=0.002)),
    "low rank": tw.Wire(gradient=LowRank(2)),
    "quantized": tw.Wire(gradient=Quantized(4)),
    "diana": tw.Wire(gradient=(tw.collectives.Gather(tw.codecs.Quantize(4, rounding="stochastic")), tw.memory.Diana())),
}


def train(model: DDP, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in steps:
        backward(model, step)
        optimizer.step()


def resumed_run_has_the_same_bits(name: str, folder: str) -> None:
    """Six steps at once, or three, a checkpoint, everything new, and three."""
    wire, path = WIRES[name], os.path.join(folder, name.replace(" ", "-"))
    whole, first, second = wrap(), wrap(), wrap()
    compress_ddp(whole, wire)
    train(whole, range(6))
    handle = compress_ddp(first, wire)
    train(first, range(3))
    dcp.save({"model": first.module.state_dict(), "wire": handle.state_dict()}, checkpoint_id=path)
    dcp.load(model := {"model": second.module.state_dict()}, checkpoint_id=path)
    second.module.load_state_dict(model["model"])
    compress_ddp(second, wire).load_state_dict(read_state(path, "wire"))
    train(second, range(3, 6))
    check_equal("resumed", dict(second.module.named_parameters()), dict(whole.module.named_parameters()))
    check_ranks_agree("resumed", second)


def resume_cases(folder: str) -> list[Case]:
    return [functools.partial(resumed_run_has_the_same_bits, name, folder) for name in WIRES]


def mean_residual(folder: str, load: bool) -> Tensor:
    """Mean over ranks of all residuals: after four steps that end in a checkpoint, or as loaded from it."""
    dist.init_process_group("gloo")
    model = wrap()
    handle = compress_ddp(model, SPARSE)
    if load:
        handle.load_state_dict(read_state(folder, "wire"))
    else:
        for step in range(4):
            backward(model, step)
        dcp.save({"wire": handle.state_dict()}, checkpoint_id=folder)
    flat = torch.cat([v.reshape(-1).double() for n, v in sorted(handle.state_dict().items()) if "/e/" in n])
    dist.all_reduce(flat)
    backward(model, 9)  # the loaded state works
    return flat / dist.get_world_size()
