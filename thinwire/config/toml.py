"""Read a TOML file that a user wrote; a mistake in it is an error of one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError


def read_toml(path: str | Path, what: str = "") -> dict[str, Any]:
    """The parsed document. `what` is put before the path in errors, such as "topology "."""
    try:
        return tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise UsageError(f"cannot read {what}{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{what}{path} is not TOML: {error}") from None
