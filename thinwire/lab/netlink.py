"""Network devices by rtnetlink, the kernel's own interface: what `ip` and `tc` would do, without them.

A message is a header, a fixed struct and a list of attributes; the kernel answers each with an error number
(0 is success). A `Netlink` is connected to the network namespace that its process was in when it was made, whichever
the process enters later.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass

NEW_LINK = 16
GET_LINK = 18
SET_LINK = 19
NEW_ADDRESS = 20
NEW_NEIGHBOUR = 28
NEW_QDISC = 36
DELETE_QDISC = 37
REQUEST = 0x1
ACK = 0x4
DUMP = 0x300
EXCLUSIVE = 0x200
CREATE = 0x400
REPLACE = 0x100
_ERROR, _DONE = 2, 3
_MAC = 1
_IFNAME = 3
_MTU = 4
_MASTER = 10
_LINKINFO = 18
_STATS64 = 23
_NET_NS_FD = 28
_GSO_MAX_SEGMENTS = 40
_INFO_KIND = 1
_INFO_DATA = 2
_VETH_PEER = 1
_UP = 1
_PORT_INFO = 12
_NESTED = 0x8000
_PORT_STATE = 1
_FORWARDING = 3
_DISABLED = 0
_DESTINATION, _STATION = 1, 2  # a neighbour's address and its MAC
_PERMANENT = 0x80
_NO_ARP = 0x40
_AT_SWITCH = 0x04
_HEADER = struct.Struct("IHHII")
_LINK = struct.Struct("BxHiII")
_ADDRESS = struct.Struct("BBBBi")
TIMEOUT = 10.0  # seconds; the kernel answers in microseconds, so this only turns a hang into an error


@dataclass(frozen=True)
class Traffic:
    """What crossed one device or link, in bytes (headers included) and in packets.

    A packet may be a bundle of up to 64 kB that TCP left for the device to segment; `dropped` counts lost packets.
    """

    sent: int
    received: int
    sent_packets: int
    received_packets: int
    dropped: int

    def since(self, before: Traffic) -> Traffic:
        """What crossed after `before` was read."""
        return Traffic(*(now - then for now, then in zip(astuple(self), astuple(before))))

    def from_other_end(self) -> Traffic:
        """The same, as the device at the other end of the cable sees it."""
        return Traffic(self.received, self.sent, self.received_packets, self.sent_packets, self.dropped)


def attribute(kind: int, payload: bytes) -> bytes:
    """One attribute: length, kind, payload, padded to four bytes."""
    return struct.pack("HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


class Netlink:
    """A socket to the kernel's routing tables in one network namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._socket.settimeout(TIMEOUT)
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        """A switch."""
        info = attribute(_LINKINFO, attribute(_INFO_KIND, b"bridge"))
        self._ask(NEW_LINK, CREATE | EXCLUSIVE, _link() + attribute(_IFNAME, _text(name)) + info)

    def add_cable(
        self, name: str, peer: str, mtu: int, peer_namespace: int | None = None, peer_mac: bytes = b""
    ) -> None:
        """A veth pair: what goes in at one end comes out at the other, maybe in another namespace."""
        largest = attribute(_MTU, struct.pack("I", mtu))
        far = _link() + attribute(_IFNAME, _text(peer)) + largest
        if peer_namespace is not None:
            far += attribute(_NET_NS_FD, struct.pack("I", peer_namespace))
        if peer_mac:
            far += attribute(_MAC, peer_mac)
        info = attribute(_INFO_KIND, b"veth") + attribute(_INFO_DATA, attribute(_VETH_PEER, far))
        self._ask(
            NEW_LINK,
            CREATE | EXCLUSIVE,
            _link() + attribute(_IFNAME, _text(name)) + largest + attribute(_LINKINFO, info),
        )

    def attach(self, index: int, bridge: int) -> None:
        """Attach the device with this index to a switch."""
        self._ask(NEW_LINK, 0, _link(index) + attribute(_MASTER, struct.pack("I", bridge)))

    def set_bundle(self, index: int, packets: int) -> None:
        """How many packets TCP may hand to the device as one, for the device to segment (1: no such offload)."""
        self._ask(NEW_LINK, 0, _link(index) + attribute(_GSO_MAX_SEGMENTS, struct.pack("I", packets)))

    def set_up(self, index: int) -> None:
        """Switch a device on."""
        self._ask(NEW_LINK, 0, _link(index, flags=_UP, change=_UP))

    def set_forwarding(self, port: int, on: bool) -> None:
        """Let a switch port pass packets or drop them all; the device at the other end notices nothing."""
        state = attribute(_PORT_STATE, struct.pack("B", _FORWARDING if on else _DISABLED))
        head = _LINK.pack(socket.AF_BRIDGE, 0, port, 0, 0)
        self._ask(SET_LINK, 0, head + attribute(_PORT_INFO | _NESTED, state))

    def add_address(self, index: int, address: str, prefix: int) -> None:
        """Give a device an IPv4 address; the route to its network comes with it."""
        packed = socket.inet_aton(address)
        head = _ADDRESS.pack(socket.AF_INET, prefix, 0, 0, index)
        self._ask(NEW_ADDRESS, CREATE | EXCLUSIVE, head + attribute(1, packed) + attribute(2, packed))

    def add_neighbours(self, index: int, neighbours: Iterable[tuple[str, bytes]]) -> None:
        """Enter the hosts' (address, MAC) pairs in a host's neighbour table, so that it sends no ARP requests: the
        kernel's table of ARP answers is small and is shared by all namespaces (64 hosts overflow it), and requests
        would be counted as traffic."""
        head = _neighbour(socket.AF_INET, index, _PERMANENT, 0)
        for address, mac in neighbours:
            where = attribute(_DESTINATION, socket.inet_aton(address)) + attribute(_STATION, mac)
            self._ask(NEW_NEIGHBOUR, CREATE | REPLACE, head + where)

    def add_station(self, port: int, mac: bytes) -> None:
        """Enter at a switch behind which port a MAC is, so that it never floods."""
        head = _neighbour(socket.AF_BRIDGE, port, _NO_ARP, _AT_SWITCH)
        self._ask(NEW_NEIGHBOUR, CREATE | REPLACE, head + attribute(_STATION, mac))

    def set_qdisc(self, index: int, handle: int, parent: int, body: bytes) -> None:
        """Put a queueing discipline (kind and options already packed) on a device."""
        self._ask(NEW_QDISC, CREATE | EXCLUSIVE, _queue(index, handle, parent) + body)

    def delete_qdisc(self, index: int, parent: int) -> None:
        """Back to the device's own queue; fine where there was none."""
        try:
            self._ask(DELETE_QDISC, 0, _queue(index, 0, parent))
        except FileNotFoundError:
            return

    def counters(self) -> dict[str, Traffic]:
        """Every device's counters by name: the figures of /sys/class/net/NAME/statistics, in one request."""
        result = {}
        for message in self._talk(GET_LINK, DUMP, _link()):
            found = dict(_attributes(message[_LINK.size :]))
            if _STATS64 in found and _IFNAME in found:
                rx_packets, tx_packets, rx, tx, _, _, rx_drop, tx_drop = struct.unpack("8Q", found[_STATS64][:64])
                name = found[_IFNAME].rstrip(b"\0").decode()
                result[name] = Traffic(tx, rx, tx_packets, rx_packets, rx_drop + tx_drop)
        return result

    def _ask(self, kind: int, flags: int, body: bytes) -> None:
        for _ in self._talk(kind, flags | ACK, body):
            pass

    def _talk(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        """Send one message and collect the answers up to the acknowledgement or the end of the dump."""
        self._sequence += 1
        size = _HEADER.size + len(body)
        self._socket.send(_HEADER.pack(size, kind, flags | REQUEST, self._sequence, 0) + body)
        answers: list[bytes] = []
        while True:
            for answer_kind, sequence, payload in _messages(self._socket.recv(1 << 18)):
                if sequence != self._sequence:
                    continue
                if answer_kind == _ERROR:
                    number = -struct.unpack_from("i", payload)[0]
                    if number:
                        raise OSError(number, f"netlink request {kind}: {os.strerror(number)}")
                    return answers
                if answer_kind == _DONE:
                    return answers
                answers.append(payload)


def index_of(name: str) -> int:
    """A device's number in the namespace this process is in."""
    return socket.if_nametoindex(name)


def _text(name: str) -> bytes:
    return name.encode() + b"\0"


def _link(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return _LINK.pack(socket.AF_UNSPEC, 0, index, flags, change)


def _neighbour(family: int, index: int, state: int, flags: int) -> bytes:
    return struct.pack("BxxxiHBB", family, index, state, flags, 0)


def _queue(index: int, handle: int, parent: int) -> bytes:
    return struct.pack("BxxxiIII", socket.AF_UNSPEC, index, handle, parent, 0)


def _messages(data: bytes) -> Iterable[tuple[int, int, bytes]]:
    """(kind, sequence, payload) of each message in what one read returned."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
        yield kind, sequence, data[at + _HEADER.size : at + size]
        at += (size + 3) & ~3


def _attributes(data: bytes) -> Iterable[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("HH", data, at)
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += max((size + 3) & ~3, 4)
