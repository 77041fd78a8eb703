"""Cases that the ranks of one launch run in turn, and how a failure comes back: by case, rank and value.

A case is a function without arguments (`functools.partial` gives it some) that calls `check` for all it expects.

- A check that fails is recorded and the case goes on, so this rank stays in step with the others.
- An exception ends the case on this rank, which then leaves its process group. The others fail in the collective they
  wait in, at once or after LIMIT. Before the next case all ranks make a new process group.
- Failures carry the time, so that a test shows the first one first and not what followed from it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from thinwire.collectives.groups import Group
from thinwire.collectives.messages import gather
from thinwire.errors import UsageError

LIMIT = datetime.timedelta(seconds=30)  # how long a collective may wait for a rank
MOST_BROKEN = 3  # cases that may end by an exception; the rest is not run, for a launch has its time-out too

Case = Callable[[], None]


class Failure(NamedTuple):
    """What failed on a rank; sorted by time."""

    at: float  # of time.monotonic, which all ranks of a machine share
    rank: int
    message: str


Found = dict[str, list[Failure]]  # by the name of the case
_failures: list[Failure] = []  # of the case that this process runs now


def check(condition: object, message: str) -> None:
    """Record a failure of the running case unless `condition` holds; `message` names the values."""
    if not condition:
        _failures.append(Failure(time.monotonic(), int(os.environ["RANK"]), message))


@contextlib.contextmanager
def refused(words: str, error: type[Exception] = UsageError) -> Iterator[None]:
    """Check that the block raises `error`, in one line that contains `words`."""
    try:
        yield
    except error as said:
        check(words in str(said) and "\n" not in str(said), f"expected an error with {words!r}, not {str(said)!r}")
    else:
        check(False, f"nothing was raised, but expected {error.__name__} with {words!r}")


Tensors = Mapping[str, Tensor | None]


def differences(a: Tensors, b: Tensors, tolerance: float = 0.0, relative: float = 1e-5) -> list[str]:
    """By how much tensors of the same names differ; without a tolerance they must be equal to the bit."""
    found = []
    for name, x in a.items():
        y = b[name]
        if x is None or y is None:
            if x is not y:
                found.append(f"{name} is None on one side only")
        elif not (torch.equal(x, y) if tolerance == 0 else torch.allclose(x, y, rtol=relative, atol=tolerance)):
            found.append(f"{name} differs by {(x - y).abs().max():.2e}")
    return found


def check_equal(what: str, a: Tensors, b: Tensors, tolerance: float = 0.0, relative: float = 1e-5) -> None:
    """Check that there are no `differences`."""
    for found in differences(a, b, tolerance, relative):
        check(False, f"{what}: {found}")


def check_ranks_agree(what: str, values: nn.Module | Tensors, group: Group = None) -> None:
    """Check that all ranks of the group hold the same bits."""
    tensors = dict(values.named_parameters()) if isinstance(values, nn.Module) else values
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values() if tensor is not None])
    for rank, other in enumerate(gather(flat, group)):
        check(torch.equal(other, flat), f"{what}: rank {rank} of the group holds other bits")


def name_of(case: Case) -> str:
    """The function's name, with the arguments that a `partial` gives it."""
    if isinstance(case, functools.partial):
        words = [value.__name__ if inspect.isfunction(value) else repr(value) for value in case.args]
        return f"{case.func.__name__}({', '.join(words)})"
    return case.__name__


class Ranks:
    """This rank among those of the launch: their process group, which can be made anew, and what they agree on."""

    def __init__(self, prepare: Case | None) -> None:
        self.prepare, self.rounds = prepare, 0
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, self.size, self.rank == 0, timeout=2 * LIMIT)

    def join(self) -> None:
        """A new process group of all ranks."""
        self.rounds += 1
        store = dist.PrefixStore(f"group {self.rounds}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=LIMIT)
        if self.prepare is not None:
            self.prepare()

    def any(self, about: str, mine: bool) -> bool:
        """Is it so on any rank? Over the store, as a process group may be broken."""
        self.store.set(f"{about}/{self.rank}", str(int(mine)))
        answers = [self.store.get(f"{about}/{rank}") for rank in range(self.size)]  # waits for every rank
        return b"1" in answers


def run_cases(cases: Sequence[Case], prepare: Case | None = None) -> Found:
    """What a rank runs: all cases in turn, after `prepare` in every new process group."""
    ranks, found, broken = Ranks(prepare), {}, 0
    torch.set_num_threads(1)  # all ranks share this machine's cores
    with mock.patch.object(c10d, "default_pg_timeout", LIMIT):  # also of the groups that the cases make
        ranks.join()
        for number, case in enumerate(cases):
            name = name_of(case)
            print(f"case {name}", flush=True)  # the last line of a rank that never comes back
            if broken == MOST_BROKEN:
                found[name] = [Failure(time.monotonic(), ranks.rank, f"not run: {broken} cases before it broke")]
                continue
            finished = _run(case)
            found[name] = list(_failures)
            if ranks.any(f"broken/{number}", not finished):
                broken += 1
                _leave()
                ranks.join()
        _leave()
    return found


def _run(case: Case) -> bool:
    """Was it run to its end?"""
    _failures.clear()
    try:
        case()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        here = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("_cases.py")]
        check(False, f"{type(error).__name__}: {error} ({_place(here[-1])}, raised in {_place(place)})")
        _leave()
        return False
    return True


def _place(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
