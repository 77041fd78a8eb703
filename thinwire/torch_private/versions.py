"""The versions of torch that thinwire was tried with, and the refusal of one whose private names are others."""

from __future__ import annotations

from types import ModuleType

from thinwire.errors import UsageError

TRIED = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))  # minor versions, ascending; pyproject.toml allows these
OLDEST, NEWEST = TRIED[0], TRIED[-1]
REQUIREMENT = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def is_tried(version: str) -> bool:
    """Whether `version`, as torch writes its own ("2.13.0+cpu"), is one of the minor versions in TRIED."""
    major, minor = version.split("+")[0].split(".")[:2]
    return (int(major), int(minor)) in TRIED


def require(adapter: str, owner: type | ModuleType, *names: str) -> None:
    """Refuse this torch where `owner` lacks one of these names.

    adapter: what of thinwire needs them, for the message.
    owner: a module, or a class. Of a class, names that its `__init__` gives to each object count too.
    """
    import torch  # not above: `thinwire doctor --help` need not wait for it

    missing = [name for name in names if not _has(owner, name)]
    if missing:
        raise UsageError(
            f"{adapter}: torch {torch.__version__} has no {owner.__name__}.{missing[0]}: thinwire works with torch "
            f"{RANGE}: pip install '{REQUIREMENT}'"
        )


def _has(owner: type | ModuleType, name: str) -> bool:
    if hasattr(owner, name):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else ()
    codes = [getattr(vars(each).get("__init__"), "__code__", None) for each in classes]
    return any(code is not None and name in code.co_names for code in codes)
