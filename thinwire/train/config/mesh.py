"""`[mesh]` of run.toml: how many ranks there are and where each stands, and what sites need of the other sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.errors import UsageError
from thinwire.planner.actions import Schedule
from thinwire.planner.schedule import TORCH_SCHEDULES, generate, generate_ahead, torch_schedule
from thinwire.train.config.families import TENSOR_PARALLEL
from thinwire.train.config.fields import key, one_of, whole

MICROBATCHES = 4  # where nothing is said
COUNT = ("'auto', or a whole number, 1 or more", lambda v: v == "auto" or (type(v) is int and v >= 1))


@dataclass(frozen=True)
class MeshConfig:
    """rank = ((site · dp + replica) · pp + position in the pipeline) · tp + slice."""

    sites: int = key(1, whole(1), "of dp × pp × tp ranks each, which average seldom: [local]")
    dp: int = key(1, whole(1), "data-parallel replicas of a site")
    pp: int = key(1, whole(1), "pipeline ranks of a replica")
    tp: int = key(1, whole(1), "tensor-parallel ranks, inside a site; " + " and ".join(TENSOR_PARALLEL))
    schedule: str = key(
        "1F1B",
        ("one of " + ", ".join(TORCH_SCHEDULES), lambda v: isinstance(v, str) and torch_schedule(v) is not None),
        ", ".join(TORCH_SCHEDULES),
    )
    virtual: int | None = key(None, whole(1), "stages per rank, for the interleaved schedules", 2)
    microbatches: int = key(
        "auto", COUNT, f"per pipeline pass; auto: {MICROBATCHES}, or with [wire] auto what fits the measured links"
    )
    ahead: int | str = key(
        "auto", COUNT, "1F1B: begin so many times the micro-batches before the first backward; 2 or 3 hide slow links. "
        "auto: 1, or with [wire] auto what fits the measured links",
    )  # fmt: skip
    split: str = key(
        "parameters", one_of("parameters", "time"), "layers over stages by parameters, or by measured time"
    )

    leaves_microbatches: ClassVar[bool] = False  # of one that says "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", torch_schedule(self.schedule))
        if isinstance(self.microbatches, str):
            object.__setattr__(self, "microbatches", MICROBATCHES)
            object.__setattr__(self, "leaves_microbatches", True)
        try:
            self.plan()
        except UsageError as error:
            raise UsageError(f"[mesh] {error}") from None
        if self.depth > 1 and self.schedule != "1F1B":
            raise UsageError(f"[mesh] ahead = {self.ahead}: is for 1F1B; {self.schedule} takes 1")
        if self.schedule == "1F1B" and self.microbatches < self.pp:
            raise UsageError(f"[mesh] microbatches = {self.microbatches}: 1F1B needs at least pp = {self.pp}")

    def plan(self) -> Schedule:
        """What each pipeline rank computes, and where each stage lies (`rank_of`)."""
        if self.depth > 1 and self.schedule == "1F1B":
            return generate_ahead(self.pp, self.microbatches, self.depth)
        return generate(self.schedule, self.pp, self.microbatches, self.virtual)

    @property
    def depth(self) -> int:
        """`ahead` as a number: 1 unless it was given, or decided."""
        return 1 if isinstance(self.ahead, str) else self.ahead

    @property
    def site_ranks(self) -> int:
        """Of one site."""
        return self.dp * self.pp * self.tp

    @property
    def ranks(self) -> int:
        """Of all sites."""
        return self.sites * self.site_ranks

    @property
    def replicas(self) -> int:
        """Of all sites."""
        return self.sites * self.dp

    def describe(self) -> str:
        """The sizes that make up `ranks`, in words."""
        sites = f"sites = {self.sites}, " if self.sites > 1 else ""
        return f"{sites}dp = {self.dp}, pp = {self.pp}, tp = {self.tp}"


def check_sites(mesh: MeshConfig, local: Mapping[str, Any], optimizer: str, boundary: int) -> None:
    """UsageError where several sites are asked for with what they cannot be combined with, or `[local]` without them.

    local: the table `[local]`. optimizer: `[optim] name`. boundary: `[boundary] rank`.
    """
    if mesh.sites == 1:
        if local:
            raise UsageError("[local]: is for several sites, which average seldom: give [mesh] sites = 2 or more")
        return
    if not local:
        raise UsageError(
            f'[mesh] sites = {mesh.sites}: needs [local], which says how sites average; such as preset = "local-max"'
        )
    if mesh.tp > 1:
        raise UsageError(f"[mesh] tp = {mesh.tp}: tensor parallelism cannot be combined with sites = {mesh.sites} yet")
    if optimizer == "frozen_adam":
        raise UsageError(f"[optim] name = 'frozen_adam': is for one site; with [mesh] sites = {mesh.sites} take adamw")
    if boundary:
        raise UsageError(f"[boundary] rank = {boundary}: boundaries learn in one site; leave it, or [mesh] sites, out")
