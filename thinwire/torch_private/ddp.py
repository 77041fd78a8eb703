"""DistributedDataParallel: the communication hook a model has already."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from thinwire.torch_private.versions import require

require("compress_ddp", DistributedDataParallel, "_comm_hooks", "parameters_to_ignore", "register_comm_hook")


def hook_state(model: DistributedDataParallel) -> tuple[bool, object]:
    """(Is there a communication hook?, the state it was registered with)."""
    hooks = model._comm_hooks  # (hook, state), one at most
    return (True, hooks[0][1]) if hooks else (False, None)
