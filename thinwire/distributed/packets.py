"""Packets that TCP had to send again: how many are lost on the way, as far as the sender can tell.

A link that is overfilled loses packets too, hundreds at once, when a connection finds the link's rate. That happens
seldom, so of any round no more than MOST count.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_TOTAL_RETRANS = 100  # where they are in the kernel's tcp_info
_DATA_SEGS_OUT = 156
_INFO = 160  # bytes up to there
FDS = "/proc/self/fd"
MOST = 4  # packets sent again that count in a round


def counted(flows: Iterable[socket.socket]) -> tuple[int, int]:
    """(packets sent again, packets of data sent) so far, as TCP counts them; zeros where the kernel does not tell."""
    again = data = 0
    for flow in flows:
        info = flow.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) if hasattr(socket, "TCP_INFO") else b""
        if len(info) >= _INFO:
            again += struct.unpack_from("I", info, _TOTAL_RETRANS)[0]
            data += struct.unpack_from("I", info, _DATA_SEGS_OUT)[0]
    return again, data


def of_this_process() -> tuple[int, int]:
    """The same of all TCP connections that this process has; zeros where they cannot be listed."""
    again = data = 0
    for entry in os.listdir(FDS) if os.path.isdir(FDS) else ():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                with socket.socket(fileno=os.dup(int(entry))) as one:
                    internet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                    more = counted([one]) if internet else (0, 0)
                again, data = again + more[0], data + more[1]
    return again, data


class LossCount:
    """Packets that this process had to send again, by rounds, and all that it sent in them."""

    def __init__(self) -> None:
        self.lost = 0
        self.packets = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Count what is sent inside."""
        before = of_this_process()
        yield
        after = of_this_process()
        self.lost += min(MOST, max(0, after[0] - before[0]))
        self.packets += max(0, after[1] - before[1])

    @property
    def share(self) -> float:
        """Of packets that are lost."""
        return self.lost / self.packets if self.packets else 0.0
