"""The plan of one step on one stage: all that send and receive look up while torch's schedule runs.

Made from the announcement when the step begins (in the first step when torch has given the number of micro-batches).
Per micro-batch it holds the rows, the sample ids, and the message in every direction: compressed or not, and its tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.pipeline.announce import Announcement
from thinwire.pipeline.lane import DIRECTIONS
from thinwire.pipeline.message_choice import TENSORS, Message, Predicate

TAGS = 2**31 - 1
STEPS_APART = 1 << 10  # the fewest steps after which a tag may come again


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands, and how its messages are numbered.

    stage: its index.
    stages: their number in the pipeline.
    microbatches: per step.
    first_tag: the pipeline's own number, since several may share a group; None: messages match by order (NCCL).
    """

    stage: int
    stages: int
    microbatches: int
    first_tag: int | None

    def sender_to(self, direction: str) -> int:
        """The stage whose messages of that direction arrive here."""
        return self.stage - 1 if direction == "forward" else self.stage + 1


@dataclass(frozen=True)
class StepPlan:
    """One step of one stage; lists have one entry per micro-batch, dictionaries one per direction.

    train: False in evaluation.
    rows: None where neither ids nor a shape were announced.
    ids: None for every micro-batch where no ids were announced.
    outgoing, incoming: messages; empty where there is no stage to receive them from.
    """

    train: bool
    rows: list[int] | None
    ids: list[tuple[int, ...] | None]
    outgoing: dict[str, list[Message]]
    incoming: dict[str, list[Message]]


def plan_step(
    announced: Announcement, position: StagePosition, coded: Mapping[str, bool], compress: Mapping[str, Predicate]
) -> StepPlan:
    """The plan of the announced step.

    announced: the step.
    position: the stage's.
    coded: per direction; False: every message of this step is exact.
    compress: per direction, (sending stage, micro-batch) → compress it?
    """
    rows = _rows(announced, position.microbatches)
    ids = _split_ids(announced.ids, rows, position.microbatches)
    outgoing: dict[str, list[Message]] = {}
    incoming: dict[str, list[Message]] = {}
    for direction in DIRECTIONS:
        for sender, messages in ((position.stage, outgoing), (position.sender_to(direction), incoming)):
            messages[direction] = []
            for i in range(position.microbatches if sender in range(position.stages) else 0):
                tag = message_tag(position, announced.step, direction, sender, i)
                messages[direction].append(Message(i, ids[i], coded[direction] and compress[direction](sender, i), tag))
    return StepPlan(announced.train, rows, ids, outgoing, incoming)


def _rows(announced: Announcement, microbatches: int) -> list[int] | None:
    """Rows per micro-batch, as torch.tensor_split cuts the batch."""
    if announced.ids is not None:
        rows = len(announced.ids)
    elif announced.shape:
        rows = announced.shape[0]
    else:
        return None
    quotient, remainder = divmod(rows, microbatches)
    return [quotient + (i < remainder) for i in range(microbatches)]


def _split_ids(ids: tuple[int, ...] | None, rows: list[int] | None, microbatches: int) -> list[tuple[int, ...] | None]:
    if ids is None or rows is None:
        return [None] * microbatches
    out: list[tuple[int, ...] | None] = []
    start = 0
    for count in rows:
        out.append(ids[start : start + count])
        start += count
    return out


def message_tag(position: StagePosition, step: int, direction: str, sender: int, microbatch: int) -> int:
    """The tag of a message's first tensor; no other message has it in this step or in the many before.

    What a failed step has posted cannot be taken back, and must not match a later step's message. 0: there are too
    many messages to number, they match by order.

    position: of any stage of the pipeline. step: its number. direction, sender (a stage), microbatch: the message.
    """
    per_step = position.stages * len(DIRECTIONS) * position.microbatches * TENSORS
    if position.first_tag is None or per_step > TAGS // STEPS_APART:
        return 0
    in_step = ((sender * len(DIRECTIONS) + DIRECTIONS.index(direction)) * position.microbatches + microbatch) * TENSORS
    steps = (TAGS - 1) // per_step
    return 1 + in_step + per_step * ((position.first_tag + step) % steps)
