"""One line for trainers that own the loop and the DDP wrapper: Hugging Face's Trainer and Lightning's.

    compress_trainer(trainer, "max")       # before trainer.train() or trainer.fit(); on all ranks

A callback attaches `compress_ddp` once the trainer has wrapped its model, puts the compression state into the trainer's
own checkpoints, and what was saved into its logs. Neither library is imported unless its trainer is given.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.config.wire import Wire, WireLike
from thinwire.data_parallel.ddp import CompressedDDP, compress_ddp
from thinwire.data_parallel.handle import LossScaler
from thinwire.distributed.values import tensors_on_first
from thinwire.errors import UsageError

log = logging.getLogger("thinwire")


# Of the trainers' classes what is used here; neither library may be imported for its types.


class _TrainingArguments(Protocol):
    output_dir: str | None


class _TrainerState(Protocol):
    global_step: int
    log_history: list[dict[str, float]]


class _Accelerator(Protocol):
    scaler: LossScaler | None


class _HuggingFaceTrainer(Protocol):
    model_wrapped: object
    accelerator: _Accelerator


class _Strategy(Protocol):
    model: object


class _LightningTrainer(Protocol):
    strategy: _Strategy
    precision_plugin: object


class _LightningModule(Protocol):
    def log_dict(self, values: dict[str, float], *, on_step: bool, on_epoch: bool) -> None: ...


class Attachment:
    """What compress_trainer returns: `handle` is there from the start of training; None where nothing is reduced.

    wire: as compress_ddp takes it. settings: its other arguments, by name.
    """

    def __init__(self, wire: WireLike, settings: dict[str, Any]) -> None:
        self.wire = Wire.of(wire)
        self.settings = settings
        self.handle: CompressedDDP | None = None

    def attach(self, model: object, scaler: LossScaler | None) -> None:
        """Compress the wrapped model; one that is not wrapped (a single process) has nothing to reduce."""
        if not isinstance(model, DistributedDataParallel):
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise UsageError(f"compress_trainer wants a trainer that uses DDP, not {type(model).__name__}")
            return
        if self.handle is not None and self.handle.model is model:
            return
        if self.handle is not None:
            self.handle.close()
        self.handle = compress_ddp(model, self.wire, scaler=scaler, **self.settings)


class _HuggingFace(Attachment):
    """State lies next to the checkpoint's weights, in one file per rank."""

    trainer: _HuggingFaceTrainer

    def on_train_begin(self, args: _TrainingArguments, state: _TrainerState, control: object, **_: object) -> None:
        self.attach(self.trainer.model_wrapped, self.trainer.accelerator.scaler)
        if self.handle is not None and state.global_step:
            self._resume(_checkpoint(args, state))

    def on_save(self, args: _TrainingArguments, state: _TrainerState, control: object, **_: object) -> None:
        if self.handle is not None:
            torch.save(self.handle.state_dict(), self._file(_checkpoint(args, state)))

    def on_log(
        self, args: _TrainingArguments, state: _TrainerState, control: object, logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:  # fmt: skip
        """Beside the loss, and in the numbers at the end of training; not beside those of an evaluation."""
        if self.handle is not None and logs is not None and ("loss" in logs or "train_runtime" in logs):
            logs.update(self.handle.summary().metrics())
            if state.log_history:
                state.log_history[-1].update(self.handle.summary().metrics())

    def on_train_end(self, args: _TrainingArguments, state: _TrainerState, control: object, **_: object) -> None:
        if self.handle is not None:
            self.handle.log_summary()

    def _file(self, folder: Path) -> Path:
        assert self.handle is not None
        return folder / f"thinwire-{self.handle.reducer.rank}of{self.handle.reducer.size}.pt"

    def _resume(self, folder: Path) -> None:
        """This rank's file, or, where another number of ranks wrote the checkpoint, all of theirs."""
        assert self.handle is not None
        own = self._file(folder)
        files = [own] if own.exists() else sorted(folder.glob("thinwire-*of*.pt"))
        if not files:
            log.warning("thinwire: no compression state in %s: residuals start empty", folder)
            return
        parts: dict[str, Tensor] = {}
        for file in files:
            parts |= torch.load(file, map_location="cpu", weights_only=True)
        self.handle.load_state_dict(parts)


def _checkpoint(args: _TrainingArguments, state: _TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class _Lightning(Attachment):
    """State lies in the checkpoint's callback section, all ranks' together, since Lightning writes rank 0's file."""

    loaded: dict[str, Tensor] | None = None

    def on_fit_start(self, trainer: _LightningTrainer, pl_module: object) -> None:
        self.attach(trainer.strategy.model, getattr(trainer.precision_plugin, "scaler", None))
        if self.handle is not None and self.loaded:
            self.handle.load_state_dict(self.loaded)

    def on_train_batch_end(self, trainer: _LightningTrainer, pl_module: _LightningModule, *_: object) -> None:
        if self.handle is not None:
            values = {name: float(value) for name, value in self.handle.summary().metrics().items()}
            pl_module.log_dict(values, on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: _LightningTrainer, pl_module: object) -> None:
        if self.handle is not None:
            self.handle.log_summary(logging.getLogger("lightning.pytorch"))

    def state_dict(self) -> dict[str, Tensor]:
        """Called on all ranks; what rank 0 returns is written."""
        if self.handle is None:
            return {}
        parts = tensors_on_first(self.handle.state_dict(), self.handle.model.process_group)
        return {name: value for part in parts for name, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.loaded = state_dict  # the model is wrapped after this


def compress_trainer(trainer: Any, wire: WireLike = "auto", **settings: Any) -> Attachment:
    """Compress the gradients of a Hugging Face or Lightning trainer from its next train() or fit() on, on all ranks.

        attachment = compress_trainer(trainer, "max")
        trainer.train()                               # or trainer.fit(…); attachment.handle is compress_ddp's

    trainer: transformers.Trainer or lightning.pytorch.Trainer, with DDP.
    wire: as compress_ddp takes it.
    settings: compress_ddp's seed and nonfinite; a GradScaler that the trainer uses is found by itself.

    What was saved stands in the trainer's logs, and once at the end: in Lightning's own log, else on the logger
    "thinwire". UsageError where it is another trainer, or one that is compressed already.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(trainer).__mro__}
    if "transformers" in roots:
        from transformers import TrainerCallback

        _check_first(trainer.callback_handler.callbacks)
        callback = type("Thinwire", (_HuggingFace, TrainerCallback), {})(wire, settings)
        callback.trainer = trainer
        trainer.add_callback(callback)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())  # before those that print and record what it adds to the logs
    elif "lightning" in roots:
        from lightning.pytorch import Callback

        _check_first(trainer.callbacks)
        callback = type("Thinwire", (_Lightning, Callback), {})(wire, settings)
        trainer.callbacks.append(callback)
    else:
        raise UsageError(f"compress_trainer wants a Hugging Face or Lightning trainer, not {type(trainer).__name__}")
    return callback


def _check_first(callbacks: list[object]) -> None:
    if any(isinstance(callback, Attachment) for callback in callbacks):
        raise UsageError("compress_trainer: this trainer is compressed already: call it once per trainer")
