"""What a rank runs (a command, a Python program in a warmed fork, a function), and the variables it finds."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import UsageError
from thinwire.lab.topology import Topology
from thinwire.lab.wiring import DEVICE

FIRST_PORT, PORTS = 29500, 1000


@dataclass(frozen=True)
class Seat:
    """One rank's place."""

    rank: int
    host_number: int
    host: str
    local_rank: int
    label: str  # what stands before its output

    def variables(self, topology: Topology, per_host: int, run: int) -> dict[str, str]:
        """What torchrun would set (rank 0 serves the store), and the device the collectives should use."""
        world = len(topology.hosts) * per_host
        values: dict[str, object] = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": self.host_number,
            "GROUP_WORLD_SIZE": len(topology.hosts),
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "MASTER_ADDR": topology.hosts[0].address,
            "MASTER_PORT": FIRST_PORT + run % PORTS,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "thinwire-lab",
            "GLOO_SOCKET_IFNAME": DEVICE,
            "NCCL_SOCKET_IFNAME": DEVICE,
        }
        return {name: str(value) for name, value in values.items()}


def seats(topology: Topology, per_host: int) -> list[Seat]:
    """Ranks fill the hosts in order."""
    result = []
    for number, host in enumerate(topology.hosts):
        for local in range(per_host):
            label = host.name if per_host == 1 else f"{host.name}.{local}"
            result.append(Seat(number * per_host + local, number, host.name, local, label))
    return result


class Program(Protocol):
    """Sent to the keeper by pickle; `perform` is called in the rank, and when it returns the rank ends."""

    def perform(self, seat: Seat, result: int) -> None: ...


@dataclass(frozen=True)
class Command:
    """Any program, executed."""

    words: Sequence[str]
    variables: Sequence[dict[str, str]]  # the environment of each rank
    folder: str

    def perform(self, seat: Seat, result: int) -> None:
        try:
            os.chdir(self.folder)
            os.execvpe(self.words[0], list(self.words), self.variables[seat.rank])
        except OSError as error:
            os.write(2, f"cannot run {self.words[0]}: {error.strerror}\n".encode())
            os._exit(127)


@dataclass(frozen=True)
class PythonProgram:
    """`python FILE …` or `python -m MODULE …` in a fork of the keeper, where torch is imported already."""

    words: Sequence[str]  # FILE … or -m MODULE …
    variables: Sequence[dict[str, str]]
    folder: str

    def perform(self, seat: Seat, result: int) -> None:
        _settle(self.variables[seat.rank], self.folder)
        if self.words[0] == "-m":
            sys.argv = list(self.words[1:])
            sys.path.insert(0, self.folder)
            runpy.run_module(self.words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(self.words)
            sys.path.insert(0, str(Path(self.words[0]).resolve().parent))
            _run_file(self.words[0])


@dataclass(frozen=True)
class Function:
    """A function of a module, called in a fork of the keeper; what it returns goes back by pickle."""

    call: bytes  # (function, arguments), pickled: by reference, so that it is imported in the rank
    main: dict[str, Any]  # how multiprocessing describes the launcher's main module, path and folder
    variables: Sequence[dict[str, str]]
    folder: str

    def perform(self, seat: Seat, result: int) -> None:
        _settle(self.variables[seat.rank], self.folder)
        spawn.prepare(self.main)
        function, arguments = pickle.loads(self.call)
        answer = pickle.dumps(function(*arguments))
        with open(result, "wb") as pipe:
            pipe.write(answer)


def describe_function(function: Any, arguments: tuple[Any, ...]) -> tuple[bytes, dict[str, Any]]:
    """Pickle a call in the launcher; what cannot travel is the user's mistake."""
    try:
        call = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"cannot send {getattr(function, '__qualname__', function)} to the ranks: {error}; "
            "a rank's function must be defined at the top level of a module, and its arguments must pickle"
        ) from None
    main = spawn.get_preparation_data("rank")
    return call, {key: main[key] for key in main if key not in {"authkey", "start_method"}}


def python_words(words: Sequence[str]) -> list[str]:
    """The part of a Python command line that a warmed fork can run; refuses what it cannot."""
    program, rest = words[0], list(words[1:])
    while rest and rest[0] == "-u":
        del rest[0]
    interpreter = Path(program).name.startswith("python") or program == sys.executable
    if not interpreter or not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        raise UsageError(f"--preload runs `python FILE …` or `python -m MODULE …`, not {' '.join(words)!r}")
    if rest[0] != "-m" and not Path(rest[0]).is_file():
        raise UsageError(f"no such program: {rest[0]}")
    return rest


def _settle(variables: dict[str, str], folder: str) -> None:
    """In the fork: the rank's environment, folder, and output line by line."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _run_file(path: str) -> None:
    """Run a file as the main module, as the interpreter would."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
