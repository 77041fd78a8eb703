"""Shared by the lab's tests: whether this machine permits a network, and what is left of one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from thinwire.lab import Network, Unavailable


def require_network() -> None:
    """Skip the calling module, with the lab's own reason, where namespaces are forbidden."""
    try:
        with Network(hosts=1, preload=()):
            pass
    except Unavailable as reason:
        pytest.skip(str(reason), allow_module_level=True)


def processes_with(token: str) -> list[int]:
    """Processes whose command line holds a token; readable whoever owns them, in whatever namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if token.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def gone_within(seconds: float, token: str) -> bool:
    until = time.monotonic() + seconds
    while processes_with(token):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def footprint() -> dict[str, object]:
    """What a network could leave on the machine itself: devices, mounts, named namespaces."""
    return {
        "devices": sorted(os.listdir("/sys/class/net")),
        "mounts": Path("/proc/self/mounts").read_text(),
        "named namespaces": sorted(os.listdir("/run/netns")) if Path("/run/netns").exists() else [],
    }
