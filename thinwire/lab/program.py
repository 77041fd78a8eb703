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
class Placement:
    """Where one rank runs: its number, its host, and its number among the host's ranks."""

    rank: int
    host_number: int
    host: str
    local_rank: int
    label: str  # printed before each line of its output

    def variables(self, topology: Topology, per_host: int, run: int) -> dict[str, str]:
        """The variables that torchrun would set (rank 0 serves the store), and the device for the collectives.

        run: the number of the run on this network; every run gets another port."""
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


def placements(topology: Topology, per_host: int) -> list[Placement]:
    """Where each rank runs: `per_host` consecutive ranks on each host, in the hosts' order."""
    result = []
    for number, host in enumerate(topology.hosts):
        for local in range(per_host):
            label = host.name if per_host == 1 else f"{host.name}.{local}"
            result.append(Placement(number * per_host + local, number, host.name, local, label))
    return result


class Program(Protocol):
    """What every rank runs. It is sent to the supervisor by pickle; the rank ends when `perform` returns.

    perform(place, result): called in the rank; `result` is the descriptor to which it writes its result.
    """

    def perform(self, place: Placement, result: int) -> None: ...


@dataclass(frozen=True)
class Command:
    """Any program, executed: its words, the environment per rank, and the working folder."""

    words: Sequence[str]
    variables: Sequence[dict[str, str]]  # the environment of each rank
    folder: str

    def perform(self, place: Placement, result: int) -> None:
        try:
            os.chdir(self.folder)
            os.execvpe(self.words[0], list(self.words), self.variables[place.rank])
        except OSError as error:
            os.write(2, f"cannot run {self.words[0]}: {error.strerror}\n".encode())
            os._exit(127)


@dataclass(frozen=True)
class PythonProgram:
    """`python FILE …` or `python -m MODULE …` in a fork of the supervisor, which has imported torch already."""

    words: Sequence[str]  # FILE … or -m MODULE …
    variables: Sequence[dict[str, str]]
    folder: str

    def perform(self, place: Placement, result: int) -> None:
        _prepare(self.variables[place.rank], self.folder)
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
    """A function of a module, called in a fork of the supervisor; what it returns goes back by pickle."""

    call: bytes  # (function, arguments), pickled: by reference, so that it is imported in the rank
    main: dict[str, Any]  # how multiprocessing describes the launcher's main module, path and folder
    variables: Sequence[dict[str, str]]
    folder: str

    def perform(self, place: Placement, result: int) -> None:
        _prepare(self.variables[place.rank], self.folder)
        spawn.prepare(self.main)
        function, arguments = pickle.loads(self.call)
        answer = pickle.dumps(function(*arguments))
        with open(result, "wb") as pipe:
            pipe.write(answer)


def describe_function(function: Any, arguments: tuple[Any, ...]) -> tuple[bytes, dict[str, Any]]:
    """The pickled call, and what the rank needs to import it; UsageError where function or arguments do not pickle."""
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
    """A Python command line without its interpreter and -u; UsageError where a fork cannot run it."""
    program, rest = words[0], list(words[1:])
    while rest and rest[0] == "-u":
        del rest[0]
    interpreter = Path(program).name.startswith("python") or program == sys.executable
    if not interpreter or not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        raise UsageError(f"--preload runs `python FILE …` or `python -m MODULE …`, not {' '.join(words)!r}")
    if rest[0] != "-m" and not Path(rest[0]).is_file():
        raise UsageError(f"no such program: {rest[0]}")
    return rest


def _prepare(variables: dict[str, str], folder: str) -> None:
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
