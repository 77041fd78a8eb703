"""FSDP2: what was set on a module, the hooks of a parameter, and the end of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from thinwire.torch_private.versions import require

require("compress_fsdp", FSDPModule, "_get_fsdp_state", "set_all_reduce_hook")
require("compress_fsdp", FSDPState, "_fsdp_param_group")
require("compress_fsdp", FSDPParamGroup, "all_reduce_grads", "gradient_divide_factor")
require("compress_fsdp", Tensor, "_post_accumulate_grad_hooks")
require("compress_fsdp", Variable, "_execution_engine")


class Reduction(NamedTuple):
    """How a module's gradients are reduced, as set by set_requires_all_reduce and set_gradient_divide_factor."""

    between_sites: bool
    divide_factor: float | None


def reduction_of(module: FSDPModule) -> Reduction:
    """What was set on an FSDP module that has parameters of its own."""
    group = module._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return Reduction(group.all_reduce_grads, group.gradient_divide_factor)


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether somebody registered a post-accumulate-grad hook on this parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this once the backward that is running has ended, after what was registered before."""
    Variable._execution_engine.queue_callback(callback)
