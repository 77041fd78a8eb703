"""Which of this rank's gradients are compressed: those of the selected stages, with a low rank that fits the matrices,
and with tensor parallelism only parameters that are split.

Everything else is excluded by name, and so averaged exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import nn

from thinwire.collectives import LowRank
from thinwire.config.stages import SLACK, chosen_stages
from thinwire.config.wire import Reduction, Wire
from thinwire.train.config.sections import TrainConfig
from thinwire.train.model.stage import Stage
from thinwire.train.model.tensor_parallel import dim_cut
from thinwire.train.tune.auto import Decision

SHRINKS = 4  # a low rank must make every matrix at least so many times smaller


def select(
    config: TrainConfig, wire: Wire, decision: Decision | None, stages: Mapping[int, Stage],
    named: Mapping[str, nn.Parameter],
) -> Wire:  # fmt: skip
    """The wire as this rank's reducer uses it; `decision`: the planner's, where stages are chosen by slack."""
    if wire.gradient is None:
        return wire
    if wire.gradient.stages == SLACK:
        assert decision is not None, "stages by slack need the planner's decision"
        chosen = frozenset(decision.stages)
    else:
        chosen = chosen_stages(wire.gradient.stages, len(config.mesh.plan().rank_of))
    left_out = {n for i, stage in stages.items() if i not in chosen for n, _ in stage.named_parameters()}
    if config.mesh.tp > 1:  # what is not split must have the same bits on all tensor-parallel ranks
        left_out |= {name for name, p in named.items() if dim_cut(p) is None}
    exclude = (*wire.gradient.exclude, *sorted(left_out & named.keys()))
    return replace(wire, gradient=replace(wire.gradient, exclude=exclude))


def with_fitting_rank(wire: Wire, named: Mapping[str, nn.Parameter], say: Callable[[str], None]) -> Wire:
    """The wire with the rank of its gradients lowered where that is needed; `say` is called with a line about it."""
    if wire.gradient is None:
        return wire
    return replace(wire, gradient=fitted(wire.gradient, [tuple(p.shape) for p in named.values()], say))


def fitted(reduction: Reduction, shapes: Iterable[tuple[int, ...]], say: Callable[[str], None]) -> Reduction:
    """A low rank that is too high for the smallest matrix is lowered to what saves the factor SHRINKS there."""
    matrices = [(math.prod(shape[:-1]), shape[-1]) for shape in shapes if len(shape) > 1]
    if not isinstance(reduction.collective, LowRank) or not matrices:
        return reduction
    fits = max(1, min(n * m // (SHRINKS * (n + m)) for n, m in matrices))
    if fits >= reduction.collective.rank:
        return reduction
    say(f"[wire.gradient] rank = {reduction.collective.rank}: too high for these matrices, {fits} is used")
    return replace(reduction, collective=replace(reduction.collective, rank=fits))
