"""FramedStage: torch's PipelineStage whose messages are frames; CompressedStage (stage.py) adds `step`.

Torch asks a stage for the operations that send and receive a micro-batch, and to compute it. Here every operation of
the original is rebuilt around a frame, with the same peer, group and order. What arrived is decoded right before it is
used, and handed over as torch hands tensors over between stages of one rank. Nothing else of torch is replaced, so any
schedule runs, and a link with `Identity` gives the same bits as the plain stage.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import explicit
from thinwire.errors import UsageError
from thinwire.pipeline.early_receives import Receive, empty_receives, is_refusal, start_receive
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.overlap import AHEAD, Transport
from thinwire.pipeline.planned_stage import PlannedStage
from thinwire.pipeline.shapes import Spec, outputs_of
from thinwire.pipeline.step_plan import StepPlan
from thinwire.torch_private.pipelining import GRADIENT_FOR_ALL


class Progress(Protocol):
    """Who is told how far the stages of a rank are."""

    def computation_begins(self) -> None:
        """Of a micro-batch, forward or backward, on any of the stages."""

    def stage_ends(self, stage: int) -> None:
        """All weight gradients of the stage are there."""


class FramedStage(PlannedStage):
    """A stage that sends and receives frames; its arguments are CompressedStage's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receives: dict[tuple[str, int], list[Receive]] = {}
        self._sent: dict[int, list[tuple[Spec, bool]]] = {}  # outputs by micro-batch, and whether they get gradients
        self._tokens: dict[int, Tensor] = {}  # by micro-batch, where the wire has token means
        self._weighed = 0  # micro-batches of the step whose weight gradients are there
        self.progress: Progress | None = None  # told how far this stage is

    # --- what torch asks for

    def knows_shapes(self) -> bool:
        return self.plan is not None

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.announced is None and self.has_backward:
            raise UsageError(
                f"stage {self.stage_index}: schedule.step was called outside its bracket: write "
                "`with stage.step(ids=…): schedule.step(…)` (Pipeline.step for several stages on a rank)"
            )
        if self.announced is not None:
            self.give_up_buffers()
        self._receives.clear()
        self._sent.clear()
        self._tokens.clear()
        self._weighed = 0

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._framed_sends(super().get_fwd_send_ops(fwd_chunk_id), "forward", fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        lane = self.lanes.incoming.get("forward")
        if lane is None or self.plan is None:
            return super().get_fwd_recv_ops(fwd_chunk_id)
        return self._framed_receives(lane, self.plan, "forward", fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._framed_sends(super().get_bwd_send_ops(bwd_chunk_id), "backward", bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        lane = self.lanes.incoming.get("backward")
        if lane is None or self.plan is None or not self.has_backward:
            return super().get_bwd_recv_ops(bwd_chunk_id)
        return self._framed_receives(lane, self.plan, "backward", bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *more: Any, **kwargs: Any) -> Any:
        self._current = fwd_chunk_id
        given = more[0] if more else kwargs.get("kwargs")
        if self.told and given and "tokens" in given:
            self._tokens[fwd_chunk_id] = given["tokens"]
        self._begin()
        tensors = self._decoded("forward", fwd_chunk_id)
        if tensors is not None:
            self.set_local_fwd_input(tuple(tensors), fwd_chunk_id)
            gradient_lane = self.lanes.outgoing.get("backward")
            if gradient_lane is not None and gradient_lane.trial is not None and self.has_backward:
                gradient_lane.trial.note_activations(fwd_chunk_id, tensors)
        elif self.is_first and args:
            self._check_batch(args, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)
        if not self.is_last:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            specs = [((tuple(o.shape), o.dtype), GRADIENT_FOR_ALL or o.requires_grad) for o in outputs]
            self._sent[fwd_chunk_id] = specs
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._current = bwd_chunk_id
        self._begin()
        gradients = self._decoded("backward", bwd_chunk_id)
        if gradients is not None:
            get_one = [gets_one for _, gets_one in self._sent[bwd_chunk_id]]
            sender = self.lanes.outgoing.get("forward")
            if sender is not None:
                gradients = sender.correct(bwd_chunk_id, gradients, [i for i, one in enumerate(get_one) if one])
            remaining = iter(gradients)
            per_output = [next(remaining) if gets_one else None for gets_one in get_one]
            self.set_local_bwd_input(tuple(per_output), bwd_chunk_id)
        if self.owner is not None:
            self.owner.backward_began()
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if kwargs.get("full_backward", True):
            self._weigh()
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._weigh()
        return result

    def _begin(self) -> None:
        if self.progress is not None:
            self.progress.computation_begins()

    def _weigh(self) -> None:
        """The weight gradients of one more micro-batch are there."""
        self._weighed += 1
        if self.progress is not None and self._weighed == self.microbatches:
            self.progress.stage_ends(self.stage_index)

    # --- frames

    def _framed_sends(self, ops: list[dist.P2POp], direction: str, chunk: int) -> list[dist.P2POp]:
        """Torch's operations that send a micro-batch, with frames for tensors; none where a transport sends them."""
        lane = self.lanes.outgoing.get(direction)
        if lane is None or self.plan is None:
            return ops
        message = self.plan.outgoing[direction][chunk].told(self._tokens.get(chunk), direction)
        tensors = [op.tensor.detach() for op in ops]
        transport = self.transports.get((direction, "out"))
        if transport is not None:
            with transport.on_stream(tensors):
                transport.send([lane.send(message, i, x) for i, x in enumerate(tensors)])
            return []
        rebuilt = []
        for i, (op, x) in enumerate(zip(ops, tensors)):
            tag = message.tag(i)
            if self.flows is not None:
                frame = lane.send(message, i, x)
                peer = dist.get_group_rank(self.flows.groups[0], op.peer)
                self.sends.append((frame, self.flows.isend(frame, peer, tag)))
                continue
            rebuilt.append(dist.P2POp(op.op, lane.send(message, i, x), op.peer, op.group, tag))
        return rebuilt

    def _framed_receives(self, lane: Lane, plan: StepPlan, direction: str, chunk: int) -> list[dist.P2POp]:
        """Torch's operations that receive a micro-batch, with frames for tensors; none where that is under way."""
        ops, shapes = self._incoming(direction, chunk)
        transport = self.transports.get((direction, "in"))
        if transport is not None:
            self._post_ahead(transport, lane, direction, chunk)
            return []
        if plan.train:
            self.early.note(direction, chunk, ops, shapes, plan.rows)
        early = self.early.take(direction, chunk, shapes)
        if early is not None:
            self._receives[direction, chunk] = early
            return []
        receives = self._expect(lane, direction, chunk, ops, shapes)
        if self.flows is not None:
            for op, receive in zip(ops, receives):
                receive.works = start_receive(receive, op.peer, op.group, self.flows)
            return []
        return [dist.P2POp(op.op, r.frame, op.peer, op.group, r.tag) for op, r in zip(ops, receives)]

    def _post_ahead(self, transport: Transport, lane: Lane, direction: str, chunk: int) -> None:
        """Post the receives of this micro-batch and of the next, as far as their shapes are known."""
        known = len(self._sent) if direction == "backward" else self.microbatches or 0
        while transport.next < min(chunk + AHEAD, known):
            following = transport.next
            with transport.on_stream():
                receives = self._expect(lane, direction, following, *self._incoming(direction, following))
                transport.post(following, [receive.frame for receive in receives])

    def _incoming(self, direction: str, chunk: int) -> tuple[list[dist.P2POp], list[tuple[int, ...]]]:
        """Torch's own operations that would receive a micro-batch, and the shapes that will arrive."""
        ops = self.would_receive(direction, chunk)
        if direction == "backward":
            return ops, [spec[0] for spec, gets_one in self._sent.get(chunk, ()) if gets_one]
        shapes: list[tuple[int, ...]] = []
        for i, op in enumerate(ops):
            rows, *row = op.tensor.shape
            if self.plan is not None and self.plan.rows is not None:
                rows = self.plan.rows[chunk]
            if self.inputs is not None:
                row = list(self.inputs[i][0][1:])
            shapes.append((rows, *row))
        return ops, shapes

    def _expect(
        self, lane: Lane, direction: str, chunk: int, ops: list[dist.P2POp], shapes: list[tuple[int, ...]]
    ) -> list[Receive]:
        """Empty frames for a message, kept until it is decoded."""
        assert self.plan is not None
        if len(ops) != len(shapes):
            raise UsageError(
                f"stage {self.stage_index} declares gradients for {len(ops)} outputs, but {len(shapes)} need one"
            )
        message = self.plan.incoming[direction][chunk]
        receives = empty_receives(lane, message, shapes, [op.tensor for op in ops])
        self._receives[direction, chunk] = receives
        return receives

    def _decoded(self, direction: str, chunk: int) -> list[Tensor] | None:
        """The tensors of a micro-batch that arrived in frames; None where it did not."""
        receives = self._receives.pop((direction, chunk), None)
        if receives is None or self.plan is None:
            return None
        lane = self.lanes.incoming[direction]
        message = self.plan.incoming[direction][chunk].told(self._tokens.get(chunk), direction)
        transport = self.transports.get((direction, "in"))
        with torch.no_grad(), nullcontext() if transport is None else transport.arrived(chunk):
            for receive in receives:
                for work in receive.works:
                    work.wait()
            if direction == "forward" and chunk == 0 and any(is_refusal(r.frame, r.dtype) for r in receives):
                self._refuse(chunk, [(receive.shape, receive.dtype) for receive in receives], "")
            tensors = [lane.recv(message, i, r.frame, r.shape, r.dtype) for i, r in enumerate(receives)]
        return tensors if transport is None else transport.deliver(tensors)

    # --- batches that are not as announced

    def _check_batch(self, args: Any, chunk: int) -> None:
        """On the first stage, before anything is sent: is the batch as it was announced?"""
        if self.announced is None or self.plan is None:
            return
        specs: list[Spec] = [(tuple(x.shape), x.dtype) for x in args if isinstance(x, Tensor)]
        rows = None if self.plan.rows is None else self.plan.rows[chunk]
        before = self.batch_inputs.get(chunk)
        wrong = ""
        expected: list[Spec] = []
        for i, (shape, dtype) in enumerate(specs):
            known = self.announced.shape or (before[i][0] if before else shape)
            wanted = known if rows is None else (rows, *known[1:])
            expected.append((wanted, dtype))
            if rows is not None and shape[0] != rows:
                wrong = wrong or f"micro-batch {chunk} has {shape[0]} rows, but {rows} were announced for it"
            elif shape != wanted:
                wrong = wrong or f"micro-batch {chunk} is {shape}, unlike {known} before: give step(shape=x.shape)"
        if wrong:
            self._refuse(chunk, expected, wrong)
        self.batch_inputs[chunk] = specs

    def _refuse(self, chunk: int, inputs: list[Spec], wrong: str) -> None:
        """Raise on every rank what is wrong with the batch.

        inputs: what this stage would have received, as announced. wrong: what is raised; "" on later stages. In later
        micro-batches other ranks may wait for more than one message of this rank: then it alone raises. So it does
        with overlap, or on a GPU.
        """
        s = self.stage_index
        if chunk or self.transports or torch.device(self.device).type != "cpu":
            raise UsageError(wrong)
        lane = self.lanes.outgoing.get("forward")
        if lane is not None and self.rank_of[s + 1] not in [self.rank_of[i] for i in range(s + 1)]:
            outputs = outputs_of(self.submod, inputs, self.device)
            if not any(dtype.is_floating_point for _, dtype in outputs):  # those are sent without a frame
                raise UsageError(wrong or "the batch is not as it was announced: the first stage's rank says how")
            self._send_refusal(lane, chunk, outputs)
        assert self.owner is not None
        self.owner.raise_on_all_ranks(wrong)

    def _send_refusal(self, lane: Lane, chunk: int, outputs: list[Spec]) -> None:
        """Refuse the batch towards the next stage, in a message of the size that it waits for."""
        assert self.plan is not None
        message = self.plan.outgoing["forward"][chunk]
        following = self.stage_index + 1
        peer = dist.get_process_group_ranks(explicit(self.group))[self.rank_of[following]]
        for i, (shape, dtype) in enumerate(outputs):
            frame = lane.refusal(message, i, shape, torch.empty(0, dtype=dtype))
            if self.flows is not None:
                for work in self.flows.isend(frame, self.rank_of[following], message.tag(i)):
                    work.wait()
            else:
                dist.send(frame, peer, self.group_towards(following), message.tag(i))
