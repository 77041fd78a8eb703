"""Which address Gloo would listen on, and which interface an address belongs to."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from pathlib import Path

from thinwire.errors import UsageError

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_IP_MTU, _IPV6_MTU = 14, 24  # Linux: what a connected socket knows of its path


def interfaces() -> dict[str, list[str]]:
    """Addresses by interface; empty where this system does not say."""
    if sys.platform != "linux":
        return {}
    found: dict[str, list[str]] = {name: _ipv4(name) for _, name in socket.if_nameindex()}
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _ipv4(name: str) -> list[str]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            return []
    return [socket.inet_ntoa(answer[20:24])]


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None where none is known to."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def address_of(interface: str) -> str:
    """The interface's first address; a mistake where there is none."""
    known = interfaces()
    if interface not in known:
        raise UsageError(f"--interface {interface!r}: no such interface; there are {', '.join(known) or 'none to see'}")
    if not known[interface]:
        raise UsageError(f"--interface {interface!r}: it has no address")
    return known[interface][0]


def gloo_choice() -> tuple[str, str]:
    """(address, why): as torch picks it. The variable first, then the host's own name, then loopback."""
    named = os.environ.get(VARIABLE, "").split(",")[0]
    if named:
        addresses = interfaces().get(named, [])
        return (addresses[0] if addresses else "", f"{VARIABLE}={named}")
    name = socket.gethostname()
    for address in _resolve(name):
        if _usable(address):
            return address, f"this host's name, {name}, stands for it"
    return "127.0.0.1", f"this host's name, {name}, stands for no address of its own"


def _resolve(name: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except OSError:
        return []


def _usable(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def path_mtu(peer: socket.socket) -> int | None:
    """The largest packet for the path of the connection `peer`, as far as the kernel knows (Linux only)."""
    if sys.platform != "linux":
        return None
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if peer.family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
    return peer.getsockopt(level, option)
