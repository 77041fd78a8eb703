"""Runs cells one after the other on one network, and keeps what undisturbed runs came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from thinwire.bench.faults import loops
from thinwire.bench.faults.cells import DDP, FILES, FSDP, PIPELINE, TRAIN, Cell
from thinwire.bench.faults.damaged import broken_configuration, resumed_after, two_launches
from thinwire.bench.faults.launch import RANKS, Launcher
from thinwire.bench.faults.trainer import Outcome, injured_run, whole_run
from thinwire.bench.faults.verdict import NO_WORD, Result, Verdict, bad_ending, compared, result_of
from thinwire.errors import RunFailed

LOOPS: dict[str, Callable[..., int]] = {DDP: loops.ddp, FSDP: loops.fsdp, PIPELINE: loops.pipeline}
REPLICAS: dict[str, Sequence[Sequence[int]]] = {
    DDP: [range(RANKS)],
    FSDP: [(0, RANKS // 2), (1, 1 + RANKS // 2)],
    PIPELINE: [],
}


class Matrix:
    """launcher: of the ranks. folder: for the files of all runs. seed: of where faults strike."""

    def __init__(self, launcher: Launcher, folder: Path, seed: int) -> None:
        self.launcher = launcher
        self.folder = folder
        self.seed = seed
        self._results: dict[str, list[Result]] = {}
        self._outcome: Outcome | None = None

    def judge(self, cell: Cell) -> Verdict:
        """Run a cell: how it ended."""
        random = Random(f"{self.seed} {cell.name} {cell.turn}")
        folder = self.folder / f"{cell.name} {cell.turn}".replace("/", " ")
        folder.mkdir()
        if cell.run != TRAIN:
            return self._loop(cell, folder, random)
        name = cell.fault.name
        if name == "file: run.toml":
            return broken_configuration(folder, random)
        reference = self._trained()
        if name.startswith(FILES):
            out = self.folder / "undisturbed train" / "out"
            return resumed_after(name.removeprefix(FILES), self.launcher, out, folder, reference, random)
        if not cell.fault.kind:
            return two_launches(folder, reference)
        injury = cell.fault.injury(TRAIN, self.launcher.patience, random)
        return injured_run(self.launcher, folder, loops.WIRE, reference, injury, cell.fault.cable)

    def _loop(self, cell: Cell, folder: Path, random: Random) -> Verdict:
        reference = self._reference(cell.run)
        injury = cell.fault.injury(cell.run, self.launcher.patience, random)
        launched = self.launcher.launch(LOOPS[cell.run], injury, folder, cable=cell.fault.cable)
        if not launched.struck:
            return Verdict(NO_WORD, launched.seconds, "the fault never struck")
        killed = injury.rank if injury.kind == "kill" else None
        wrong = bad_ending(launched.ended, killed, launched.seconds)
        return wrong or compared(launched.ended, reference, REPLICAS[cell.run], launched.seconds)

    def _reference(self, run: str) -> list[Result]:
        """What the loop comes to, undisturbed."""
        if run not in self._results:
            launched = self.launcher.launch(LOOPS[run], None, self.folder / f"undisturbed {run}")
            wrong = bad_ending(launched.ended, None, launched.seconds)
            if wrong is not None:
                raise RunFailed(f"the undisturbed {run} loop failed: {wrong.word}, {wrong.said}")
            self._results[run] = [result_of(one) for one in launched.ended]
        return self._results[run]

    def _trained(self) -> Outcome:
        """What the trainer comes to, undisturbed."""
        if self._outcome is None:
            self._outcome = whole_run(self.launcher, self.folder / "undisturbed train", loops.WIRE)
        return self._outcome
