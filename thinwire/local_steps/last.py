"""The last round through a wire of its own, which sends all that sites have not sent yet: their residuals too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from thinwire.collectives import Dense
from thinwire.config.wire import Reduction, Wire, WireLike
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.precompile import precompile_averaging
from thinwire.errors import UsageError
from thinwire.local_steps.fragment import Fragment, own_part
from thinwire.local_steps.round import Site


@contextmanager
def other_wire(site: Site, wire: WireLike, fragments: list[Fragment]) -> Iterator[Site]:
    """Inside, the same site over another wire, which has taken over the residuals; its bytes count as the site's.

    UsageError where sites come and go.
    """
    if site.following is not None:
        raise UsageError("finish(last=…): not in a quorum, whose rounds all go through one wire")
    reduction, old = Wire.of(wire).gradient or Reduction(Dense()), site.exchange
    tensors = {name: own_part(p) for fragment in fragments for name, p in fragment.parameters.items()}
    precompile_averaging("the last outer gradients", reduction, tensors, old.size)
    new = Exchange({}, reduction, old.group, units=old.units)
    for unit in old.compressed:
        left = old.channels[unit].state.read("e", unit.name)
        if left is not None:
            new.channels[unit].state.write("e", unit.name, (1 - site.keep) * left)  # the rest is in the weights
            old.channels[unit].state.write("e", unit.name, torch.zeros_like(left))
    for fragment in fragments:
        fragment.tokens = fragment.tokens or 1.0  # without a step since the last round only residuals are left
    yield replace(site, exchange=new)
    old.group.sent += new.sent
    new.leave_group()
