"""torch.distributed.pipelining: PipelineStage with what thinwire needs of its inside under names of our own.

Two ways of torch to keep the buffers that a stage receives in:
- 2.11 to 2.14: one buffer per micro-batch and tensor, made once. Operations may be asked for as often as one likes.
- 2.15: a buffer is made when its operation is asked for, and belongs to the operation until the computation takes it.
  To ask again, or to hand over a tensor, is an error while it is there. Frames arrive elsewhere, so here the buffers of
  torch's operations are given up at once, by torch's own way for receives that were never started.

Two ways of torch to decide which outputs of a stage get a gradient back:
- 2.11: all of them, whether or not anything before them trains.
- since then: those that require one, which neighbours tell each other with the shapes.

Results of forward (`fwd_cache` up to 2.14, `_forward_chunk_states` since 2.15) are not looked at: what a stage puts out
is what `forward_one_chunk` returns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from thinwire.errors import UsageError
from thinwire.torch_private.versions import require

PIPELINE = "CompressedStage"
require(
    PIPELINE, PipelineStage, "_prepare_forward_infra", "clear_runtime_states", "forward_one_chunk", "get_fwd_recv_ops",
    "backward_one_chunk", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops", "set_local_fwd_input",
    "set_local_bwd_input", "backward_weight_one_chunk",
)  # fmt: skip
require(PIPELINE, PipelineScheduleSingle, "_stage", "_num_stages")
BUFFERS_ON_DEMAND = hasattr(PipelineStage, "_clear_unlaunched_fwd_recv")  # since 2.15
if BUFFERS_ON_DEMAND:
    require(PIPELINE, PipelineStage, "_clear_unlaunched_bwd_recv", "_get_p2p_group", "args_recv_info", "grad_recv_info")
GRADIENT_FOR_ALL = not hasattr(PipelineStage, "_forward_metadata_inference")  # in 2.11: for every output


class OpenStage(PipelineStage):
    """PipelineStage, with its private parts under public names."""

    def before_shapes(self, microbatches: int) -> None:
        """Called before torch looks at the shapes of a batch of so many micro-batches; for subclasses."""

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.before_shapes(num_microbatches)
        return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets every neighbour with a message, in V-shaped schedules itself too, which Gloo cannot."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def knows_shapes(self) -> bool:
        """Is the shape of this batch agreed on already? Then it need not be the first one's; for subclasses."""
        return False

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Only in torch 2.11, which wants every batch in the shape of the first."""
        inside: Any = super()
        if not self.knows_shapes():
            try:
                inside._validate_fwd_input(args, kwargs)
            except RuntimeError as error:
                raise UsageError(
                    f"{error}: outside a bracket torch {torch.__version__} takes batches in the shape of the first "
                    "only: write `with stage.step(train=False, shape=x.shape): schedule.eval(x)`"
                ) from error

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Likewise."""
        inside: Any = super()
        if not self.knows_shapes():
            inside._validate_fwd_outputs(outputs)

    def would_receive(self, way: str, chunk: int) -> list[dist.P2POp]:
        """The operations with which torch would receive a micro-batch (way: "forward" or "backward"). They must not be
        started: their tensors only tell type, device and shape."""
        if way == "forward":
            ops = PipelineStage.get_fwd_recv_ops(self, chunk)
        else:
            ops = PipelineStage.get_bwd_recv_ops(self, chunk)
        if ops:
            self._give_up_buffers(way, chunk)
        return ops

    def give_up_buffers(self) -> None:
        """Forget what a step that failed has handed over and nobody has taken."""
        if BUFFERS_ON_DEMAND:
            for way, infos in (("forward", self.args_recv_info), ("backward", self.grad_recv_info)):
                for chunk in infos:
                    self._give_up_buffers(way, chunk)

    def group_towards(self, stage: int) -> dist.ProcessGroup | None:
        """The group over which torch sends to that neighbouring stage."""
        inside: Any = self  # the names of 2.15, which other versions do not have
        return inside._get_p2p_group(self.stage_index, stage) if BUFFERS_ON_DEMAND else self.group

    def _give_up_buffers(self, way: str, chunk: int) -> None:
        inside: Any = self
        if not BUFFERS_ON_DEMAND:
            return
        if way == "forward":
            inside._clear_unlaunched_fwd_recv(chunk)
        else:
            inside._clear_unlaunched_bwd_recv(chunk)


def only_stage(schedule: object) -> PipelineStage | None:
    """The stage of a schedule for one stage per rank (GPipe, 1F1B); None for others."""
    stage = schedule._stage if isinstance(schedule, PipelineScheduleSingle) else None
    return stage if isinstance(stage, PipelineStage) else None


def pretend_stages(schedule: PipelineScheduleSingle, stages: int) -> None:
    """Let the schedule begin as many micro-batches before its first backward as if there were so many stages."""
    schedule._num_stages = stages
