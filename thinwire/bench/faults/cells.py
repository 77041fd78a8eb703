"""The matrix: every fault, what it is done to, and where it strikes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from thinwire.bench.faults.injury import DAY, Injury

DDP, FSDP, PIPELINE, TRAIN = RUNS = ("DDP", "FSDP", "pipeline", "train")
FOR_GOOD = float("inf")
STEPS = range(3, 6)  # before which an injury strikes: samples have come twice, and there is a checkpoint
RANKS = range(4)
FILES = "file: "  # begins the name of a fault that is damage to a file

# Of a pipeline of four stages, and of two of two (rank = 2 · replica + stage): who sends what, who is told what.
SENDS_FORWARD = {PIPELINE: (0, 1, 2), TRAIN: (0, 2)}
SENDS_BACKWARD = {PIPELINE: (1, 2, 3), TRAIN: (1, 3)}
IS_TOLD = {PIPELINE: (1, 2, 3), TRAIN: (1, 3)}


@dataclass(frozen=True)
class Fault:
    """name: in the table. kind: of the injury (injury.py); "" where it is none. runs: what it is done to; the others
    stay empty. seconds: of a freeze (infinity: longer than any patience) or a clock's jump. cable: for how many seconds
    it is pulled. first: before the ranks meet, not in a step. ranks: where it can strike, if not everywhere. quick: to
    what the short form does it.
    """

    name: str
    kind: str
    runs: tuple[str, ...] = RUNS
    seconds: float = 0.0
    cable: float = 0.0
    first: bool = False
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    quick: tuple[str, ...] = ()

    def injury(self, run: str, patience: float, random: Random) -> Injury:
        """Where and how it strikes, drawn by `random`. run: to what. patience: what "longer than any" is more than."""
        seconds = 1.5 * patience + 5 if self.seconds == FOR_GOOD else self.seconds
        rank = random.choice(self.ranks.get(run, tuple(RANKS)))
        step = 0 if self.first else random.choice(STEPS)
        return Injury(self.kind, rank, step, seconds, random.randrange(8))


FAULTS = (
    Fault("kill -9 of a rank", "kill", quick=(DDP, PIPELINE)),
    Fault("frozen for 3 s", "freeze", seconds=3, quick=(PIPELINE,)),
    Fault("frozen for longer than the patience", "freeze", seconds=FOR_GOOD),
    Fault("cable pulled for 1 s", "cable", cable=1, quick=(DDP,)),
    Fault("cable pulled for 10 s", "cable", cable=10),
    Fault("cable pulled for good", "cable", cable=FOR_GOOD),
    Fault("a bit in an activation's frame", "flip forward", (PIPELINE, TRAIN), ranks=SENDS_FORWARD, quick=(PIPELINE,)),
    Fault("a bit in a gradient's frame", "flip backward", (PIPELINE, TRAIN), ranks=SENDS_BACKWARD, quick=(PIPELINE,)),
    Fault("a bit in an announcement", "flip announcement", (PIPELINE, TRAIN), ranks=IS_TOLD, quick=(PIPELINE,)),
    Fault("a bit in a message between replicas", "flip gradients", (DDP, FSDP, TRAIN), quick=(DDP,)),
    Fault("disk full: checkpoint", "full checkpoint", (TRAIN,)),
    Fault("disk full: metrics", "full metrics", (TRAIN,), ranks={TRAIN: (0,)}),
    Fault("disk full: store of samples", "full store", (PIPELINE, TRAIN), quick=(PIPELINE,)),
    Fault("file: checkpoint data", "", (TRAIN,)),
    Fault("file: checkpoint .metadata", "", (TRAIN,)),
    Fault("file: checksums of a checkpoint", "", (TRAIN,)),
    Fault("file: every checkpoint", "", (TRAIN,)),
    Fault("file: metrics.jsonl, a line cut", "", (TRAIN,)),
    Fault("file: metrics.jsonl, a binary line", "", (TRAIN,)),
    Fault("file: split.json", "", (TRAIN,)),
    Fault("file: run.toml", "", (TRAIN,), quick=(TRAIN,)),
    Fault("two launches into one folder", "", (TRAIN,)),
    Fault("clock a day ahead", "clock", seconds=DAY, quick=(DDP,)),
    Fault("clock a day back", "clock", seconds=-DAY),
    Fault("no descriptors at the start", "descriptors", first=True),
    Fault("no descriptors in a step", "descriptors"),
    Fault("no memory in a step", "memory", quick=(DDP, PIPELINE)),
)


@dataclass(frozen=True)
class Cell:
    """A fault, what it is done to, and the how-manieth time."""

    fault: Fault
    run: str
    turn: int = 0

    @property
    def name(self) -> str:
        """As --only looks for it."""
        return f"{self.fault.name}, {self.run}"


def chosen(only: str, quick: bool, repeat: int) -> list[Cell]:
    """The cells in turn: those whose name has all of the words in a part of `only` (parts: by commas; "": all), of the
    short form where `quick`, each `repeat` times."""
    parts = [part.lower().split() for part in only.split(",")]
    found = []
    for fault in FAULTS:
        for run in fault.quick if quick else fault.runs:
            name = f"{fault.name}, {run}".lower()
            if any(all(word in name for word in words) for words in parts):
                found += [Cell(fault, run, turn) for turn in range(repeat)]
    return found
