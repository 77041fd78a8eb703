"""The public names of the adapters to torch, each imported from its room when it is first used.

Data parallel: `compress_ddp`, `compress_fsdp`, `compress_trainer`, `compress_titan`, `Reducer`, `TiedEmbedding`,
`TiedRows`, `RowEmbedding`, `all_reduce`, `read_state`. Between sites: `LocalSteps`, `local_steps`. Pipeline:
`CompressedStage`, `Pipeline`, `Plan`; boundaries that learn: `Projected`, `Boundaries`, `attach_boundaries`.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Reducer": "thinwire.data_parallel.reducer",
    "compress_ddp": "thinwire.data_parallel.ddp",
    "compress_fsdp": "thinwire.data_parallel.fsdp",
    "compress_trainer": "thinwire.data_parallel.trainers",
    "compress_titan": "thinwire.parallel.titan",
    "TiedEmbedding": "thinwire.data_parallel.tied_embedding",
    "TiedRows": "thinwire.data_parallel.tied_rows",
    "RowEmbedding": "thinwire.data_parallel.tied_embedding",
    "all_reduce": "thinwire.data_parallel.all_reduce",
    "read_state": "thinwire.data_parallel.checkpoint",
    "LocalSteps": "thinwire.local_steps.local_steps",
    "local_steps": "thinwire.local_steps.trainers",
    "CompressedStage": "thinwire.pipeline.stage",
    "Pipeline": "thinwire.pipeline.pipeline",
    "Plan": "thinwire.pipeline.message_choice",
    "Projected": "thinwire.boundaries.projected",
    "Boundaries": "thinwire.boundaries.synchronise",
    "attach_boundaries": "thinwire.train.model.boundaries",
}

__all__ = list(_HOME)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
