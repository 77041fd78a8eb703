"""What training needs beyond the library itself: the extra `train` of the package."""

from __future__ import annotations

import importlib.util

from thinwire.errors import UsageError

MODELS, ADAPTERS = ("transformers", "safetensors"), ("peft",)
REMEDY = "pip install 'thinwire[train]' (in a checkout: pip install '.[train]')"


def missing(modules: tuple[str, ...] = MODELS + ADAPTERS) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def check_installed(lora: bool = False) -> None:
    """Before anything is started."""
    lacking = missing(MODELS + ADAPTERS * lora)
    if lacking:
        raise UsageError(f"training needs {', '.join(lacking)}: {REMEDY}")
