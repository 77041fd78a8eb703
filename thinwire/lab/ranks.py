"""The processes of one program run: forked by the supervisor, one or more in each host, watched and stopped.

A rank is either a command (executed), a Python program run in a fork of the supervisor, which has imported its
modules already, or a function. Each leads its own process group; its output and its result come back by pipes.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from thinwire.lab.namespaces import (
    drop_network_capabilities,
    enter,
    private_mounts,
    rename_host,
    show_network,
)
from thinwire.lab.program import Placement, Program
from thinwire.lab.program import __file__ as program_file

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
STREAMS = ("out", "err", "result")
_CHUNK = 1 << 16
Event = tuple[object, ...]


@dataclass
class _Rank:
    """A rank as the supervisor knows it: its process, and what is still in its pipes."""

    place: Placement
    process: int
    pipes: dict[int, str]  # descriptor → stream
    rest: dict[str, bytearray] = field(default_factory=lambda: {stream: bytearray() for stream in STREAMS})
    status: int | None = None
    expected: bool = False  # its end is no failure of the run


class Ranks:
    """The ranks of one run.

    selector: to which their pipes are added.
    report: called with ("output", rank, stream, text), ("exit", rank, status, result) and, of a rank that `lose` has
    killed, ("lost", rank, status) events.
    """

    def __init__(self, selector: selectors.BaseSelector, report: Callable[[Event], None]) -> None:
        self._selector, self._report = selector, report
        self._ranks: list[_Rank] = []
        self._kill_at = float("inf")
        self._fork_at: Callable[[Placement], _Rank]
        self._separate = False

    @property
    def running(self) -> bool:
        return any(rank.status is None for rank in self._ranks)

    def start(
        self, program: Program, placements: list[Placement], host_namespaces: list[int], absent: Collection[int],
        separate: bool = False,
    ) -> None:  # fmt: skip
        """Fork every rank but the `absent` ones, which `add` may start later. In the ranks this does not return.
        separate: one that fails leaves the others alone."""
        self._separate = separate
        self._kill_at = float("inf")
        self._fork_at = lambda place: self._fork(program, place, host_namespaces[place.host_number])
        self._ranks = [_Rank(place, 0, {}, status=0) for place in placements]
        for place in placements:
            if place.rank not in absent:
                self.add(place.rank)

    def add(self, rank: int) -> None:
        """Start a rank that is not there: absent from the beginning, or lost."""
        if self._ranks[rank].status is not None:
            self._ranks[rank] = self._fork_at(self._ranks[rank].place)

    def lose(self, rank: int) -> None:
        """SIGKILL for a rank and what it started; the others go on."""
        self._ranks[rank].expected = True
        self._signal(self._ranks[rank], signal.SIGKILL)

    def _fork(self, program: Program, place: Placement, namespace: int) -> _Rank:
        pipes = [os.pipe() for _ in STREAMS]
        process = os.fork()
        if process == 0:
            _perform(program, place, [write for _, write in pipes], namespace)
        with suppress(PermissionError):  # the child does it too; whoever is first, a signal finds the group
            os.setpgid(process, process)
        rank = _Rank(place, process, {read: name for (read, _), name in zip(pipes, STREAMS)})
        for _, write in pipes:
            os.close(write)
        for descriptor in rank.pipes:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, lambda fd=descriptor: self._read(rank, fd))
        return rank

    def _read(self, rank: _Rank, descriptor: int) -> bool:
        """Read what one pipe holds and report whole lines. False once the pipe is empty or closed."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        stream = rank.pipes[descriptor]
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del rank.pipes[descriptor]
        rank.rest[stream] += data
        if stream != "result":
            self._pass_on(rank, stream, whole=bool(data))
        return bool(data)

    def _pass_on(self, rank: _Rank, stream: str, whole: bool) -> None:
        """Report the lines that have come: only `whole` ones while more may follow."""
        rest = rank.rest[stream]
        end = rest.rfind(b"\n") + 1 if whole and len(rest) < _CHUNK else len(rest)
        if end:
            self._report(("output", rank.place.rank, stream, rest[:end].decode(errors="replace")))
            del rest[:end]

    def reaped(self, process: int, status: int) -> None:
        """A child of the supervisor has ended. The first bad ending stops the other ranks, unless they are separate."""
        for rank in self._ranks:
            if rank.process == process and rank.status is None:
                self._finish(rank, os.waitstatus_to_exitcode(status))
                return

    def _finish(self, rank: _Rank, status: int) -> None:
        self._signal(rank, signal.SIGKILL)  # what it started and left behind in its group
        for descriptor in list(rank.pipes):
            while self._read(rank, descriptor):
                pass
        for descriptor in rank.pipes:  # still open: a process that left the group holds the other end
            self._selector.unregister(descriptor)
            os.close(descriptor)
        rank.pipes.clear()
        for stream in ("out", "err"):
            self._pass_on(rank, stream, whole=False)
        rank.status = status
        if rank.expected:
            self._report(("lost", rank.place.rank, status))
            return
        self._report(("exit", rank.place.rank, status, bytes(rank.rest["result"])))
        if status != 0 and not self._separate:
            self.stop()

    def stop(self) -> None:
        """SIGTERM for every rank; `tick` kills those that have not ended after GRACE seconds."""
        if self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + GRACE
            for rank in self._ranks:
                self._signal(rank, signal.SIGTERM)
                self._signal(rank, signal.SIGCONT)

    def tick(self) -> None:
        """Called regularly: kills the ranks that have not ended when the grace period is over."""
        if time.monotonic() >= self._kill_at:
            self._kill_at = time.monotonic() + GRACE
            for rank in self._ranks:
                self._signal(rank, signal.SIGKILL)

    def send_signal(self, rank: int, number: int) -> None:
        self._signal(self._ranks[rank], number)

    def _signal(self, rank: _Rank, number: int) -> None:
        if rank.status is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.process, number)


def _perform(program: Program, place: Placement, outputs: list[int], namespace: int) -> None:
    """In the child: run the rank's program, then exit. This does not return."""
    try:
        _become(place, outputs, namespace)
        program.perform(place, outputs[2])
        _leave(0)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_without_lab(error.__traceback__)))
        _leave(1)


def _leave(status: int) -> None:
    """End as the interpreter would (threads joined, exit functions run, output flushed), but without unloading
    libraries: in a forked process some of them print many lines about what they could not unload."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _without_lab(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The trace without the lab's own frames at its start."""
    ours = {__file__, program_file}
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _become(place: Placement, outputs: list[int], namespace: int) -> None:
    """In the child: enter the host's namespace, drop the capabilities to reshape its link, connect the outputs."""
    os.setpgid(0, 0)
    for number, descriptor in enumerate(outputs[:2], start=1):
        os.dup2(descriptor, number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    enter(namespace)
    private_mounts()
    show_network()
    rename_host(place.host)
    drop_network_capabilities()
