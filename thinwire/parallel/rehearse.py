"""Kernels are compiled when they are first called: a rehearsal calls them before the first step, and before any clock.

What a wire will do is done on a few values with state of its own that is dropped: a link's message from one end to the
other, of samples never seen and of samples remembered; a reduction's exchange in a group of this rank alone. So
whatever codecs, memories and collectives call is compiled, or loaded where a run in this folder has compiled it before.
Nothing is sent, no state is kept, and no generator of torch's is used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from thinwire.channel import Channel
from thinwire.collectives.base import ALONE, world
from thinwire.kernels.cpu.compile import compiled_once
from thinwire.memory import Memory
from thinwire.parallel.boundary import Lane, Part
from thinwire.parallel.units import Shape, make_units
from thinwire.wire import Link, Reduction, Wire

log = logging.getLogger("thinwire")
STEPS = 2  # without what is remembered, and with it
SAMPLES = (0, 1)
NOTICEABLE = 2.0  # seconds


def rehearse(
    what: str, say: Callable[[str], None], links: Iterable[Link | None], reductions: Iterable[Reduction | None],
    *, row: Sequence[int] = (), shapes: Mapping[str, Shape] | None = None, like: Tensor,
) -> None:  # fmt: skip
    """Messages of links (None: exact) for samples of shape `row`, exchanges of tensors of these `shapes`, in the dtype
    of `like`. `say` gets a line where it took long. On the CPU only: what Triton compiles depends on sizes too."""
    if like.device.type != "cpu":
        return
    began = time.perf_counter()
    with torch.no_grad(), compiled_once():
        for link in links:
            _rehearse_link(link, _values((len(SAMPLES), *row), like.dtype))
        for reduction in reductions:
            if reduction is not None:
                _rehearse_reduction(reduction, shapes or {}, torch.promote_types(like.dtype, torch.float32))
    took = time.perf_counter() - began
    if took > NOTICEABLE:
        say(f"kernels for {what}: {took:.1f} s (compiled once a folder, loaded after that)")


def rehearse_averaging(what: str, reduction: Reduction, named: Mapping[str, Tensor], ranks: int) -> None:
    """For an adapter that averages these over so many ranks; rank 0 says where it took long."""
    if ranks > 1:
        say, shapes = log.warning if world(None)[1] == 0 else log.debug, {n: tuple(p.shape) for n, p in named.items()}
        rehearse(what, say, [], [reduction], shapes=shapes, like=next(iter(named.values())))


def rehearse_messages(wire: Wire, module: nn.Module, row: Sequence[int], say: Callable[[str], None]) -> None:
    """For a pipeline whose stage this module is."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    rehearse("the pipeline", say, [None, wire.forward, wire.backward], [], row=row, like=like)


def _rehearse_link(link: Link | None, x: Tensor) -> None:
    """x: float[samples, …]."""
    if link is not None and isinstance(link.memory, Memory):
        link = replace(link, memory=replace(link.memory, path=None, capacity=1.0, fixed=None))
    sender, receiver = (Lane(link, "rehearsed", end, 0) for end in ("send", "recv"))
    part = Part(0, SAMPLES, True)
    for step in range(STEPS):
        for lane in (sender, receiver):
            lane.begin(step)
            lane.digests(SAMPLES)
        receiver.recv(part, 0, sender.send(part, 0, x), x.shape, x.dtype)
        for lane in (sender, receiver):
            lane.settle()
            lane.end_step(keep=True)


def _rehearse_reduction(reduction: Reduction, shapes: Mapping[str, Shape], dtype: torch.dtype) -> None:
    """Of the smallest unit that is compressed, if any is."""
    units = (unit for unit in make_units(shapes, reduction) if unit.numel and not unit.exact)
    unit = min(units, key=lambda unit: unit.numel, default=None)
    if unit is None:
        return
    x = _values((unit.numel,), dtype)
    channel = Channel(reduction.collective.for_shapes(unit.shapes), reduction.memory, name="rehearsed")
    for step in range(STEPS):
        channel.begin(step)
        channel.reduce(unit.name, x, ALONE)
        reduction.collective.settle(list(channel.staged_collective.values()), [unit.numel], ALONE)
        channel.commit()


def _values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape), dtype=dtype).reshape(tuple(shape))
