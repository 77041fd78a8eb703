"""What members of an elastic run import and compile, once: they are forked from a process that has imported this."""

from __future__ import annotations

import torch
import torch._dynamo  # torch's optimisers import it
import torchft  # noqa: F401
from elastic_member import WIRES

from thinwire.data_parallel.precompile import try_exchange

torch.set_num_threads(1)
for reduction in WIRES.values():
    try_exchange(reduction, {"weight": (60, 60), "bias": (60,)}, torch.zeros(1))
