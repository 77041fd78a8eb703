"""Shapes and dtypes of what enters and leaves the stages, also for batches of another shape than those before.

torch looks at shapes in the first step and keeps them. Where a later batch has rows of another shape, the first stage
announces it. Then every stage in turn computes, on zeros, what it would put out, and broadcasts its shapes. That is
done once per shape of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.distributed.values import broadcast_json

Shape = tuple[int, ...]
Spec = tuple[Shape, torch.dtype]  # of one tensor


def outputs_of(module: nn.Module, inputs: Sequence[Spec], device: torch.device) -> list[Spec]:
    """What leaves a stage: its module is run on zeros, without touching its buffers or the random generators.

    module: the stage's. inputs: what would enter it. device: the stage's.
    """
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in inputs]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        out = torch.func.functional_call(module, buffers, tuple(zeros))
    tensors = out if isinstance(out, (tuple, list)) else (out,)
    return [(tuple(x.shape), x.dtype) for x in tensors]


def in_words(declared: Tensor | tuple[Tensor, ...] | None) -> tuple[str, ...] | None:
    """Shapes and dtypes of the example tensors that a stage was declared with, as texts."""
    if declared is None:
        return None
    tensors = (declared,) if isinstance(declared, Tensor) else declared
    return tuple(f"{tuple(t.shape)} {t.dtype}" for t in tensors)


def _spec(shape: Sequence[int], kind: str) -> Spec:
    """A shape and a dtype, as another rank names them."""
    dtype = getattr(torch, str(kind), None)
    if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise RuntimeError(f"another rank announces a tensor of type {kind!r:.40} and shape {shape!r:.40}")
    return tuple(shape), dtype


class Shapes:
    """Inputs of every stage, by the shape of a row of the batch.

    modules: this rank's, by stage.
    rank_of: stage → rank in the group, of all stages.
    group: the ranks of the pipeline.
    device: this rank's.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], rank_of: Mapping[int, int], group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.modules = modules
        self.rank_of = rank_of
        self.group = group
        self.device = device
        self.known: dict[Shape, list[list[Spec]]] = {}
        self.last: Shape | None = None  # the row of the last batch whose shape was announced
        self.repeated = True  # is this step's row that of the last?
        self._varied = False  # has any step's row been another than the one before it?

    def changed(self, shape: Shape, first: bool, dtypes: Sequence[torch.dtype]) -> list[list[Spec]] | None:
        """The inputs of every stage in this step; None while all rows are as torch saw them first. All ranks call it
        together.

        Up to 2.14 torch's buffers have the shape of the last step, since 2.15 that of the first: once a row differs,
        torch is not asked any more. shape: of the batch, as announced. first: torch has seen no batch yet. dtypes: of
        the batch's tensors, on the first stage's rank.
        """
        row = shape[1:]
        self.repeated = first or row == self.last
        self._varied = self._varied or not self.repeated
        self.last = row
        if not self._varied:
            return None
        if row not in self.known:
            self.known[row] = self._infer(row, dtypes)
        return self.known[row]

    def _infer(self, row: Shape, dtypes: Sequence[torch.dtype]) -> list[list[Spec]]:
        """Per stage the specs of its inputs, for one row: every stage's outputs are the next one's inputs."""
        inputs: list[list[Spec]] = [[((1, *row), dtype) for dtype in dtypes]]
        for stage in range(len(self.rank_of) - 1):
            own = outputs_of(self.modules[stage], inputs[stage], self.device) if stage in self.modules else []
            said = [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in own]
            inputs.append([_spec(*one) for one in broadcast_json(said, self.rank_of[stage], self.group)])
        return inputs
