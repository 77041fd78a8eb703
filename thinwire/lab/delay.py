"""Latency and loss in user space, for kernels without netem.

A process of our own stands between two devices: it takes each packet from one, holds it until its time has
come and puts it into the other. Raw packet sockets need only capabilities inside our own network namespace,
so this works without root (a tun device would need a /dev/net/tun that everyone may open). Packets travel
with their offload header (PACKET_VNET_HDR): a 64 kB bundle that TCP leaves for the card to cut stays one.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_ALL_PROTOCOLS = 0x0003
_LARGEST = 10 + 18 + (1 << 16)  # offload header, Ethernet header, the largest IP packet
_BUFFER = 4 << 20  # asked of the kernel, which grants what its limits allow
_RETRY = 1e-3
_BATCH = 64  # packets taken from one device before the next one has its turn


@dataclass
class Lane:
    """One direction of one delayed link: from a port to a port, `delay` seconds later."""

    source: socket.socket
    target: socket.socket
    delay: float
    loss: float = 0.0
    limit: int = 64 << 20  # bytes under way; more is dropped, as a full router would
    _held: deque[tuple[float, bytes]] = field(default_factory=deque)
    _bytes: int = 0

    def take(self, chance: random.Random) -> None:
        """Move what has arrived onto the lane."""
        for _ in range(_BATCH):
            try:
                packet = self.source.recv(_LARGEST)
            except OSError:  # nothing more, or the device is down: either way there is no packet
                return
            if self._bytes + len(packet) > self.limit or (self.loss and chance.random() < self.loss):
                continue
            self._held.append((time.monotonic() + self.delay, packet))
            self._bytes += len(packet)

    def give(self, now: float) -> float:
        """Hand over what is due. Returns the time at which to call again (infinity: nothing is held)."""
        while self._held:
            due, packet = self._held[0]
            if due > now:
                return due
            try:
                self.target.send(packet)
            except BlockingIOError:
                return now + _RETRY  # our share of the device's queue is full
            except OSError:
                pass  # the device is down or its queue is full: the packet is lost, as on a real link
            self._held.popleft()
            self._bytes -= len(packet)
        return float("inf")


def open_port(device: str) -> socket.socket:
    """A raw socket on a device, seeing what arrives there and not what we put in."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.bind((device, _ALL_PROTOCOLS))
    return port


def relay(lanes: list[Lane], seed: int = 0) -> NoReturn:
    """Run the lanes for ever: the life of a process that ends with the lab."""
    chance = random.Random(seed)
    by_source = {lane.source.fileno(): lane for lane in lanes}
    wake = float("inf")
    while True:
        wait = None if wake == float("inf") else max(0.0, wake - time.monotonic())
        ready, _, _ = select.select(by_source, (), (), wait)
        for number in ready:
            by_source[number].take(chance)
        now = time.monotonic()
        wake = min(lane.give(now) for lane in lanes)
