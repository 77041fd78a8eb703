"""FramedStage: torch's PipelineStage whose messages are frames; CompressedStage (stage.py) adds the bracket.

Torch asks a stage for the operations that send and receive a micro-batch, and to compute it. Here every operation of
the original is rebuilt around a frame of the same peer, group and order; what arrived is decoded right before it is
used and handed over as torch hands tensors over between stages of one rank. Nothing else of torch is replaced, so any
schedule runs, and a link with `Identity` gives the same bits as the plain stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives.groups import whole
from thinwire.config.wire import Wire
from thinwire.errors import UsageError
from thinwire.pipeline.announce import Announcement
from thinwire.pipeline.dropout import seed_dropout
from thinwire.pipeline.early_receives import Arrival, EarlyReceives, tag
from thinwire.pipeline.lane import Lane, Part
from thinwire.pipeline.message_choice import Predicate
from thinwire.pipeline.overlap import AHEAD, Transport
from thinwire.pipeline.tensor_specs import REFUSED, Spec, in_words, is_refusal, outputs_of
from thinwire.torch_private.pipelining import OpenStage

DROPOUT = ("warn", "seed", "ignore")


@dataclass
class Lanes:
    """The (up to) four ways in and out of a stage; None where there is no neighbour on another rank."""

    forward_in: Lane | None = None
    forward_out: Lane | None = None
    backward_in: Lane | None = None
    backward_out: Lane | None = None

    def all(self) -> list[Lane]:
        return [lane for lane in vars(self).values() if lane is not None]


class FramedStage(OpenStage):
    """What a Pipeline drives; its arguments are CompressedStage's."""

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, *args: Any,
        wire: Wire | Mapping[str, Any] | str, seed: int = 0, dropout: str = "warn", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        if dropout not in DROPOUT:
            raise UsageError(f"dropout = {dropout!r}: allowed are {', '.join(DROPOUT)}")
        self.wire, self.seed, self.dropout = Wire.of(wire), seed, dropout
        given = dict(zip(("input_args", "output_args"), args)) | kwargs
        self.declared = in_words(given.get("input_args")), in_words(given.get("output_args"))
        self.pipeline: Any = None
        self.microbatches: int | None = None
        self.lanes = Lanes()
        self.transports: dict[tuple[str, str], Transport] = {}  # with overlap, in place of torch's operations
        self.predicates: dict[str, Predicate] = {}
        self.announced: Announcement | None = None
        self.coded = True  # False: this step's messages are exact
        self.rows_in: list[Spec] | None = None  # of this step's inputs, where they differ from the last step's
        self.root_inputs: dict[int, list[Spec]] = {}  # by micro-batch, of the last step
        self.early, self.first_tag = EarlyReceives(), 0
        self._arrivals: dict[tuple[str, int], list[Arrival]] = {}
        self._sent: dict[int, list[tuple[Spec, bool]]] = {}
        self._current: int | None = None
        if dropout == "seed":
            seed_dropout(submodule, seed, self.current_ids)

    def current_ids(self) -> tuple[int, ...] | None:
        """The samples of the micro-batch being computed."""
        if self.announced is None or self._current is None or self.microbatches is None:
            return None
        return self.announced.ids_of(self._current, self.microbatches)

    # --- what torch asks for

    def before_shapes(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.root_inputs = {}  # torch looks at the shapes anew

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        if self.announced is None and self.has_backward:
            raise UsageError(
                f"stage {self.stage_index}: schedule.step was called outside its bracket: write "
                "`with stage.step(ids=…): schedule.step(…)` (Pipeline.step for several stages on a rank)"
            )
        if self.announced is not None:
            self.give_up_buffers()
        self._arrivals.clear()
        self._sent.clear()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sends(super().get_fwd_send_ops(fwd_chunk_id), self.lanes.forward_out, "forward", fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self._is_plain(self.lanes.forward_in):
            return super().get_fwd_recv_ops(fwd_chunk_id)
        return self._receives("forward", fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sends(super().get_bwd_send_ops(bwd_chunk_id), self.lanes.backward_out, "backward", bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self._is_plain(self.lanes.backward_in) or not self.has_backward:
            return super().get_bwd_recv_ops(bwd_chunk_id)
        return self._receives("backward", bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *more: Any, **kwargs: Any) -> Any:
        self._current = fwd_chunk_id
        tensors = self._decoded(self.lanes.forward_in, "forward", fwd_chunk_id)
        if tensors is not None:
            self.set_local_fwd_input(tuple(tensors), fwd_chunk_id)
            self._note_activations(tensors, fwd_chunk_id)
        elif self.is_first and args:
            self._check_batch(args, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)
        if not self.is_last:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self._sent[fwd_chunk_id] = [((tuple(o.shape), o.dtype), o.requires_grad) for o in outputs]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._current = bwd_chunk_id
        grads = self._decoded(self.lanes.backward_in, "backward", bwd_chunk_id)
        if grads is not None:
            left = iter(grads)
            places = [next(left) if grad else None for _, grad in self._sent[bwd_chunk_id]]
            self.set_local_bwd_input(tuple(places), bwd_chunk_id)
        if self.pipeline is not None:
            self.pipeline.backward_began()
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # --- frames

    def _sends(self, ops: list[dist.P2POp], lane: Lane | None, way: str, chunk: int) -> list[dist.P2POp]:
        if lane is None or self._is_plain(lane):
            return ops
        part = self._part(way, chunk, self.stage_index)
        tensors, transport = [op.tensor.detach() for op in ops], self.transports.get((way, "out"))
        if transport is not None:
            with transport.on_stream(tensors):
                transport.send([lane.send(part, i, x) for i, x in enumerate(tensors)])
            return []
        frames = [lane.send(part, i, x) for i, x in enumerate(tensors)]
        return [_rebuilt(op, frame, self._tag(way, chunk, i)) for i, (op, frame) in enumerate(zip(ops, frames))]

    def _is_plain(self, lane: Lane | None) -> bool:
        """Whether torch's own operations carry this: there is no lane, or the step has no bracket."""
        return lane is None or self.announced is None

    def _receives(self, way: str, chunk: int) -> list[dist.P2POp]:
        assert self.announced is not None
        ops, shapes = self._incoming(way, chunk)
        transport = self.transports.get((way, "in"))
        if transport is not None:
            known = len(self._sent) if way == "backward" else self.microbatches or 0
            while transport.next < min(chunk + AHEAD, known):
                at = transport.next
                with transport.on_stream():
                    arrivals = self._await(way, at, *self._incoming(way, at))
                    transport.post(at, [arrival.frame for arrival in arrivals])
            return []
        if self.announced.train:
            self.early.note(way, chunk, ops, shapes, self._sizes())
        early = self.early.take(way, chunk, shapes)
        if early is not None:
            self._arrivals[way, chunk] = early
            return []
        return [
            _rebuilt(op, arrival.frame, self._tag(way, chunk, i, received=True))
            for i, (op, arrival) in enumerate(zip(ops, self._await(way, chunk, ops, shapes)))
        ]

    def post_receives(self) -> None:
        """All of the step's, where their sizes are known: before anything is sent."""
        if self.rows_in is None and not self.transports:
            self.early.post(self._sizes(), self._expect, partial(self._tag, received=True))

    def _incoming(self, way: str, chunk: int) -> tuple[list[dist.P2POp], list[tuple[int, ...]]]:
        """Torch's own operations that receive a micro-batch, and the shapes that will come."""
        if way == "backward":
            shapes = [spec[0] for spec, grad in self._sent.get(chunk, ()) if grad]
            return self.would_receive(way, chunk), shapes
        ops, rows, shapes = self.would_receive(way, chunk), self._rows(chunk), []
        for i, op in enumerate(ops):
            row = tuple(op.tensor.shape[1:]) if self.rows_in is None else self.rows_in[i][0][1:]
            shapes.append((op.tensor.shape[0] if rows is None else rows, *row))
        return ops, shapes

    def _await(self, way: str, chunk: int, ops: list[dist.P2POp], shapes: list[tuple[int, ...]]) -> list[Arrival]:
        """Empty frames for what will come, from now on waited for."""
        if len(ops) != len(shapes):
            raise UsageError(
                f"stage {self.stage_index} declares gradients for {len(ops)} outputs, but {len(shapes)} need one"
            )
        self._arrivals[way, chunk] = [
            Arrival(self._expect(way, chunk, i, shape, op.tensor), shape, op.tensor.dtype)
            for i, (op, shape) in enumerate(zip(ops, shapes))
        ]
        return self._arrivals[way, chunk]

    def _expect(self, way: str, chunk: int, index: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The empty frame of a message that will come."""
        lane = self.lanes.forward_in if way == "forward" else self.lanes.backward_in
        assert lane is not None
        return lane.expect(self._part(way, chunk, self._sender(way)), index, shape, like)

    def _sender(self, way: str) -> int:
        """The stage whose messages come in from that direction."""
        return self.stage_index + (-1 if way == "forward" else 1)

    def _tag(self, way: str, chunk: int, index: int, received: bool = False) -> int:
        """0 on CUDA: NCCL matches by order."""
        if torch.device(self.device).type != "cpu":
            return 0
        assert self.announced is not None and self.microbatches is not None
        sender = self._sender(way) if received else self.stage_index
        step = self.first_tag + self.announced.step
        return tag(way, sender, chunk, index, step, self.num_stages, self.microbatches)

    def _decoded(self, lane: Lane | None, way: str, chunk: int) -> list[Tensor] | None:
        arrivals = self._arrivals.pop((way, chunk), None)
        if arrivals is None or lane is None:
            return None
        part, transport = self._part(way, chunk, self._sender(way)), self.transports.get((way, "in"))
        with torch.no_grad(), nullcontext() if transport is None else transport.arrived(chunk):
            for arrival in arrivals:
                if arrival.work is not None:
                    arrival.work.wait()
            if way == "forward" and chunk == 0 and any(is_refusal(a.frame, a.dtype) for a in arrivals):
                self._refuse(chunk, [(arrival.shape, arrival.dtype) for arrival in arrivals], "")
            tensors = [lane.recv(part, i, a.frame, a.shape, a.dtype) for i, a in enumerate(arrivals)]
        return tensors if transport is None else transport.deliver(tensors)

    def _part(self, way: str, chunk: int, sender: int) -> Part:
        assert self.announced is not None and self.microbatches is not None
        coded = self.coded and self.predicates[way](sender, chunk)
        return Part(chunk, self.announced.ids_of(chunk, self.microbatches), coded)

    def _sizes(self) -> list[int] | None:
        return self.announced.sizes(self.microbatches) if self.announced and self.microbatches else None

    def _rows(self, chunk: int) -> int | None:
        sizes = self._sizes()
        return None if sizes is None else sizes[chunk]

    def _check_batch(self, args: Any, chunk: int) -> None:
        """The first stage sees the batch: what was announced of it must be true before anything is sent."""
        if self.announced is None:
            return
        specs: list[Spec] = [(tuple(a.shape), a.dtype) for a in args if isinstance(a, Tensor)]
        rows, said, before = self._rows(chunk), self.announced.shape, self.root_inputs.get(chunk)
        wrong, expected = "", list(specs)
        for i, (shape, dtype) in enumerate(specs):
            told = said or (before[i][0] if before else shape)
            expected[i] = (told if rows is None else (rows, *told[1:])), dtype
            if rows is not None and shape[0] != rows:
                wrong = wrong or f"micro-batch {chunk} has {shape[0]} rows, but {rows} were announced for it"
            elif shape != expected[i][0]:
                wrong = wrong or f"micro-batch {chunk} is {shape}, unlike {told} before: give step(shape=x.shape)"
        if wrong:
            self._refuse(chunk, expected, wrong)
        self.root_inputs[chunk] = specs

    def _refuse(self, chunk: int, inputs: list[Spec], wrong: str) -> None:
        """Raise what is wrong with the batch, on every rank: `inputs` are what this stage would have got, as announced;
        `wrong` counts on the first stage. In later micro-batches others may wait for more than one message of this
        rank: then it alone raises, as it does where frames travel beside the computation, or on a card."""
        lane, s, place = self.lanes.forward_out, self.stage_index, self.pipeline.handshake.place
        if chunk or self.transports or torch.device(self.device).type != "cpu":
            raise UsageError(wrong)
        if lane is not None and place[s + 1] not in [place[i] for i in range(s + 1)]:
            outputs = outputs_of(self.submod, inputs, self.device)
            if not any(dtype.is_floating_point for _, dtype in outputs):  # they go as they are, without a frame
                raise UsageError(wrong or "the batch is not as it was announced: the first stage's rank says how")
            peer = dist.get_process_group_ranks(whole(self.group))[place[s + 1]]
            for i, (shape, dtype) in enumerate(outputs):
                frame = lane.expect(self._part("forward", chunk, s), i, shape, torch.empty(0, dtype=dtype))
                dist.send(frame.fill_(REFUSED), peer, self.group_towards(s + 1), self._tag("forward", chunk, i))
        self.pipeline.complain(wrong)

    def _note_activations(self, tensors: list[Tensor], chunk: int) -> None:
        lane = self.lanes.backward_out
        if lane is not None and lane.trial is not None and self.has_backward:
            for i, tensor in enumerate(t for t in tensors if t.is_floating_point()):
                lane.trial.note_activation(chunk, i, tensor)


def _rebuilt(op: dist.P2POp, payload: Tensor, tag: int) -> dist.P2POp:
    return dist.P2POp(op.op, payload, op.peer, op.group, tag)
