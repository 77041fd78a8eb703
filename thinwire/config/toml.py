"""A TOML file that a user wrote, read: what is wrong with it is one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError


def read_toml(path: str | Path, what: str = "") -> dict[str, Any]:
    """The document. `what` it is, such as "topology ", stands before the name in errors."""
    try:
        return tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise UsageError(f"cannot read {what}{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{what}{path} is not TOML: {error}") from None
