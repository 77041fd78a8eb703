"""Which of this rank's gradients are compressed: those of the selected stages, and with tensor parallelism only
parameters that are split.

Everything else is excluded by name, and so averaged exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from thinwire.collectives import LowRank
from thinwire.config.stages import SLACK, chosen_stages
from thinwire.config.wire import Wire
from thinwire.train.config.sections import TrainConfig
from thinwire.train.model.stage import Stage
from thinwire.train.model.tensor_parallel import dim_cut
from thinwire.train.tune.auto import Decision


def select(
    config: TrainConfig, wire: Wire, decision: Decision | None, stages: Mapping[int, Stage],
    named: Mapping[str, nn.Parameter], tables: Mapping[int, str] = MappingProxyType({}),
) -> Wire:  # fmt: skip
    """The wire as this rank's reducer uses it.

    decision: the planner's, where stages are chosen by slack. named: the parameters by name; tables: which of them are
    boundaries', by stage.
    """
    if wire.gradient is None:
        return wire
    if wire.gradient.stages == SLACK:
        assert decision is not None, "stages by slack need the planner's decision"
        chosen = frozenset(decision.stages)
    else:
        chosen = chosen_stages(wire.gradient.stages, len(config.mesh.plan().rank_of))
    left_out = {n for i, stage in stages.items() if i not in chosen for n, _ in stage.named_parameters()}
    left_out |= {name for index, name in tables.items() if index not in chosen}
    if config.mesh.tp > 1:  # what is not split must have the same bits on all tensor-parallel ranks
        left_out |= {name for name, p in named.items() if dim_cut(p) is None}
    exclude = (*wire.gradient.exclude, *sorted(left_out & named.keys()))
    return replace(wire, gradient=replace(wire.gradient, exclude=exclude))


def with_fitting_rank(wire: Wire, named: Mapping[str, nn.Parameter], say: Callable[[str], None]) -> Wire:
    """The wire itself; `say` is called with a line where its low rank is too high for some of this rank's matrices."""
    if wire.gradient is not None and isinstance(wire.gradient.collective, LowRank):
        note_small(wire.gradient.collective, [tuple(p.shape) for p in named.values()], say)
    return wire


def note_small(collective: LowRank, shapes: Iterable[tuple[int, ...]], say: Callable[[str], None]) -> None:
    """Say how many of the matrices of these shapes two factors would not make smaller."""
    matrices = [shape for shape in shapes if len(shape) > 1]
    exact = sum(not collective.rank_of(shape) for shape in matrices)
    if exact:
        say(
            f"[wire.gradient] rank = {collective.rank}: {exact} of {len(matrices)} matrices are too small for it and "
            "stay exact; shrink = 4 would lower the rank of each"
        )
