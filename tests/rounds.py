"""How many latencies of a step pass one after another: a recorder of messages and waits, and a clock over its records.

Every rank records, per thread and in order, when it posts a receive, sends, and waits for a message, and when work goes
to a communication thread and comes back. Afterwards a clock runs over all ranks' records: computing takes no time, and
a message arrives one latency after it could leave. Gloo sends it when the receiver's word that it waits has come, which
takes a latency too: a message leaves at max(sent, posted + 1) and arrives at that + 1. So the clock's time is the
number of latencies, but for the turns that threads of one rank take.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from thinwire.distributed.thread import CommunicationThread

Event = tuple[Any, ...]
Log = dict[str, list[Event]]  # events of one rank, by thread
COLLECTIVES = ("allreduce", "broadcast", "allgather", "barrier", "reduce", "gather", "scatter")


@contextmanager
def recording() -> Iterator[tuple[Log, Callable[[], None]]]:
    """Record everything that this rank sends, receives and waits for, from before its first message. (the record, a
    function that marks a place in it)."""
    log: Log = {}
    numbers: Counter[Any] = Counter()
    of_work: dict[int, tuple[Any, Any]] = {}  # by id: the work itself, so that no other takes its id, and its message
    lock = threading.Lock()

    def note(*event: Any) -> None:
        log.setdefault(threading.current_thread().name, []).append(event)

    def numbered(message: Any) -> Any:
        with lock:
            numbers[message] += 1
            return (*message, numbers[message])

    def send(group: Any, tensors: Any, to: int, tag: int = 0) -> Any:
        note("send", numbered((group.group_name, group.rank(), to, tag)))
        return send.original(group, tensors, to, tag)

    def recv(group: Any, tensors: Any, source: int, tag: int = 0) -> Any:
        message = numbered((group.group_name, source, group.rank(), tag))
        note("post", message)
        work = recv.original(group, tensors, source, tag)
        of_work[id(work)] = work, message
        return work

    def wait(work: Any, *timeout: Any) -> Any:
        result = wait.original(work, *timeout)
        if id(work) in of_work:
            note("wait", of_work[id(work)][1])
        return result

    def submit(thread: CommunicationThread, work: Any, *rest: Any, **more: Any) -> None:
        token = numbered(("work", thread.name))
        note("submit", token)

        def noted() -> None:
            note("start", token)
            work()
            note("end", token)
            thread.last_token = token

        submit.original(thread, noted, *rest, **more)

    def join(thread: CommunicationThread) -> None:
        join.original(thread)
        if getattr(thread, "last_token", None) is not None:
            note("join", thread.last_token)

    def collective(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)

        def noted(group: Any, *args: Any, **more: Any) -> Any:
            note("collective", name, group.group_name)
            return original(group, *args, **more)

        return mock.patch.object(dist.ProcessGroup, name, noted)

    patches = [collective(name) for name in COLLECTIVES]
    for owner, name, own in (
        (dist.ProcessGroup, "send", send), (dist.ProcessGroup, "recv", recv), (dist.Work, "wait", wait),
        (CommunicationThread, "submit", submit), (CommunicationThread, "wait", join),
    ):  # fmt: skip
        own.original = getattr(owner, name)
        patches.append(mock.patch.object(owner, name, own))
    for patch in patches:
        patch.start()
    try:
        yield log, lambda: note("mark", None)
    finally:
        for patch in patches:
            patch.stop()


def latencies(logs: list[Log]) -> list[int]:
    """The time of every mark: at the rank that comes there last. All ranks have as many."""
    clocks = {(rank, thread): 0 for rank, log in enumerate(logs) for thread in log}
    at = dict.fromkeys(clocks, 0)
    known: dict[Any, int] = {}  # when a message was sent, a receive posted, work submitted or done
    marks: dict[int, list[int]] = {rank: [] for rank in range(len(logs))}

    def advance(rank: int, thread: str) -> bool:
        """One event of a thread; False: it has to wait for another one."""
        kind, what, *_ = logs[rank][thread][at[rank, thread]]
        now = clocks[rank, thread]
        local = (rank, what)
        before = {"wait": ("send", what), "start": ("submit", local), "join": ("end", local)}.get(kind)
        if before is not None and before not in known:
            return False
        if kind in ("send", "post"):
            known[kind, what] = now
        elif kind in ("submit", "end"):
            known[kind, local] = now
        elif kind == "wait":
            clocks[rank, thread] = max(now, max(known["send", what], known["post", what] + 1) + 1)
        elif before is not None:
            clocks[rank, thread] = max(now, known[before])
        elif kind == "mark":
            marks[rank].append(now)
        at[rank, thread] += 1
        return True

    waiting = True
    while waiting:
        waiting, moved = False, False
        for rank, thread in clocks:
            while at[rank, thread] < len(logs[rank][thread]):
                if not advance(rank, thread):
                    waiting = True
                    break
                moved = True
        if waiting and not moved:
            raise AssertionError("the records wait for each other: an event is missing")
    return [max(times) for times in zip(*marks.values(), strict=True)]


def collectives_of(logs: list[Log]) -> list[str]:
    """The backend's own collectives among the records."""
    return [event[1] for log in logs for events in log.values() for event in events if event[0] == "collective"]
