"""What ranks of the tests import sooner or later, once: they are forked from a process that has imported this."""

from __future__ import annotations

import importlib
import pkgutil

import rank_cases  # noqa: F401
import torch._dynamo  # torch's optimisers import it
import torch.distributed.checkpoint
import torch.distributed.pipelining  # noqa: F401

import thinwire.kernels.cpu

for kernel in pkgutil.iter_modules(thinwire.kernels.cpu.__path__):
    importlib.import_module(f"thinwire.kernels.cpu.{kernel.name}")
