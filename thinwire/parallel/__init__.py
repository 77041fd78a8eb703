"""Adapters to torch: gradient reducer, DDP, FSDP, trainers, pipeline stage, tied embedding; imported when used."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Reducer": "reducer",
    "compress_ddp": "ddp",
    "compress_fsdp": "fsdp",
    "compress_trainer": "trainers",
    "TiedEmbedding": "tied",
    "all_reduce": "functional",
    "read_state": "checkpoint",
    "CompressedStage": "stage",
    "Pipeline": "pipeline",
    "Plan": "when",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'thinwire.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinwire.parallel.{_LAZY[name]}"), name)
