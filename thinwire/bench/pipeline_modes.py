"""The contestants of `thinwire bench pipeline`, and how many bytes each should send."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import Cast, Centered, LowRank, Quantize, Rotated
from thinwire.codecs.base import Codec
from thinwire.codecs.frame import BYTES, bitmap_bytes
from thinwire.config.wire import Link, Wire
from thinwire.memory import Delta, ErrorFeedback, Memory


@dataclass(frozen=True)
class Mode:
    """`wire` None: torch's own PipelineStage, fp32. `bits` of a warm message each way, scales left out."""

    wire: Wire | None
    bits: tuple[float, float]
    schedule: str = ""  # "": the one asked for
    ablation: bool = False

    @property
    def per_sample(self) -> bool:
        """Whether activations are remembered by sample, so that a first visit costs more."""
        memory = self.wire and self.wire.forward and self.wire.forward.memory
        return isinstance(memory, Memory) and memory.cold_start


def _aq(bits: int, cold: Codec | None, gate: bool = True) -> Link:
    return Link(Quantize(bits), Delta(cold=cold, gate=gate))


def _published(forward: int, backward: int, store: str = "fp32") -> Wire:
    """AQ-SGD's algorithm: all codes of the grid, no gate, first visits in full; mirrors in the dtype `store`."""
    memory = Delta(store=store, gate=False)
    return Wire(Link(Quantize(forward, scale="full"), memory), Link(Quantize(backward, scale="full")))


def _direct(forward: Codec, backward: Codec) -> Wire:
    return Wire(forward=Link(forward), backward=Link(backward))


OURS = "ours 3/3"  # the links of preset max
_OURS = Wire(forward=_aq(3, Quantize(8)), backward=Link(Quantize(3)))

MODES: dict[str, Mode] = {
    "fp32": Mode(None, (32, 32)),
    "fp32, our stage": Mode(Wire(), (32, 32)),  # as sent, but both directions at once (early_receives.py); so is bf16
    "bf16": Mode(_direct(Cast("bf16"), Cast("bf16")), (16, 16)),
    "fp32, GPipe": Mode(None, (32, 32), "GPipe"),
    "bf16, GPipe": Mode(_direct(Cast("bf16"), Cast("bf16")), (16, 16), "GPipe"),
    "int8": Mode(_direct(Quantize(8), Quantize(8)), (8, 8)),
    "direct 4/8": Mode(_direct(Quantize(4), Quantize(8)), (4, 8)),
    "direct 3/6": Mode(_direct(Quantize(3), Quantize(6)), (3, 6)),
    "rotated 4/4": Mode(_direct(Rotated(Quantize(4)), Rotated(Quantize(4))), (4, 4)),
    "AQ 4/8": Mode(_published(4, 8), (4, 8)),
    "AQ 3/6": Mode(_published(3, 6), (3, 6)),
    OURS: Mode(_OURS, (3, 3)),
    f"{OURS}, GPipe": Mode(_OURS, (3, 3), "GPipe"),
    "AQ 2/4": Mode(_published(2, 4), (2, 4), ablation=True),
    "AQ 2/4, three levels": Mode(
        Wire(Link(Quantize(2), Delta("fp32", gate=False)), Link(Quantize(4))), (2, 4), ablation=True
    ),
    "AQ 2/4, least squares": Mode(
        Wire(Link(Quantize(2, scale="mse"), Delta("fp32", gate=False)), Link(Quantize(4, scale="mse"))), (2, 4),
        ablation=True,
    ),
    **{f"AQ 4/8, {z} bit mirrors": Mode(_published(4, 8, f"int{z}"), (4, 8), ablation=True) for z in (8, 4, 2)},
    "no delta": Mode(_direct(Quantize(3), Quantize(3)), (3, 3), ablation=True),
    "no gate": Mode(Wire(forward=_aq(3, Quantize(8), gate=False), backward=_OURS.backward), (3, 3), ablation=True),
    "cold rotated 4": Mode(Wire(forward=_aq(3, Rotated(Quantize(4))), backward=_OURS.backward), (3, 3), ablation=True),
    "cold full": Mode(Wire(forward=_aq(3, None), backward=_OURS.backward), (3, 3), ablation=True),
    "backward 4 bits": Mode(Wire(forward=_OURS.forward, backward=Link(Quantize(4))), (3, 4), ablation=True),
    "least squares": Mode(
        Wire(forward=_OURS.forward, backward=Link(Quantize(3, scale="mse"))), (3, 3), ablation=True
    ),
    "lazy error": Mode(
        Wire(forward=_OURS.forward, backward=Link(Quantize(3), ErrorFeedback())), (3, 3), ablation=True
    ),
    "lazy by trial": Mode(Wire(forward=_OURS.forward, backward=Link(Quantize(3), "auto")), (3, 3), ablation=True),
    "centered": Mode(Wire(forward=_OURS.forward, backward=Link(Centered(Quantize(3)))), (3, 3), ablation=True),
    "low rank 16": Mode(Wire(forward=_OURS.forward, backward=Link(LowRank(16))), (3, 6), ablation=True),
    "low rank 16, lazy": Mode(
        Wire(forward=_OURS.forward, backward=Link(LowRank(16), ErrorFeedback())), (3, 6), ablation=True
    ),
    "low rank 16, trial": Mode(
        Wire(forward=_OURS.forward, backward=Link(LowRank(16), "auto")), (3, 6), ablation=True
    ),
    "low rank 16, centered": Mode(
        Wire(forward=_OURS.forward, backward=Link(Centered(LowRank(16)))), (3, 6), ablation=True
    ),
    "epilogue": Mode(
        Wire(forward=_OURS.forward, backward=Link(Quantize(3), when="epilogue")), (3, 3), ablation=True
    ),
    "critical": Mode(
        Wire(forward=_OURS.forward, backward=Link(Quantize(3), when="critical")), (3, 3), ablation=True
    ),
}  # fmt: skip


def predicted_bytes(mode: Mode, rows: int, length: int, width: int, warm: bool) -> tuple[int, int]:
    """(forward, backward) bytes of one micro-batch's frames over one boundary; every message compressed.

    `mode`: how. `rows`, `length`, `width`: of the micro-batch's activations. `warm`: its samples are remembered."""
    shape = (rows, length, width)
    if mode.wire is None:
        raw = 4 * rows * length * width
        return raw, raw
    forward, backward = (_frame(link, shape, warm) for link in (mode.wire.forward, mode.wire.backward))
    return forward, backward


def _frame(link: Link | None, shape: tuple[int, ...], warm: bool) -> int:
    if link is None:
        return BYTES + torch.Size(shape).numel() * 4
    if not isinstance(link.memory, Memory) or not link.memory.cold_start:
        return BYTES + link.codec.nbytes(shape, torch.float32)
    head = BYTES + bitmap_bytes(shape[0])
    if warm:
        return head + link.codec.nbytes_onto(shape, torch.float32, link.memory.gate)
    full = 4 * torch.Size(shape).numel()
    return head + (full if link.memory.cold is None else link.memory.cold.nbytes(shape, torch.float32))
