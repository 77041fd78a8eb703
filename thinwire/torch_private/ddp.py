"""DistributedDataParallel: the communication hook a model has already."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from thinwire.torch_private.versions import require

require("compress_ddp", DistributedDataParallel, "_comm_hooks", "parameters_to_ignore", "register_comm_hook")


class _Hooks(list[tuple[object, object]]):
    """A model's communication hooks, of which its copies have none: neither deepcopy nor pickle follows them."""

    def __reduce__(self) -> tuple[type[list[object]], tuple[()]]:
        return list, ()


def leave_hooks_behind(model: DistributedDataParallel) -> None:
    """Copies of the model, by deepcopy, pickle or torch.save, are without its hooks: they are plain DDP models."""
    model._comm_hooks = _Hooks(model._comm_hooks)  # type: ignore[assignment]


def hook_state(model: DistributedDataParallel) -> tuple[bool, object]:
    """(Is there a communication hook?, the state it was registered with)."""
    hooks = model._comm_hooks  # (hook, state), one at most
    return (True, hooks[0][1]) if hooks else (False, None)
