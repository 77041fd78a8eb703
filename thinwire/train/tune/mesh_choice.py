"""How many micro-batches a pass has, and how many of them 1F1B begins ahead: what `[mesh]` leaves open under `auto`.

More micro-batches leave ranks idle for a shorter time where a pass begins and ends, and on a long link they let more
messages be under way; each costs its latency under plain 1F1B, and small products are slower. So it is simulated, with
the time that each stage takes for so many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from thinwire.config.wire import Wire
from thinwire.errors import UsageError
from thinwire.planner.mildest import WORTH
from thinwire.train.config.mesh import MeshConfig
from thinwire.train.config.sections import TrainConfig

MOST_AHEAD = 3  # [mesh] ahead: beyond it nothing more was won (docs/gpu.md)
TIMES = (1, 2, 4)  # as many micro-batches as usual, or so many times as many: fewer would need more memory at a time


def counts(config: TrainConfig, wire: Wire) -> list[int]:
    """The numbers of micro-batches to choose from, the usual one first; it alone where nothing is left open."""
    usual = config.mesh.microbatches
    if not config.mesh.leaves_microbatches or not wire.auto or config.mesh.pp == 1:
        return [usual]
    found = []
    for count in (usual * times for times in TIMES):
        parts = config.mesh.replicas * config.optim.accumulate * count
        if config.optim.batch % parts == 0 and _is_possible(config.mesh, count):
            found.append(count)
    return found


def _is_possible(mesh: MeshConfig, count: int) -> bool:
    """Can the schedule have so many?"""
    try:
        replace(mesh, microbatches=count)
    except UsageError:
        return False
    return True


def depths(mesh: MeshConfig, wire: Wire) -> list[int]:
    """The values of `[mesh] ahead` to choose from, until all micro-batches are begun before the first backward."""
    if mesh.ahead != "auto" or not wire.auto or mesh.schedule != "1F1B" or mesh.pp == 1:
        return [mesh.depth]
    return [depth for depth in range(1, MOST_AHEAD + 1) if (depth - 1) * (mesh.pp - 1) + 1 < mesh.microbatches]


def meshes(config: TrainConfig, wire: Wire, seconds: Callable[[MeshConfig], float]) -> Iterator[MeshConfig]:
    """Those with the usual number of micro-batches, then those with the one that looks clearly faster; by `ahead`.

    seconds: of a step, simulated, with everything compressed as strongly as may be.
    """
    by_count = {count: replace(config.mesh, microbatches=count) for count in counts(config, wire)}
    if len(by_count) > 1:
        fastest = {
            count: min(seconds(replace(mesh, ahead=depth)) for depth in depths(mesh, wire))
            for count, mesh in by_count.items()
        }
        best = next(count for count, took in fastest.items() if took <= WORTH * min(fastest.values()))
        by_count = {count: mesh for count, mesh in by_count.items() if count in (next(iter(by_count)), best)}
    for mesh in by_count.values():
        yield from (replace(mesh, ahead=depth) for depth in depths(mesh, wire))
