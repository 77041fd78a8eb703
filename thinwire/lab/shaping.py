"""How a link is made slow: the kernel's token bucket for the rate, its netem for latency and loss.

A token bucket lets through `rate` bytes per second and at most `burst` bytes at once. The burst must grow
with the rate: the kernel refills it when a timer fires, and at 1 Gb/s a small bucket runs dry in between
(32 kB gives 839 Mb/s, 512 kB gives 957). It must stay small otherwise, because a message smaller than the
burst crosses at no cost.
"""

from __future__ import annotations

import struct

from thinwire.lab.netlink import Netlink, attribute
from thinwire.lab.topology import MTU

ROOT = 0xFFFFFFFF
_KIND, _OPTIONS = 1, 2
_TBF_PARAMETERS = 1
_TBF_RATE64 = 4
_TBF_BURST = 6
_ETHERNET = 1
_TICK = 64e-9  # the unit of times in queueing disciplines

BURST_SECONDS = 4e-3  # of the rate: 500 kB at 1 Gb/s, 50 kB at 100 Mb/s
SMALLEST_BURST = 4096  # bytes: 16 ms worth at 2 Mb/s
ETHERNET = 14  # bytes of the header before a packet
BUNDLE_BYTES = 44 * 1514  # the 64 kB that TCP hands to the device at once
QUEUE_SECONDS = 0.2  # of the rate: what waits at a busy link before packets are dropped
SMALLEST_QUEUE = 128 << 10  # bytes
# the names 1:, 2: and 2:1
_BUCKET = 0x10000
_NETEM = 0x20000
_BELOW_NETEM = 0x20001


def burst_bytes(rate: float, mtu: int = MTU) -> int:
    """The bucket's size in bytes for a rate in bit/s and packets of at most `mtu` bytes: two packets at least."""
    return max(SMALLEST_BURST, 2 * (mtu + ETHERNET), round(rate / 8 * BURST_SECONDS))


def bundle_packets(rate: float | None, mtu: int = MTU) -> int:
    """How many packets TCP may hand over as one: what fits the bucket, or the kernel would segment it first.

    On a lossy link it must be 1 instead: a lost packet is one packet, not a bundle of them.
    """
    most = BUNDLE_BYTES if rate is None else min(BUNDLE_BYTES, burst_bytes(rate, mtu))
    return most // (mtu + ETHERNET)


def queue_bytes(rate: float, mtu: int = MTU) -> int:
    """How many bytes may wait for a link of this rate in bit/s: a router's buffer, enough that TCP fills the link."""
    return burst_bytes(rate, mtu) + max(SMALLEST_QUEUE, round(rate / 8 * QUEUE_SECONDS))


def shape(
    netlink: Netlink,
    index: int,
    rate: float | None,
    latency: float = 0.0,
    loss: float = 0.0,
    netem: bool = False,
    mtu: int = MTU,
) -> None:
    """Set what leaves device `index`: at most `rate` bit/s (None: unlimited) and, with `netem`, `latency` seconds
    later and with probability `loss` not at all; packets have at most `mtu` bytes.

    With netem the rate's bucket is its child: packets wait for their latency, then for tokens. What waits
    in an old queue is lost: a bundle larger than the new bucket would wait there for ever.
    """
    netlink.delete_qdisc(index, ROOT)
    if netem:
        netlink.set_qdisc(index, _NETEM, ROOT, _netem(latency, loss, rate))
    if rate is not None:
        netlink.set_qdisc(index, _BUCKET, _BELOW_NETEM if netem else ROOT, _token_bucket(rate, mtu))


def _token_bucket(rate: float, mtu: int) -> bytes:
    """tbf: the 64-bit rate attribute overrides the 32-bit field, which 34 Gb/s would overflow."""
    rate_bytes = round(rate / 8)
    speed = struct.pack("BBHhHI", 0, _ETHERNET, 0, 0, 0, min(rate_bytes, 0xFFFFFFFF))
    parameters = speed + bytes(12) + struct.pack("III", queue_bytes(rate, mtu), 0, 0)
    options = (
        attribute(_TBF_PARAMETERS, parameters)
        + attribute(_TBF_RATE64, struct.pack("Q", rate_bytes))
        + attribute(_TBF_BURST, struct.pack("I", burst_bytes(rate, mtu)))
    )
    return attribute(_KIND, b"tbf\0") + attribute(_OPTIONS, options)


def _netem(latency: float, loss: float, rate: float | None) -> bytes:
    """netem; its queue, counted in packets, must hold what is under way."""
    packets = max(1000, round((rate or 1e10) / 8 / 1500 * latency * 2))
    chance = round(loss * 0xFFFFFFFF)
    fields = struct.pack("IIIIII", min(round(latency / _TICK), 0xFFFFFFFF), packets, chance, 0, 0, 0)
    return attribute(_KIND, b"netem\0") + attribute(_OPTIONS, fields)
