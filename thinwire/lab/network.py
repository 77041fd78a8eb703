"""A slow network on this machine, as a Python object."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.client import Client
from thinwire.lab.errors import LabError
from thinwire.lab.job import Job, Results
from thinwire.lab.netlink import Traffic
from thinwire.lab.program import (
    Command,
    Function,
    Program,
    PythonProgram,
    describe_function,
    placements,
    python_words,
)
from thinwire.lab.ranks import Event
from thinwire.lab.topology import MTU, SUBNET, Host, HostLink, Topology, flat, load, make_link, make_tcp
from thinwire.quantities import parse_time

PRELOAD_SECONDS = 180.0


class Network:
    """Hosts with shaped links between them, for the length of a `with` block.

        with Network(hosts=4, rate="100mbit") as net:
            results = net.run(function, argument)     # on every host; one return value per rank
            print(results[0], results.traffic["host0"].sent)

    `rate` sets both directions, `up` and `down` each; `latency` is one way, host to host; `loss` and `reorder` are
    the chances that a packet is lost, or comes late; `mtu` is the largest packet. `congestion` is the hosts' congestion
    control by name, `window` the bytes that a connection may have under way, `slow_start_after_idle` whether one that
    has been silent starts slowly again. `topology` is a TOML file (or a `Topology`) instead of all these. `preload`
    names modules to import once, before ranks are forked for a function. `patience` is how long TCP in the hosts
    retries before it reports a dead link. `end_dead`: end a run whose ranks do not notice that, as Gloo's sometimes do.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | float | None = None,
        *,
        up: str | float | None = None,
        down: str | float | None = None,
        latency: str | float = 0.0,
        loss: str | float = 0.0,
        reorder: str | float = 0.0,
        congestion: str | None = None,
        window: str | int | None = None,
        slow_start_after_idle: bool = True,
        topology: str | Path | Topology | None = None,
        subnet: str = SUBNET,
        mtu: int = MTU,
        preload: Sequence[str] = ("torch",),
        patience: str | float = 10.0,
        end_dead: bool = True,
    ) -> None:
        if isinstance(topology, Topology):
            self.topology = topology
        elif topology is not None:
            self.topology = load(topology, subnet)
        else:
            given = {"rate": rate, "up": up, "down": down, "congestion": congestion, "window": window}
            table: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
            table |= {"latency": latency, "loss": loss, "reorder": reorder}
            tcp = make_tcp(table | {"slow_start_after_idle": slow_start_after_idle})
            self.topology = flat(hosts, make_link(table, ""), subnet, mtu, tcp)
        self.preload = tuple(preload)
        self._patience = parse_time(patience, "patience")
        self._end_dead = end_dead
        self._rates: dict[str, HostLink] = dict(self.topology.links)
        self._client: Client | None = None
        self._job: Job | None = None
        self._warm = False
        self._runs = 0
        self.delay = "none"  # how latency is made: by netem, in user space
        self.notes: list[str] = []  # what this machine does not allow, in words
        self.setup_seconds = 0.0

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.topology.hosts

    def __enter__(self) -> Network:
        began = time.monotonic()
        self._client = Client(self._on_event, _variables({}))
        try:
            made = self._ask("build", self.topology, self._patience, self._end_dead)
        except BaseException:
            self.close()
            raise
        self.delay, self.notes = made["delay"], made["notes"]
        self.setup_seconds = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process in the network, and the network."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def run(
        self,
        program: Callable[..., Any] | Sequence[str],
        *arguments: Any,
        per_host: int = 1,
        timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
        echo: bool = True,
    ) -> Results:
        """Run a command (a list of words) or a function on every host, and wait for it.

        A function must be importable by its module and name; `arguments` are given to it. `echo` passes the
        ranks' output on, each line with its host before it.
        """
        return self.start(program, *arguments, per_host=per_host, env=env, echo=echo).wait(timeout)

    def start(
        self,
        program: Callable[..., Any] | Sequence[str],
        *arguments: Any,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
        echo: bool = True,
        fork: bool = False,
        absent: Collection[int] = (),
        separate: bool = False,
    ) -> Job:
        """Like `run`, without waiting. `fork` runs a Python command in forks of the preloaded process. `absent`: ranks
        that are not started, until `Job.add`. `separate`: a rank that fails leaves the others alone."""
        if self._job is not None and not self._job.done:
            raise UsageError("a program is running on this network already")
        if per_host < 1:
            raise UsageError(f"per_host {per_host!r}: allowed is a whole number from 1")
        places = placements(self.topology, per_host)
        base = _variables(env or {})
        variables = [base | place.variables(self.topology, per_host, self._runs) for place in places]
        ready = self._program(program, arguments, variables, fork)
        self._runs += 1
        self._job = Job(self._open(), places, echo, absent, separate)
        self._ask("start", ready, per_host, list(absent), separate)
        return self._job

    def _program(
        self,
        program: Callable[..., Any] | Sequence[str],
        arguments: tuple[Any, ...],
        variables: list[dict[str, str]],
        fork: bool,
    ) -> Program:
        folder = str(Path.cwd())
        if callable(program):
            call, main = describe_function(program, arguments)
            self._preload()
            return Function(call, main, variables, folder)
        words = [str(word) for word in (*program, *arguments)]
        if fork:
            words = python_words(words)
            self._preload()
            return PythonProgram(words, variables, folder)
        if words and words[0] in ("python", "python3"):
            words[0] = sys.executable  # the one that has what we have, as with torchrun
        if not words or shutil.which(words[0], path=variables[0].get("PATH")) is None:
            raise UsageError(f"no such command: {words[0] if words else '(none)'}")
        return Command(words, variables, folder)

    def _preload(self) -> None:
        if not self._warm:
            self._open().ask("preload", list(self.preload), sys.path, limit=PRELOAD_SECONDS)
            self._warm = True

    def traffic(self) -> dict[str, Traffic]:
        """Per link (hosts, and sites where there are several), what has crossed since it was made."""
        return self._open().traffic()

    def set_rate(
        self,
        link: str | int,
        rate: str | float | None = None,
        *,
        up: str | float | None = None,
        down: str | float | None = None,
    ) -> None:
        """Change the rate of a host's link or a site's uplink while it is in use; "unlimited" lifts it."""
        name, old = self._link(link)
        table = {key: value for key, value in (("rate", rate), ("up", up), ("down", down)) if value is not None}
        if not table:
            raise UsageError("set_rate needs a rate, up or down")
        new = make_link(table, f"link {name} ", old)
        self._ask("rate", name, new.up, new.down)
        self._rates[name] = new

    def link_down(self, link: str | int) -> None:
        """Cut the link of a host or the uplink of a site."""
        self._ask("connect", self._link(link)[0], False)

    def link_up(self, link: str | int) -> None:
        """Restore a link that `link_down` cut."""
        self._ask("connect", self._link(link)[0], True)

    def _link(self, link: str | int) -> tuple[str, HostLink]:
        names = list(self._rates)
        if isinstance(link, int) and 0 <= link < len(self.hosts):
            link = self.hosts[link].name
        if link not in self._rates:
            raise UsageError(f"no link {link!r}; the links are {', '.join(names)}")
        return str(link), self._rates[str(link)]

    def _ask(self, request: str, *arguments: Any) -> Any:
        return self._open().ask(request, *arguments)

    def _open(self) -> Client:
        if self._client is None:
            raise LabError("the network is not open: use it in a `with` block")
        return self._client

    def _on_event(self, event: Event) -> None:
        if self._job is not None:
            self._job.handle(event)


def _variables(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for the ranks. By default output is not buffered and each rank has one thread: all
    hosts share this machine's cores (torchrun does the same)."""
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | dict(os.environ) | dict(extra)
