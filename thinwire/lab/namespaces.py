"""The few Linux calls that the lab needs: namespaces, mounts, parent-death signals, capabilities.

Called through ctypes because Python 3.11 has no `os.unshare`, and so that the `unshare`, `ip` and `tc`
programs need not be installed. Namespaces are held by open descriptors only and never get a name in a file
system, so that they end with the last process that holds them, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

NEW_MOUNTS = 0x20000
NEW_HOSTNAME = 0x4000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NET = 0x40000000
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_DETACH = 2
_SET_PARENT_DEATH_SIGNAL, _DROP_FROM_BOUNDING_SET = 1, 24
_NETWORK_CAPABILITIES = (12, 13, 21)  # CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_ADMIN
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of these kinds (for NEW_PIDS: its future children)."""
    _check(_libc.unshare(kinds), "unshare")


def enter(namespace: int) -> None:
    """Move this process into the namespace behind an open descriptor."""
    _check(_libc.setns(namespace, 0), "setns")


def become_own_root() -> None:
    """A new user namespace with every capability *over what is made inside it*; user and group ids stay.

    The same for root and for anyone else: nothing outside is touched that the caller's ids do not allow.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")  # the kernel's condition for mapping a group without privilege
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    _check(_libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")


def new_network() -> int:
    """A descriptor of a fresh network namespace, which this process has now entered."""
    unshare(NEW_NET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def private_mounts() -> None:
    """Mounts of our own: what is mounted from here on is seen by nobody else and ends with us."""
    unshare(NEW_MOUNTS)
    _mount(b"none", b"/", None, _RECURSIVE | _PRIVATE)


def show_processes() -> None:
    """Make /proc show the process namespace we are in, where the system permits it."""
    _mount_view(b"proc", b"/proc")


def show_network() -> None:
    """Make /sys/class/net show the network namespace we are in, where the system permits it."""
    _mount_view(b"sysfs", b"/sys")


def _mount_view(kind: bytes, target: bytes) -> None:
    """Containers with a masked /proc forbid this. Nothing in the lab depends on it: it is for tools inside a
    rank (psutil, a look at /sys/class/net), which would else see the machine's own."""
    try:
        _mount(kind, target, kind, 0)
    except OSError:
        return


def replace_file(path: str, text: str) -> None:
    """Cover an existing file by a text in memory, for this mount namespace alone."""
    _mount(b"tmpfs", b"/run", b"tmpfs", 0)
    try:
        Path("/run/cover").write_text(text)
        _mount(b"/run/cover", path.encode(), None, _BIND)
    finally:
        _check(_libc.umount2(b"/run", _DETACH), "umount")


def rename_host(name: str) -> None:
    """A host name of its own: NCCL tells machines apart by it."""
    unshare(NEW_HOSTNAME)
    socket.sethostname(name)


def drop_network_capabilities() -> None:
    """Give up, for this process and what it executes, the power to undo the shaping of its own link."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high words
    _check(_libc.capget(header, sets), "capget")
    mask = 0
    for capability in _NETWORK_CAPABILITIES:
        _check(_libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0), "prctl")
        mask |= 1 << capability
    for word in range(3):
        sets[word] &= ~mask & 0xFFFFFFFF
    _check(_libc.capset(header, sets), "capset")


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), None), f"mount {target.decode()}")
