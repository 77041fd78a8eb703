"""Local steps under loops that wrap a model in DDP: plain ones, Accelerate's, Hugging Face's Trainer and Lightning's.

    local = tw.parallel.local_steps(ddp_model, "sparseloco", inner=optimizer)

DDP's gradients stay local, its buffers are not broadcast any more, and every step of the optimiser counts as an inner
step. `local_steps(trainer, …)` does the same once the trainer has wrapped its model, and keeps the state beside the
trainer's checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.collectives.messages import gather
from thinwire.config.local import Local
from thinwire.config.wire import WireLike
from thinwire.errors import UsageError
from thinwire.local_steps.local_steps import LocalSteps
from thinwire.torch_private.ddp import hook_state, leave_hooks_behind

NAME = "thinwire_local_steps"  # of the state in Lightning's checkpoints


def _stay_local(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook: a bucket's gradients are this site's own."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP refuses hooks whose annotations are text
_stay_local.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def _attach(model: nn.Module, inner: Optimizer, wire: Local | WireLike, settings: dict[str, Any]) -> LocalSteps:
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"local_steps wants a model wrapped in DDP, not {type(model).__name__}: use LocalSteps itself")
    inner = getattr(inner, "optimizer", inner)  # Accelerate and Lightning wrap it
    if hook_state(model)[0]:
        raise UsageError("local_steps: this model has a communication hook already, and DDP takes one: wrap it anew")
    model.register_comm_hook(None, _stay_local)
    leave_hooks_behind(model)
    model.broadcast_buffers = False
    settings.setdefault("group", model.process_group)
    local = LocalSteps(model.module.named_parameters(), inner, wire, **settings)

    def count(*_: object) -> None:
        local.step()

    inner.register_step_post_hook(count)
    return local


class Attachment:
    """What `local_steps` returns for a trainer: `local` is there from the start of training.

    wire, settings: as LocalSteps takes them.
    """

    def __init__(self, wire: Local | WireLike, settings: dict[str, Any]) -> None:
        self.wire = Local.of(wire)
        self.settings = settings
        self.local: LocalSteps | None = None

    def attach(self, model: nn.Module, inner: Optimizer) -> None:
        """Once the trainer has wrapped its model; one that is not wrapped (a single process) trains as it would."""
        if self.local is None and isinstance(model, DistributedDataParallel):
            self.local = _attach(model, inner, self.wire, self.settings)


class _HuggingFace(Attachment):
    """The state lies next to the checkpoint's weights in the trainer's own folder, in one file per site."""

    trainer: Any

    def on_train_begin(self, args: Any, state: Any, control: object, **_: object) -> None:
        self.attach(self.trainer.model_wrapped, self.trainer.optimizer)
        if self.local is not None and state.global_step:
            self.local.load_state_dict(self._saved(self._file(args, state)))

    def on_save(self, args: Any, state: Any, control: object, **_: object) -> None:
        if self.local is not None:
            torch.save(self.local.state_dict(), self._file(args, state))

    def on_train_end(self, args: Any, state: Any, control: object, **_: object) -> None:
        """All sites end with the anchor."""
        if self.local is not None:
            self.local.finish()

    def _saved(self, own: Path) -> dict[str, Tensor]:
        """This site's file, or, where another number of sites wrote the checkpoint, all of theirs."""
        files = [own] if own.exists() else sorted(own.parent.glob("thinwire-local-*of*.pt"))
        if not files:
            raise UsageError(f"local_steps: {own} is missing: this site cannot go on with its own weights")
        found: dict[str, Tensor] = {}
        for file in files:
            found |= torch.load(file, map_location="cpu", weights_only=True)
        return found

    def _file(self, args: Any, state: Any) -> Path:
        assert self.local is not None
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        return folder / f"thinwire-local-{self.local.rank}of{self.local.site.sites}.pt"


class _Lightning(Attachment):
    """The state of all sites is part of the trainer's checkpoint, which rank 0 writes."""

    saved: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        self.attach(trainer.strategy.model, trainer.optimizers[0])
        if self.local is None or not trainer.global_step:
            return
        if self.saved is None:
            raise UsageError("local_steps: the checkpoint has no state of local steps: sites cannot go on with theirs")
        self.local.load_state_dict(self.saved)
        self.saved = None

    def on_save_checkpoint(self, trainer: object, pl_module: object, checkpoint: dict[str, Any]) -> None:
        """On all ranks."""
        if self.local is not None:
            checkpoint[NAME] = _of_all_sites(self.local)

    def on_load_checkpoint(self, trainer: object, pl_module: object, checkpoint: dict[str, Any]) -> None:
        """Before training begins, and with it `local`."""
        self.saved = checkpoint.get(NAME)

    def on_train_end(self, trainer: Any, pl_module: object) -> None:
        """All sites end with the anchor."""
        if self.local is not None:
            self.local.finish()


def _of_all_sites(local: LocalSteps) -> dict[str, Tensor]:
    """Every site's state_dict, in host memory, on all ranks."""
    mine, out = local.state_dict(), {}
    group, home = local.site.exchange.flag_group, local.fragments[0].home
    for name in sorted(mine):
        _, _, rest = name.partition("/")
        for rank, value in enumerate(gather(mine[name].to(home), group)):
            out[f"rank{rank}of{local.site.sites}/{rest}"] = value.cpu()
    return out


def local_steps(
    model: Any, wire: Local | WireLike = "sparseloco", *, inner: Optimizer | None = None, **settings: Any
) -> Any:
    """Make the ranks of a DDP model, or of a trainer that uses DDP, sites that average seldom. On all ranks.

        local = local_steps(ddp_model, "sparseloco", inner=optimizer)   # plain loops; Accelerate, after prepare()
        local_steps(trainer, "sparseloco")                              # Hugging Face's, Lightning's, before training

    model: a DDP model, transformers.Trainer, or lightning.pytorch.Trainer. wire, settings: as LocalSteps takes them.
    inner: the optimiser, of a DDP model; each of its steps is an inner step.

    LocalSteps for a model; for a trainer an object whose `local` it will be. A GradScaler, which leaves steps out on
    one site only, cannot be used: train in bfloat16. UsageError where it is something else, or attached already.
    """
    if isinstance(model, nn.Module):
        if inner is None:
            raise UsageError("local_steps(model, …): inner, the optimiser, is missing")
        return _attach(model, inner, wire, settings)
    roots = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    if "transformers" in roots:
        from transformers import TrainerCallback

        callback = type("ThinwireLocal", (_HuggingFace, TrainerCallback), {})(wire, settings)
        callback.trainer = model
        model.add_callback(callback)
    elif "lightning" in roots:
        from lightning.pytorch import Callback

        callback = type("ThinwireLocal", (_Lightning, Callback), {})(wire, settings)
        model.callbacks.append(callback)
    else:
        raise UsageError(f"local_steps wants a DDP model, or a Hugging Face or Lightning trainer, not {type(model)}")
    return callback
