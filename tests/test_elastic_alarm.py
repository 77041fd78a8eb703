"""Members that meet, and waits that are given up: nobody waits without end, and nothing is left behind."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.elastic import alarm as alarm_module
from thinwire.elastic.alarm import Alarm
from thinwire.elastic.alarmed import AlarmedMembers, meet
from thinwire.elastic.aside import Aside, within
from thinwire.elastic.require import OneLine, require_torchft
from thinwire.torch_private.torchft import alarmed_gloo, is_connected

LIMIT = 60.0  # seconds until a test is given up
HOST = "127.0.0.1"


def all_at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """What each gives, on a thread of its own; the error where it raised one."""
    out: list[Any] = ["still under way"] * len(works)

    def run(place: int) -> None:
        try:
            out[place] = works[place]()
        except Exception as error:
            out[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return out


def open_sockets() -> int:
    """Of Python's; torch's clients of stores that are gone have others for a while."""
    return sum(type(one) is socket.socket and one.fileno() >= 0 for one in gc.get_objects())


def until(found: Callable[[], bool]) -> bool:
    """Does it become so?"""
    deadline = time.monotonic() + LIMIT
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()


ENDS = """
import sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from thinwire.elastic import alarm as alarm_module
from thinwire.elastic.alarm import Alarm

class Slow:
    def __del__(self):
        time.sleep(2)  # the end of the interpreter, as long as that of large programs

slow, store, group = Slow(), dist.HashStore(), {}
def make(rank):
    group[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1))
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
alarm = Alarm(store, 0, 1, "127.0.0.1", 20.0)
threading.Timer(0.2, alarm.ring, ["a test gives up"]).start()
try:
    alarm.wait_for(group[0].recv([torch.empty(9)], 1, 0).wait)
except RuntimeError as error:
    sys.exit(str(error))
"""


def test_a_program_ends_with_its_own_line_while_gloo_still_waits():
    """Otherwise the thread that waits ends it with SIGABRT, when it comes back after Python has ended."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, "a test gives up"), done.stderr


def test_what_comes_after_its_time_is_undone():
    go, undone = threading.Event(), []
    with pytest.raises(TimeoutError, match=r"no answer within 0.05 s"):
        within(0.05, lambda: go.wait(LIMIT), undone.append)
    assert not undone
    go.set()
    assert until(lambda: undone == [True])
    assert within(LIMIT, lambda: 3, undone.append) == 3 and undone == [True]
    with pytest.raises(SystemExit):
        within(LIMIT, lambda: sys.exit(1), undone.append)


def test_a_forked_process_uses_no_thread_that_it_has_not():
    assert within(LIMIT, lambda: 3, id) == 3
    time.sleep(0.1)  # the thread is idle now
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if within(5.0, lambda: 4, id) == 4 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


STORE = "import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
def test_a_member_that_is_frozen_when_the_others_meet_is_not_waited_for_without_end():
    """It has the store of their quorum: torch's client waits for its answer for as long as it is frozen."""
    frozen = subprocess.Popen(
        [sys.executable, "-c", f"{STORE}; print(s.port, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    try:
        assert frozen.stdout is not None
        address = f"{HOST}:{int(frozen.stdout.readline())}/quorum/1"
        os.kill(frozen.pid, signal.SIGSTOP)
        (said,) = all_at_once([lambda: meet(HOST, timedelta(seconds=1), address, 1, 2)])
        assert isinstance(said, TimeoutError) and str(said) == "no answer within 1 s"
        os.kill(frozen.pid, signal.SIGCONT)
    finally:
        frozen.kill()
        frozen.wait()


class Beset(dist.Store):
    """A store in front of one: who reads a member's address first sends strangers there."""

    def __init__(self, store: dist.Store, greetings: list[bytes]) -> None:
        super().__init__()
        self.store, self.greetings = store, greetings
        self.strangers: list[socket.socket] = []

    def set(self, key: str, value: str) -> None:
        host, port, token = json.loads(value)
        for greeting in self.greetings:
            stranger = socket.create_connection((host, port))
            stranger.sendall(greeting.replace(b"TOKEN", token.encode()))
            self.strangers.append(stranger)
        self.store.set(key, value)

    def wait(self, keys: list[str], limit: timedelta) -> None:  # type: ignore[override]
        self.store.wait(keys, limit)

    def get(self, key: str) -> bytes:
        return self.store.get(key)


def test_strangers_keep_nobody_waiting():
    """One says nothing, one half a greeting, one a wrong one; one has gone already."""
    before, plain = open_sockets(), dist.HashStore()
    store = Beset(plain, [b"", b"TOKEN"[:3], b"x" * 36, b"GET / HTTP/1.1\r\n\r\n" * 9])
    alarms = all_at_once(
        [lambda rank=rank: Alarm(store if rank == 0 else plain, rank, 3, HOST, LIMIT) for rank in range(3)]
    )
    assert [sorted(alarm.peers) for alarm in alarms] == [[1, 2], [0, 2], [0, 1]], alarms
    assert all(stranger.recv(1) == b"" for stranger in store.strangers[2:3]), "the wrong greeting is hung up on"
    for one in (*alarms, *store.strangers):
        one.leave() if isinstance(one, Alarm) else one.close()
    assert until(lambda: open_sockets() == before)


def test_who_calls_in_the_place_of_another_ends_the_meeting():
    """Somebody knows the token, as members do, and a rank that cannot be: no connection is left."""
    before = open_sockets()
    store = Beset(dist.HashStore(), [b"TOKEN" + (7).to_bytes(4, "big")])
    (said,) = all_at_once([lambda: Alarm(store, 0, 2, HOST, LIMIT)])
    assert isinstance(said, ConnectionError) and "as member 7" in str(said)
    store.strangers.pop().close()
    assert open_sockets() == before


def test_a_member_that_dies_before_it_has_connected_is_given_up():
    """1 has told where it is, and is gone; 2 has told nothing. Those who are left get an error, and keep no socket."""
    before, store = open_sockets(), dist.HashStore()
    with socket.create_server((HOST, 0)) as closed:
        store.set("thinwire/1", json.dumps([HOST, closed.getsockname()[1], "0" * 32]))
    said = all_at_once([lambda rank=rank: Alarm(store, rank, 4, HOST, 1.0) for rank in (0, 3)])
    assert isinstance(said[0], TimeoutError) and isinstance(said[1], OSError), said
    assert open_sockets() == before


class Breaking(Aside):
    """A wait that fails while its caller looks at it: it was not through at the first two looks."""

    looks = 0

    @property
    def done(self) -> bool:  # type: ignore[override]
        self.looks += 1
        return self.looks > 2

    @done.setter
    def done(self, value: bool) -> None:
        self.error = RuntimeError("the connection is closed")


def test_a_wait_that_fails_as_the_alarm_rings_is_no_success(monkeypatch):
    """A death closes Gloo's connections and the alarm's at the same time."""
    monkeypatch.setattr(alarm_module, "Aside", Breaking)
    alarm = Alarm(dist.HashStore(), 0, 1, HOST, 1.0)
    alarm.ring("member 1 is gone")
    with pytest.raises(RuntimeError, match="member 1 is gone"):
        alarm.wait_for(lambda: None)


class Pair(AlarmedMembers):
    """One of two members in this process."""

    backends, alarm = "gloo", None

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.alarm = Alarm(store, rank, 2, HOST, 1.0)
        self.group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=2))

    def process_group(self) -> dist.ProcessGroup:
        return self.group


def test_a_sum_that_is_started_is_left_when_the_alarm_rings():
    store = dist.HashStore()
    first, second = all_at_once([lambda rank=rank: Pair(store, rank) for rank in range(2)])
    sums = [torch.full((4,), float(rank)) for rank in range(2)]
    works = [member.start_all_reduce(x) for member, x in zip((first, second), sums)]
    assert all_at_once([work.wait for work in works]) == [True, True]
    assert all(x.tolist() == [1.0] * 4 for x in sums)
    x = torch.ones(4)
    work = first.start_all_reduce(x)
    second.alarm.ring("it gives up")
    (said,) = all_at_once([work.wait])
    assert isinstance(said, RuntimeError) and str(said) == "member 1 gave the step up" and x.tolist() == [1.0] * 4


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
def test_a_group_is_made_by_either_of_torchfts_interfaces():
    """By `reconfigure`, as later versions do, then by `configure`, as 0.2.0 does: the alarm before is left in peace."""
    limit, store = timedelta(seconds=20), dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    groups = [alarmed_gloo(partial(meet, HOST, limit), HOST, limit) for _ in range(2)]
    handles = [json.dumps({"id": f"member {rank}", "store": f"{HOST}:{store.port}"}) for rank in range(2)]

    def join(rank: int, later: bool) -> list[float]:
        group, x = groups[rank], torch.full((3,), 1.0 + rank)
        if later:
            group._handle_id = lambda: f"member {rank}"
            assert group.reconfigure(SimpleNamespace(handles=handles, uuid="first")).wait()
        else:
            group.configure(f"{HOST}:{store.port}/second", "a name", rank, 2)
        group.parent.allreduce([x], dist.AllreduceOptions()).wait()
        return x.tolist()

    assert all_at_once([partial(join, rank, True) for rank in range(2)]) == [[3.0] * 3] * 2
    before = [group.alarm for group in groups]
    assert all_at_once([partial(join, rank, False) for rank in range(2)]) == [[3.0] * 3] * 2
    assert {alarm.reason for alarm in before} == {"this member has left"}
    assert all(is_connected(group) and not group.alarm.reason for group in groups)
    groups[0].shutdown()
    assert not is_connected(groups[0]) and until(lambda: groups[1].alarm.reason == "member 0 gave the step up")
    groups[1].leave()


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
def test_torchfts_log_has_no_tracebacks_of_what_is_usual(caplog):
    require_torchft()
    require_torchft()
    logger = logging.getLogger("torchft.manager")
    assert sum(isinstance(one, OneLine) for one in logger.filters) == 1
    try:
        raise ConnectionError("pulled")
    except ConnectionError as error:
        logger.exception(f"got exception in pg configure: {error}")
    assert "pulled" in caplog.text and "Traceback" not in caplog.text
    logger.warning("Unable to reset NCCL flight recorder recording so traces will be incorrect.")
    assert "NCCL" not in caplog.text
