"""torchft, asked for before it is imported."""

from __future__ import annotations

import os

from thinwire.installed import check_installed


def require_torchft() -> None:
    """UsageError where it is not installed. Its log has a line per member and step, unless RUST_LOG says otherwise."""
    check_installed("elastic training", ("torchft",), "elastic")
    os.environ.setdefault("RUST_LOG", "warn")
