"""What a command needs beyond the library itself: the package's extras. Looked for, never imported."""

from __future__ import annotations

import importlib.util

from thinwire.errors import UsageError

MODELS, ADAPTERS = ("transformers", "safetensors"), ("peft",)
FIGURES = ("matplotlib",)
THEORY = ("sklearn", "matplotlib")
PACKAGES = {"sklearn": "scikit-learn"}  # where pip's name is another than the module's


def remedy(extra: str) -> str:
    """The command that installs an extra of the package."""
    return f"pip install 'thinwire[{extra}]' (in a checkout: pip install '.[{extra}]')"


def missing(modules: tuple[str, ...]) -> list[str]:
    """The packages of these modules that are not installed."""
    return [PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]


def check_installed(what: str, modules: tuple[str, ...], extra: str) -> None:
    """Before anything is started: UsageError, in a line, where `what` lacks a module that is in that extra."""
    lacking = missing(modules)
    if lacking:
        raise UsageError(f"{what} needs {', '.join(lacking)}: {remedy(extra)}")


def check_training(lora: bool = False) -> None:
    """UsageError where `thinwire train` lacks a package; with `lora`, adapters' too."""
    check_installed("training", MODELS + ADAPTERS * lora, "train")


def check_figures(what: str) -> None:
    """UsageError where `what` would draw, and matplotlib is missing."""
    check_installed(what, FIGURES, "figures")
