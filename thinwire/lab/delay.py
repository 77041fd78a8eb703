"""Latency and loss in user space, for kernels without netem; reordering, always.

A process of our own forwards packets between two devices: it receives each packet from one, holds it for the latency
and sends it into the other. Raw packet sockets need only capabilities inside our own network namespace,
so this works without root (a tun device would need a /dev/net/tun that everyone may open). Packets travel
with their offload header (PACKET_VNET_HDR): a 64 kB bundle that TCP leaves for the network card to segment stays one.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

_SOL_PACKET = 263
_VNET_HEADER = 15
_IGNORE_OUTGOING = 23
_ALL_PROTOCOLS = 0x0003
_LARGEST = 10 + 18 + (1 << 16)  # offload header, Ethernet header, the largest IP packet
_BUFFER = 4 << 20  # asked of the kernel, which grants what its limits allow
_RETRY = 1e-3
LATE = 5e-3  # seconds that a reordered packet comes after its turn: behind 40 others at 100 Mb/s
_BATCH = 64  # packets received from one device before the next device is served


@dataclass(frozen=True)
class Delay:
    """A link that delays, loses or reorders packets on their way up.

    below, above: names of the devices that it stands between. delay: seconds. loss, reorder: probabilities per packet
    that it is dropped, or held for LATE seconds more.
    """

    below: str
    above: str
    delay: float
    loss: float = 0.0
    reorder: float = 0.0


@dataclass
class Lane:
    """One direction of one delayed link: what arrives at `source` is sent to `target` `delay` seconds later.

    loss, reorder: the probabilities that a packet is dropped, or sent LATE seconds after its turn. limit: bytes held at
    most.
    """

    source: socket.socket
    target: socket.socket
    delay: float
    loss: float = 0.0
    reorder: float = 0.0
    limit: int = 64 << 20  # more is dropped, as a router with a full queue drops it
    _held: deque[tuple[float, bytes]] = field(default_factory=deque)
    _late: deque[tuple[float, bytes]] = field(default_factory=deque)  # those that their followers overtake
    _bytes: int = 0

    def take(self, chance: random.Random) -> None:
        """Receive the packets that have arrived; `chance` decides which are lost and which come late."""
        for _ in range(_BATCH):
            try:
                packet = self.source.recv(_LARGEST)
            except OSError:  # nothing more, or the device is down: either way there is no packet
                return
            if self._bytes + len(packet) > self.limit or (self.loss and chance.random() < self.loss):
                continue
            due = time.monotonic() + self.delay
            if self.reorder and chance.random() < self.reorder:
                self._late.append((due + LATE, packet))
            else:
                self._held.append((due, packet))
            self._bytes += len(packet)

    def give(self, now: float) -> float:
        """Send the packets that are due at `now`. Returns when to call again (infinity: nothing is held)."""
        return min(self._give(self._held, now), self._give(self._late, now) if self._late else float("inf"))

    def _give(self, queue: deque[tuple[float, bytes]], now: float) -> float:
        while queue:
            due, packet = queue[0]
            if due > now:
                return due
            try:
                self.target.send(packet)
            except BlockingIOError:
                return now + _RETRY  # the socket's send buffer is full
            except OSError:
                pass  # the device is down or its queue is full: the packet is lost, as on a real link
            queue.popleft()
            self._bytes -= len(packet)
        return float("inf")


def start_relay(links: list[Delay]) -> int:
    """Fork a relay and return its process id; it is forwarding when this returns.

    links: what it does where. It keeps nothing else of this process open.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _be_relay(links, write_end)
    os.close(write_end)
    answer = os.read(read_end, 4)
    os.close(read_end)
    if not answer or int(answer):
        number = int(answer or errno.ECHILD)
        raise OSError(number, f"packet sockets: {os.strerror(number)}")
    return child


def _be_relay(links: list[Delay], status_pipe: int) -> NoReturn:
    os.dup2(status_pipe, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # low numbers are free again: `select` takes none above 1023
    lanes: list[Lane] = []
    try:
        for link in links:
            below, above = _open_port(link.below), _open_port(link.above)
            lanes += [Lane(below, above, link.delay, link.loss, link.reorder), Lane(above, below, 0.0)]
        os.write(3, b"0")
        os.close(3)
        _relay(lanes)
    except OSError as error:
        os.write(3, str(error.errno).encode())
    finally:
        os._exit(1)


def _open_port(device: str) -> socket.socket:
    """A raw socket on a device, seeing what arrives there and not what we put in."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.bind((device, _ALL_PROTOCOLS))
    return port


def _relay(lanes: list[Lane], seed: int = 0) -> NoReturn:
    """Forward packets until the process is killed, which happens when the lab ends."""
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
