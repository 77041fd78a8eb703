"""The model as the planner needs it: which parameters are on which stage, how large a boundary tensor is, how long
computing takes. It is a transformer of the GPT kind with 12h² + 13h parameters per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.errors import UsageError
from thinwire.planner.step import Work

Shape = tuple[int, ...]
UNIT_BYTES = 25_000_000  # gradients are exchanged in units of whole parameters of about this size


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer: layers, width, tokens per sequence, vocabulary (0: no embedding)."""

    layers: int
    hidden: int
    seq: int
    vocab: int = 0
    tied: bool = True  # input and output embedding are one parameter, on the first and the last stage
    parameters: int = 0  # of the layers, where they are not 12h² + 13h each
    crossing: int = 0  # values of a hidden state that cross a boundary; 0: all of them

    def share(self, stages: int) -> list[int]:
        """Layers on each stage, as even as can be, the earlier stages taking the remainder."""
        if stages > self.layers:
            raise UsageError(f"{stages} stages (pp · virtual): more than the model's {self.layers} layers")
        return [self.layers // stages + (s < self.layers % stages) for s in range(stages)]

    def layer(self) -> list[Shape]:
        """Parameters of a layer in declaration order: norm, qkv, projection, norm, up, down."""
        h = self.hidden
        if self.parameters:
            return [(self.parameters // (self.layers * h), h)]
        attention = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,)]
        return [*attention, (h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]

    def stage(self, stage: int, stages: int) -> list[Shape]:
        """A stage's parameters; the tied embedding is left out, it is synchronised on its own."""
        shapes = self.layer() * self.share(stages)[stage]
        embedding: list[Shape] = [(self.vocab, self.hidden)] if self.vocab and not self.tied else []
        if stage == 0:
            shapes = [*embedding, *([(self.seq, self.hidden)] if self.vocab else []), *shapes]
        if stage == stages - 1:
            shapes = [*shapes, (self.hidden,), (self.hidden,), *embedding]
        return shapes

    def embedding_values(self) -> int:
        return self.vocab * self.hidden if self.tied else 0

    def rows(self, tokens: int) -> int:
        """How many rows of the embedding so many tokens use, as text does: 4.74·tokens^0.66, fitted to 1,148 for 4,096
        tokens of WikiText-2 and 7,157 for 65,536 under a vocabulary of 49,152."""
        return min(self.vocab, round(4.74 * tokens**0.66))

    def flops(self, stages: int, sequences: int) -> list[float]:
        """Floating-point operations of each stage's forward of `sequences`: 2 per weight and token, for attention
        4·seq·h per token and layer, and those of the logits."""
        tokens = sequences * self.seq
        weights = sum(values(shape) for shape in self.layer() if len(shape) > 1)
        per_layer = tokens * (2.0 * weights + 4.0 * self.seq * self.hidden)
        totals = [per_layer * count for count in self.share(stages)]
        totals[-1] += 2.0 * tokens * self.hidden * self.vocab
        return totals


def values(shape: Shape) -> int:
    """How many values a tensor of this shape has."""
    count = 1
    for size in shape:
        count *= size
    return count


def units(shapes: list[Shape]) -> Iterator[list[Shape]]:
    """Gradients in units of whole parameters, each closed once it reaches UNIT_BYTES of fp32."""
    unit: list[Shape] = []
    size = 0
    for shape in shapes:
        unit.append(shape)
        size += 4 * values(shape)
        if size >= UNIT_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def work_from_flops(model: Model, stages: int, sequences: int, rate: float) -> Work:
    """Seconds per stage for a micro-batch of `sequences`, at `rate` floating-point operations per second.

    Backward takes twice as long as forward, half of it for the input and half for the weights."""
    seconds = tuple(flops / rate for flops in model.flops(stages, sequences))
    return Work(seconds, seconds, seconds)
