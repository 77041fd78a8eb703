"""What the FSDP cases share: a mesh of replicas and shards, a model, and its gradients and weights."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import check_ranks_agree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire as tw
from thinwire.collectives import LowRank, OkTopk, Quantized
from thinwire.data_parallel.fsdp import CompressedFSDP
from thinwire.parallel import compress_fsdp

MESH: list[DeviceMesh] = []  # (replica, shard), made by `make_mesh`
SPARSE = tw.Wire(gradient=tw.Reduction(OkTopk(0.1, tau=4, tau_prime=3), exact_dims=0, unit_mb=0.0012))
WIRES = {
    "oktopk": SPARSE,
    "low rank": tw.Wire(gradient=LowRank(2)),
    "quantized": tw.Wire(gradient=Quantized(4)),
    "diana": tw.Wire(gradient=(tw.collectives.Gather(tw.codecs.Quantize(4, rounding="stochastic")), tw.memory.Diana())),
}


class Net(nn.Module):
    """Rows that two shards cannot share equally (3 and 1), two branches, a vector whose gradient a case can choose."""

    def __init__(self, **frozen: bool) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first = nn.Linear(12, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.empty(1))
        self.extra = nn.Parameter(torch.empty(4))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g) * 0.3
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor, branches: str = "lr", extra: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + sum((getattr(self, {"l": "left", "r": "right"}[b])(h) for b in branches), torch.zeros_like(h))
        shift = (self.extra * (torch.ones(4) if extra is None else extra)).sum()
        return self.last(self.norm(h)) * self.scale, shift


def make_mesh(sites: int, shards: int) -> None:
    """As many replicas as sites."""
    MESH[:] = [init_device_mesh("cpu", (sites, shards), mesh_dim_names=("replica", "shard"))]


def sharded(
    dims: str = "shard", reshard: bool = True, policy: MixedPrecisionPolicy | None = None, **frozen: bool
) -> nn.Module:
    """The model under fully_shard: over the site, or, as plain HSDP, over both dimensions."""
    model, mesh = Net(**frozen), MESH[0] if dims == "both" else MESH[0]["shard"]
    how = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy or MixedPrecisionPolicy()}
    for part in (model.first, model.left, model.right):
        fully_shard(part, **how)
    return fully_shard(model, **how)


def compressed(
    wire: object = "off", model: nn.Module | None = None, **settings: object
) -> tuple[nn.Module, CompressedFSDP]:
    model = model or sharded()
    return model, compress_fsdp(model, wire, replicas=MESH[0]["replica"], **settings)


def batch(step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def loss_of(model: nn.Module, step: int, **how: object) -> Tensor:
    out, shift = model(batch(step), **how)
    return (out.float() ** 2).mean() + shift * 0.1


def backward(model: nn.Module, step: int, **how: object) -> None:
    model.zero_grad()
    loss_of(model, step, **how).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.to_local().clone() for n, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.to_local().detach().clone() for n, p in model.named_parameters()}


def check_replicas_agree(what: str, values: dict[str, Tensor | None]) -> None:
    """Check that the replicas of this shard hold the same bits."""
    check_ranks_agree(what, values, MESH[0]["replica"].get_group())


def train(model: nn.Module, steps: range, momentum: float = 0.5) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    for step in steps:
        backward(model, step)
        optimizer.step()
    return model


def run_example(*words: str) -> str:
    """The script as __main__; what it printed."""
    example = Path(__file__).parent.parent / "examples" / "fsdp_compressed.py"
    torch.set_num_threads(1)
    with mock.patch.object(sys, "argv", [example.name, *words]), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()
