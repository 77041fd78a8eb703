"""The process that owns a network: it makes the network and forks the ranks in it; the network ends when it ends.

    launcher ── guard ── supervisor (process 1 of its own process namespace) ── ranks, delay

The guard only waits for either to end. When the launcher ends, in whatever way, the guard exits. The supervisor's
parent-death signal then kills the supervisor, and with process 1 the kernel kills everything in the namespace.
The network namespaces are held only by descriptors of these processes, so they end with them.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import select
import selectors
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.namespaces import (
    NEW_PIDS,
    become_own_root,
    die_with_parent,
    private_mounts,
    replace_file,
    show_processes,
    unshare,
)
from thinwire.lab.netlink import Traffic
from thinwire.lab.program import Program, placements
from thinwire.lab.ranks import Event, Ranks
from thinwire.lab.topology import Topology
from thinwire.lab.wiring import Wiring, netem_exists

TICK = 0.02  # how often ended ranks are noticed
LOOK_SECONDS = 1.0  # how often links are checked
NOTICE_SECONDS = 3.0  # how long ranks may take to notice a connection that was given up
RELAY_RATE = 5e8  # bit/s; what the user-space delay carries with ease
USER_SPACE_NOTE = "this kernel has no netem: latency is made in user space, and may itself limit links above 500mbit"
HOSTS_FILE = "/etc/hosts"


def guard(control: int, launcher: int) -> None:
    """The guard process: start the supervisor, wait until it or the launcher ends, exit.

    control: descriptor of the connection to the launcher. launcher: descriptor of the launcher's process (pidfd).
    """
    os.set_inheritable(control, False)
    connection: Connection[Any, Any] = Connection(control)
    try:
        become_own_root()
        unshare(NEW_PIDS)
    except OSError as error:
        connection.send(("unavailable", "a user namespace", error.errno, str(error)))
        return
    armed, ready = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        die_with_parent()
        os.write(ready, b"1")
        Supervisor(connection).serve()
        return
    connection.close()
    os.close(ready)
    os.read(armed, 1)  # the guard may exit only after the supervisor has set its parent-death signal
    select.select([launcher, os.pidfd_open(supervisor)], [], [])
    os._exit(0)


class DeadLinks:
    """Detects a link that is dead while the program goes on waiting.

    TCP reports to the program when it gives a connection up, but Gloo does not always pass that on (seen in one of
    four tries with torch 2.13): its ranks then wait for the group's own time-out, half an hour. So when a host's TCP
    has given up and no rank has ended in NOTICE_SECONDS, the run is ended with that reason.

    before: connections given up per host before the run.
    """

    def __init__(self, before: dict[str, int] | None = None) -> None:
        self._before = before or {}
        self._next_look = 0.0
        self._since = float("inf")

    def due(self) -> bool:
        """Is it time to check the links again?"""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return True

    def dead(self, given_up: dict[str, int]) -> str | None:
        """The name of a host that lost a connection, once its ranks have had time to notice.

        given_up: connections given up per host so far."""
        lost = next((host for host, count in given_up.items() if count > self._before.get(host, 0)), None)
        if lost is None:
            return None
        self._since = min(self._since, time.monotonic())
        return lost if time.monotonic() - self._since > NOTICE_SECONDS else None


class Supervisor:
    """Answers the launcher's requests, one method `do_…` per request, and reports what the ranks do."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._ranks = Ranks(self._selector, self._report)
        self._wiring: Wiring | None = None
        self._delays: int | None = None
        self._links = DeadLinks()
        self._end_dead = True

    def serve(self) -> None:
        """Serve requests until the launcher closes the connection."""
        self._selector.register(self._connection, selectors.EVENT_READ, self._answer)
        try:
            while True:
                for key, _ in self._selector.select(TICK if self._ranks.running else 1.0):
                    key.data()
                self._reap()
                self._ranks.tick()
                self._look_at_links()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)

    def _look_at_links(self) -> None:
        if self._end_dead and self._ranks.running and self._links.due():
            host = self._links.dead(self._network.given_up())
            if host is not None:
                self._report(("dead", host))
                self._ranks.stop()

    def _report(self, event: Event) -> None:
        self._connection.send(event)

    def _answer(self) -> None:
        name, arguments = self._connection.recv()
        request: Callable[..., Any] = getattr(self, f"do_{name}")
        try:
            answer: Event = ("reply", request(*arguments))
        except OSError as error:
            answer = ("unavailable", name, error.errno, str(error))
        except UsageError as error:
            answer = ("refused", str(error))
        self._connection.send(answer)

    def _reap(self) -> None:
        """Collect ended children; as process 1 we also get those whose parents left them."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process == self._delays:
                self._report(("broken", "the process that delays packets has ended"))
            self._ranks.reaped(process, status)

    @property
    def _network(self) -> Wiring:
        assert self._wiring is not None, "a request before the network was built"
        return self._wiring

    def do_build(self, topology: Topology, patience: float, end_dead: bool) -> dict[str, Any]:
        """Make the network; returns how latency is made, and notes on what could not be done."""
        self._end_dead = end_dead
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a host takes two descriptors, a rank three
        private_mounts()
        show_processes()
        late = topology.delayed
        netem = late and not topology.reordered and netem_exists()  # netem's reordering is of another kind
        self._wiring = Wiring(topology, netem, patience)
        self._delays = self._wiring.start_delays()
        notes = list(self._wiring.notes)
        if self._delays is not None and topology.faster_than(RELAY_RATE):
            notes.append(USER_SPACE_NOTE)
        try:
            replace_file(HOSTS_FILE, _hosts_file(topology))
        except OSError as error:
            notes.append(f"hosts are known by address only: {error}")
        return {"delay": ("netem" if netem else "user space") if late else "none", "notes": notes}

    def do_netem(self) -> bool:
        return netem_exists()

    def do_preload(self, modules: list[str], path: list[str]) -> None:
        """Import what every rank will need, once, before forking."""
        sys.path[:] = path
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                raise UsageError(f"cannot preload {module!r}: {type(error).__name__}: {error}") from None
        gc.freeze()  # so that a collection in a rank does not copy what it shares with the others

    def do_start(self, program: Program, per_host: int, absent: list[int], separate: bool) -> None:
        self._links = DeadLinks(self._network.given_up())
        places = placements(self._network.topology, per_host)
        self._ranks.start(program, places, self._network.host_namespaces, absent, separate)

    def do_lose(self, rank: int) -> None:
        self._ranks.lose(rank)

    def do_add(self, rank: int) -> None:
        self._ranks.add(rank)

    def do_signal(self, rank: int, number: int) -> None:
        self._ranks.send_signal(rank, number)

    def do_stop(self) -> None:
        self._ranks.stop()

    def do_counters(self) -> dict[str, Traffic]:
        return self._network.counters()

    def do_rate(self, link: str, up: float | None, down: float | None) -> None:
        self._network.set_rate(link, up, down)

    def do_connect(self, link: str, connected: bool) -> None:
        self._network.set_connected(link, connected)


def _hosts_file(topology: Topology) -> str:
    """Names for addresses and back; torch looks them up in their IPv6 form too."""
    lines = [f"{form}{host.address} {host.name}\n" for host in topology.hosts for form in ("", "::ffff:")]
    return "127.0.0.1 localhost\n" + "".join(lines)
