"""An exchange of gradients on a few values, in a group of this rank alone: see distributed/precompile.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.codecs.base import is_finite
from thinwire.collectives.groups import ALONE, world
from thinwire.collectives.transit import checksum_of
from thinwire.config.wire import Reduction
from thinwire.data_parallel.gradient_units import Shape, make_units
from thinwire.distributed.later_checks import LaterChecks
from thinwire.distributed.precompile import STEPS, example_values, precompile
from thinwire.memory.channel import Channel

log = logging.getLogger("thinwire")


def precompile_averaging(what: str, reduction: Reduction, named: Mapping[str, Tensor], ranks: int) -> None:
    """Compile what averaging these tensors will call; rank 0 says where it took long.

    what: is averaged, named in that line. named: the tensors by name. ranks: how many they are averaged over.
    """
    if ranks == 1:
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    like = next(iter(named.values()))
    say = log.warning if world(None)[1] == 0 else log.debug
    precompile(what, [lambda: try_exchange(reduction, shapes, like)], like, say)


def try_exchange(reduction: Reduction, shapes: Mapping[str, Shape], like: Tensor) -> None:
    """Exchange the smallest unit that is compressed, if any is, for tensors of these shapes; and the checksum of a
    message, which a group of one never sends.

    like: a tensor of their dtype and device.
    """
    checksum_of(torch.zeros(64, dtype=torch.uint8, device=like.device))
    units = (unit for unit in make_units(shapes, reduction) if unit.numel and not unit.exact)
    unit = min(units, key=lambda unit: unit.numel, default=None)
    if unit is None:
        return
    x = example_values((unit.numel,), like, torch.promote_types(like.dtype, torch.float32))
    channel = Channel(reduction.collective.for_shapes(unit.shapes), reduction.memory, name="precompiled")
    for step in range(STEPS):
        channel.begin(step)
        channel.reduce(unit.name, x, ALONE)
        reduction.collective.finish_step(list(channel.staged_collective.values()), [unit.numel], ALONE)
        channel.commit()
    finite, later = is_finite(x), LaterChecks()
    later.leave(finite), later.into(torch.zeros(2, dtype=torch.uint8, device=x.device))
    x.div(2).masked_fill_(~finite, 0.0)
