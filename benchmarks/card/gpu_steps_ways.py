"""The models and the ways of training that gpu_steps.py times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.codecs import Cast
from thinwire.collectives import LowRank, OkTopk, TwoHop
from thinwire.data_parallel import exchange, gradient_pass
from thinwire.data_parallel.ddp import compress_ddp
from thinwire.data_parallel.fsdp import compress_fsdp
from thinwire.data_parallel.gradient_units import make_units
from thinwire.memory import ErrorFeedback


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    rows: int  # sequences per rank and step
    causal: bool


MODELS = {
    "gpt2": Size(12, 768, 12, 50257, 512, 8, True),
    "bert": Size(12, 768, 12, 30522, 128, 32, False),
    "small": Size(2, 64, 2, 500, 32, 2, True),
}
WAYS = (
    "max", "torch DDP bf16 hook", "bf16", "torch DDP", "torch DDP PowerSGD 4", "low rank 4, one unit", "torch HSDP",
    "fsdp max", "safe", "oktopk 1 % coded", "paper-oktopk", "off", "auto, no limit", "auto, 10 Gbit/s", "fsdp bf16",
    "fsdp low rank 4, one unit", "fsdp off", "fsdp safe", "low rank 4", "fsdp oktopk 1 % coded", "fsdp paper-oktopk",
    "max, as before", "bf16, as before", "max, one at a time", "bf16, one at a time",
    "max, four in flight", "oktopk 1 % coded, one unit",
)  # fmt: skip
CODED = OkTopk(0.01, values="int8", indices="coded")
WIRES: dict[str, Any] = {  # ways that are no presets
    "low rank 4": tw.Wire(gradient=tw.Reduction(LowRank(4), ErrorFeedback())),
    "low rank 4, one unit": tw.Wire(gradient=tw.Reduction(LowRank(4), ErrorFeedback(), unit_mb=1e6)),
    "bf16, with a residual": tw.Wire(gradient=tw.Reduction(TwoHop(Cast("bf16")), ErrorFeedback())),
    "oktopk 1 % coded": tw.Wire(gradient=tw.Reduction(CODED, ErrorFeedback())),
    "oktopk 1 % coded, one unit": tw.Wire(gradient=tw.Reduction(CODED, ErrorFeedback(), unit_mb=1e6)),
}


IN_FLIGHT = gradient_pass.MOST_IN_FLIGHT["cuda"]


def exact_first(*arguments: Any) -> list:
    """Units as they were cut before: what is exact was sent first, though backward completes it nearly last."""
    return sorted(make_units(*arguments), key=lambda unit: unit.exact)


class Model(nn.Module):
    """Tokens to logits; the embedding is tied to the head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w, self.causal = size.width, size.causal
        self.tokens, self.places = nn.Embedding(size.vocabulary, w), nn.Embedding(size.length, w)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(w, size.heads, 4 * w, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(w)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)  # torch's own is 50 times larger, and a tied head then is certain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device) if self.causal else None
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=self.causal)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def prepare(way: str, size: Size, device: torch.device) -> tuple[nn.Module, Callable, Any]:
    """(the model, a context in which its backward communicates nothing, our handle if there is one)."""
    torch.manual_seed(0)
    with device:
        model = Model(size)
    if "HSDP" in way or way.startswith("fsdp"):
        return _sharded(way, model, device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "torch DDP bf16 hook":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif way == "torch DDP PowerSGD 4":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != "torch DDP":
        wire, _, how = way.partition(", ")
        before = how == "as before"
        gradient_pass.MOST_IN_FLIGHT["cuda"] = (
            0 if before or how == "one at a time" else 4 if how == "four in flight" else IN_FLIGHT
        )
        exchange.make_units = exact_first if before else make_units
        name = "bf16, with a residual" if way == "bf16, as before" else way if way in WIRES else wire
        return ddp, ddp.no_sync, compress_ddp(ddp, WIRES.get(name, name))
    return ddp, ddp.no_sync, None


def _sharded(way: str, model: nn.Module, device: torch.device) -> tuple[nn.Module, Callable, Any]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh if way == "torch HSDP" else mesh["shard"])
    wire = way.removeprefix("fsdp ")
    handle = None if way == "torch HSDP" else compress_fsdp(model, WIRES.get(wire, wire), replicas=mesh["replica"])

    @contextmanager
    def silent():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return model, silent, handle
