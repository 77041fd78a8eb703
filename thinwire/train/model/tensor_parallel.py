"""Tensor parallelism inside a site, by torch's own `parallelize_module`: which rank holds and sends which slice.

Attention heads, the MLP's width and the vocabulary (embedding and head) are split into `tp` slices; norms are whole on
every rank. Hidden states are whole inside a stage. Over a pipeline boundary each rank sends its own slice, and the
receiving site gathers them. So a slow link carries every value once, and every rank compresses a slice of its own.
Logits are gathered inside the site and every rank computes the same loss, exactly, so that nothing needs to be
synchronised afterwards. Traffic between the ranks of a site is not compressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from thinwire.errors import UsageError
from thinwire.train.config.families import TENSOR_PARALLEL
from thinwire.train.model.stage import Stage

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def check(config: Any, lora: bool, tp: int) -> None:
    """UsageError where the model of this (transformers) configuration cannot be split into `tp` slices.

    lora: whether adapters are trained."""
    if tp == 1:
        return
    if config.model_type not in TENSOR_PARALLEL:
        raise UsageError(f"[mesh] tp = {tp}: not for {config.model_type}; allowed are {', '.join(TENSOR_PARALLEL)}")
    if lora:
        raise UsageError(f"[mesh] tp = {tp}: adapters are not cut; [model.lora] allows tp = 1")
    sizes = {
        "attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads,
        "tokens of the vocabulary": config.vocab_size, "values of the MLP's width": config.intermediate_size,
        "values of the hidden width": config.hidden_size,
    }  # fmt: skip
    for what, size in sizes.items():
        if size % tp:
            raise UsageError(f"[mesh] tp = {tp}: must divide the {size} {what}")


def parallelize(stage: Stage, mesh: DeviceMesh) -> Stage:
    """Split the stage's weights, which are the same on every rank, over the ranks of `mesh`."""
    root = stage.family.root
    plan: dict[str, ParallelStyle] = {}
    for layer in stage.layers:
        for names, style in ((COLUMNS, ColwiseParallel), (ROWS, RowwiseParallel)):
            plan |= {f"{root}.{stage.family.layers}.{layer}.{name}": style() for name in names}
    if stage.is_first:
        plan[f"{root}.{stage.family.embeddings[0]}"] = RowwiseParallel(input_layouts=Replicate())
    if stage.is_last:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(stage, mesh, plan, src_data_rank=None)
    return stage


class Slice(nn.Parameter):
    """This rank's slice of a DTensor parameter as an ordinary one, over the same memory and the same gradient.

    Reduction, clipping, optimisers and checkpoints work on slices as on any other parameter.
    """

    whole: DTensor

    @staticmethod
    def of(whole: DTensor) -> Slice:
        with torch.no_grad():
            made = Slice(whole.to_local(), requires_grad=whole.requires_grad)
        made.whole = whole
        return made

    @property
    def dim_cut(self) -> int | None:
        """The dimension along which the parameter is split; None: every rank has all of it."""
        (placement,) = self.whole.placements
        return placement.dim if isinstance(placement, Cut) else None

    @property
    def grad(self) -> Tensor | None:
        """Torch may hold the whole gradient (the embedding's): it is split once, when it is first read."""
        with torch.no_grad():
            gradient: Any = self.whole.grad
            if gradient is None:
                return None
            if gradient.placements != self.whole.placements:
                gradient = gradient.redistribute(placements=self.whole.placements)
                self.whole.grad = gradient
            local: Tensor = gradient.to_local()
            return local

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            mesh, placements = self.whole.device_mesh, self.whole.placements
            value = DTensor.from_local(value, mesh, placements, run_check=False)
        self.whole.grad = value


def local_parameters(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Every parameter as an ordinary one: this rank's slice of those that are split."""
    return {name: Slice.of(p) if isinstance(p, DTensor) else p for name, p in named.items()}


def dim_cut(parameter: nn.Parameter) -> int | None:
    """The dimension along which a parameter is split; None: all tensor-parallel ranks hold the same values."""
    return parameter.dim_cut if isinstance(parameter, Slice) else None


class Sliced(nn.Module):
    """A stage whose boundary tensors are slices of the hidden width: its input is gathered, its output is split.

    first, last: whether it is the first stage, whose input is token ids, or the last, whose output is logits.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, first: bool, last: bool) -> None:
        super().__init__()
        self.stage = stage
        self.mesh = mesh
        self.first = first
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.first else self._placed(x, Cut(-1), Replicate())
        out = self.stage(hidden)
        return out if self.last else self._placed(out, Replicate(), Cut(-1))

    def _placed(self, x: Tensor, have: Placement, want: Placement) -> Tensor:
        """Its gradient is placed the other way: split where this gathers, gathered where this splits. A copy, since
        torch's zero-bubble schedules cannot detach a view."""
        made: Tensor = DTensor.from_local(x, self.mesh, [have], run_check=False).redistribute(placements=[want])
        return made.to_local().clone()  # type: ignore[attr-defined]


# --- checkpoints: a slice is stored under a name that says which, so that any number of ranks can read it


def saved_name(name: str, value: Tensor, parameter: nn.Parameter, place: tuple[int, int]) -> str:
    """The name under which `value`, a parameter or a moment of it, is stored. What is not split is stored once.

    place: (this rank's number, of how many)."""
    shard, size = place
    return f"{name}|{shard}of{size}" if dim_cut(parameter) is not None and value.dim() > 0 else name


def plain_name(saved: str) -> str:
    """The parameter or moment that a stored name belongs to."""
    return saved.partition("|")[0]


def concerns(saved: str, place: tuple[int, int]) -> bool:
    """Does this rank read what is stored under this name: whole, its own slice, or one of another number of slices?"""
    _, _, part = saved.partition("|")
    shard, _, size = part.partition("of")
    return not part or int(size) != place[1] or int(shard) == place[0]


def read_back(name: str, state: Mapping[str, Tensor], parameter: nn.Parameter, place: tuple[int, int]) -> Tensor | None:
    """This rank's slice of a stored tensor, however many slices it was stored in; None where it is not there."""
    shard, size = place
    if f"{name}|{shard}of{size}" in state:
        return state[f"{name}|{shard}of{size}"]
    parts = [state[saved] for saved in sorted(state, key=_number) if plain_name(saved) == name]
    if not parts:
        return None
    cut = dim_cut(parameter)
    if len(parts) > 1:
        whole = [n * size if d == cut else n for d, n in enumerate(parameter.shape)]
        parts = [torch.cat(parts, next(d for d, n in enumerate(whole) if parts[0].shape[d] != n))]
    return parts[0] if cut is None or not parts[0].dim() else parts[0].chunk(size, cut)[shard].contiguous()


def _number(saved: str) -> int:
    return int(saved.partition("|")[2].partition("of")[0] or 0)
