"""torchft: which quorum a manager is in, and whether its connections are there."""

from __future__ import annotations

from typing import Any


def quorum_number(manager: Any) -> int:
    """The number of the manager's quorum; it grows whenever members come or go."""
    return int(manager._quorum_id)


def is_connected(group: Any) -> bool:
    """Has torchft's process group connections? It drops them when one of them breaks."""
    return group._pg is not None
