"""Latency and loss in user space, for kernels without netem.

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
_BATCH = 64  # packets received from one device before the next device is served


@dataclass
class Lane:
    """One direction of one delayed link: what arrives at `source` is sent to `target` `delay` seconds later.

    loss: the probability that a packet is dropped. limit: bytes held at most.
    """

    source: socket.socket
    target: socket.socket
    delay: float
    loss: float = 0.0
    limit: int = 64 << 20  # more is dropped, as a router with a full queue drops it
    _held: deque[tuple[float, bytes]] = field(default_factory=deque)
    _bytes: int = 0

    def take(self, chance: random.Random) -> None:
        """Receive the packets that have arrived; `chance` decides which are lost."""
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
        """Send the packets that are due at `now`. Returns when to call again (infinity: nothing is held)."""
        while self._held:
            due, packet = self._held[0]
            if due > now:
                return due
            try:
                self.target.send(packet)
            except BlockingIOError:
                return now + _RETRY  # the socket's send buffer is full
            except OSError:
                pass  # the device is down or its queue is full: the packet is lost, as on a real link
            self._held.popleft()
            self._bytes -= len(packet)
        return float("inf")


def start_relay(links: list[tuple[str, str, float, float]]) -> int:
    """Fork a relay and return its process id; it is forwarding when this returns.

    links: per link (device below, device above, delay upwards in seconds, probability of loss upwards). The relay
    keeps nothing else of this process open.
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


def _be_relay(links: list[tuple[str, str, float, float]], status_pipe: int) -> NoReturn:
    os.dup2(status_pipe, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # low numbers are free again: `select` takes none above 1023
    lanes: list[Lane] = []
    try:
        for device_below, device_above, delay, loss in links:
            below, above = _open_port(device_below), _open_port(device_above)
            lanes += [Lane(below, above, delay, loss), Lane(above, below, 0.0)]
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
