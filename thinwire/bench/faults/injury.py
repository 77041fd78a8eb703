"""What goes wrong inside a rank, once, at the start of a given step.

An injury travels to the ranks by pickle. The rank that it names carries it out by itself, so that it happens at the
same place of the program every time: it kills or stops its own process, lowers its own limits, or damages one message
on its way out. A cable is pulled from outside, by whoever runs the network: the rank says when, and waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

STRUCK, DONE = "struck", "done"  # files in a cell's folder: the injury has begun; what is done from outside is done
DAY = 86_400.0
SMALL_FILE = 2_000  # bytes that a file may have on a full disk: less than any file of a checkpoint
HELP_SECONDS = 30.0  # for whoever pulls the cable


@dataclass(frozen=True)
class Injury:
    """kind: a name in KINDS. rank: where. step: before which step; 0 is before the ranks meet. seconds: of a freeze;
    of a clock's jump. bit: which one of a message is flipped, counted from its middle."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0
    bit: int = 0


class Trouble:
    """The injury of a run, as one rank knows it. injury: None where nothing goes wrong. folder: of the cell."""

    def __init__(self, injury: Injury | None, folder: str) -> None:
        self.injury = injury
        self.folder = Path(folder)
        self.rank = int(os.environ["RANK"])

    def at(self, step: int) -> None:
        """Called by every rank at the start of every step, and with 0 before the ranks meet."""
        injury = self.injury
        if injury is None or injury.rank != self.rank or injury.step != step:
            return
        self.injury = None
        partial = self.folder / f"{STRUCK}.part"
        partial.write_text(repr(time.monotonic()))
        partial.rename(self.folder / STRUCK)
        KINDS[injury.kind](self, injury)


def _kill(trouble: Trouble, injury: Injury) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(trouble: Trouble, injury: Injury) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # whoever watches this process wakes it (watched.py)


def _wait_for_outside(trouble: Trouble, injury: Injury) -> None:
    until = time.monotonic() + HELP_SECONDS
    while not (trouble.folder / DONE).exists():
        if time.monotonic() > until:
            raise RuntimeError("nobody pulled the cable")
        time.sleep(0.01)


def _clock(trouble: Trouble, injury: Injury) -> None:
    """The time of day jumps; the monotonic clock goes on."""
    real = time.time
    mock.patch.object(time, "time", lambda: real() + injury.seconds).start()


def _descriptors(trouble: Trouble, injury: Injury) -> None:
    """Nothing more can be opened."""
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, most))


def _memory(trouble: Trouble, injury: Injury) -> None:
    """The kernel gives no more address space, and torch asks for some."""
    import torch

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), most))
    torch.ones(1 << 28)


def _full_checkpoint(trouble: Trouble, injury: Injury) -> None:
    """No file of this process may grow beyond a few bytes while it writes a checkpoint."""
    from thinwire.train.checkpoint import Checkpoints

    save = Checkpoints.save

    def limited(*arguments: Any) -> Path:
        with _small_files(SMALL_FILE):
            return save(*arguments)

    mock.patch.object(Checkpoints, "save", limited).start()


def _full_metrics(trouble: Trouble, injury: Injury) -> None:
    """The metrics cannot grow any more."""
    from thinwire.train.metrics import Metrics

    write = Metrics.write

    def limited(metrics: Metrics, *arguments: Any, **values: Any) -> None:
        with _small_files(metrics.path.stat().st_size):
            write(metrics, *arguments, **values)

    mock.patch.object(Metrics, "write", limited).start()


@contextlib.contextmanager
def _small_files(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes inside: what a full disk is to what it writes there."""
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))


def _full_store(trouble: Trouble, injury: Injury) -> None:
    """A store of samples finds no room, every time from now on."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mock.patch.object(os, "pwrite", refuse).start()


def _flip_frame(direction: str) -> Callable[[Trouble, Injury], None]:
    """A bit in the next frame that leaves in this direction."""

    def arm(trouble: Trouble, injury: Injury) -> None:
        from thinwire.pipeline.lane import Lane

        send, left = Lane.send, [True]

        def damaged(lane: Lane, *arguments: Any) -> Any:
            frame = send(lane, *arguments)
            if left and lane.name.startswith(direction):
                left.clear()
                frame = _flipped(frame, injury.bit)
            return frame

        mock.patch.object(Lane, "send", damaged).start()

    return arm


def _flip_announcement(trouble: Trouble, injury: Injury) -> None:
    """A bit in the next announcement, as it arrives at this rank."""
    from thinwire.pipeline.announce import Announcer

    send, left = Announcer._send, [True]

    def damaged(announcer: Announcer, words: Any) -> Any:
        arrived = send(announcer, words)
        if left:
            left.clear()
            arrived[2 + injury.bit % 4] ^= 1  # step, train or evaluate, number of ids, first id
        return arrived

    mock.patch.object(Announcer, "_send", damaged).start()


def _flip_gradients(trouble: Trouble, injury: Injury) -> None:
    """A bit in the next message of a collective between replicas, towards one of them."""
    from thinwire.collectives.groups import Metered
    from thinwire.collectives.messages import Swap

    leaving, left = Swap.leaving, [True]

    def damaged(swap: Swap, to: int) -> Any:
        message = leaving(swap, to)
        if left and message.numel() > 64 and isinstance(swap.group, Metered) and swap.group.transit is not None:
            left.clear()
            message = _flipped(message, injury.bit)
        return message

    mock.patch.object(Swap, "leaving", damaged).start()


def _flipped(message: Any, bit: int) -> Any:
    """A copy of a message of bytes with one bit flipped, past its middle."""
    out = message.clone()
    out[(out.numel() // 2 + bit) % out.numel()] ^= 1 << bit % 8
    return out


KINDS: dict[str, Callable[[Trouble, Injury], None]] = {
    "kill": _kill,
    "freeze": _freeze,
    "cable": _wait_for_outside,
    "clock": _clock,
    "descriptors": _descriptors,
    "memory": _memory,
    "full checkpoint": _full_checkpoint,
    "full metrics": _full_metrics,
    "full store": _full_store,
    "flip forward": _flip_frame("forward"),
    "flip backward": _flip_frame("backward"),
    "flip announcement": _flip_announcement,
    "flip gradients": _flip_gradients,
}
