"""`[boundary]` of run.toml: of hidden states only some coordinates cross boundaries, in a learned basis."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import UsageError
from thinwire.train.config.fields import flag, key, number, whole


@dataclass(frozen=True)
class BoundaryConfig:
    """Learned boundaries (thinwire/boundaries). They are part of the model, and saved beside it."""

    rank: int = key(0, whole(0), "of a hidden state's values so many cross, in a basis that learns; 0: all of them")
    anchors: int = key(0, whole(0), "rank of a token's own vector, which both ends know and does not cross; 0: none")
    tables: bool = key(False, flag(), "every receiving stage adds a token's vector of its own table, which is trained")
    rate: float = key(0.1, number(0, float("inf")), "of the basis, times lr; 0: it stays as it begins")
    every: int = key(1, whole(1), "the basis learns in every so many-th step")
    open: int = key(0, whole(0), "the boundaries of the model at [model] path open over so many steps; 0: at once")

    def __post_init__(self) -> None:
        if self.rank and self.open:
            raise UsageError(f"[boundary] open = {self.open}: boundaries either learn (rank) or open: leave one out")
        if self.tables and not self.rank:
            raise UsageError("[boundary] tables = true: goes with rank alone: give a rank, or leave tables out")

    def check_path(self, path: str | None) -> None:
        """UsageError where boundaries shall open and no model has them. path: `[model] path`."""
        if self.open and not path:
            raise UsageError(f"[boundary] open = {self.open}: name the model that has boundaries by [model] path")

    def check(self, pp: int, tp: int, hidden: int, lora: bool, planned: bool) -> None:
        """UsageError where the rest of the run does not go with it.

        pp, tp: of the mesh. hidden: the model's width. lora: only adapters are trained. planned: the wire leaves
        something to the planner.
        """
        if not self.rank:
            return
        reasons = {
            f"tensor-parallel slices (tp = {tp}) are not projected: take tp = 1": tp > 1,
            f"hidden states have {hidden} values: take fewer": self.rank > hidden,
            "a frozen model cannot adapt to it: leave [model.lora] or [boundary] out": lora,
            "the planner measures whole hidden states: name a preset without auto, critical and slack": planned,
            "a pipeline has boundaries, and pp = 1 has none: take [mesh] pp = 2 or more": pp == 1,
        }
        for reason, applies in reasons.items():
            if applies:
                raise UsageError(f"[boundary] rank = {self.rank}: {reason}")
