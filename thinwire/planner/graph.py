"""Tasks with durations, dependencies and shared resources: when each task runs, and how late it could run.

A task starts when all tasks before it are done (each plus its tail, a delay that occupies nothing: latency)
and its pool has a free slot. A pool (a network port, the cores of a machine) serves the lowest priority
number first, then the earliest ready, then the oldest task: a list schedule, simulated event by event.

Slack is the time by which a task may grow without moving the end, everything keeping its order:
latest finish LF(i) = min over followers j of LF(j) − duration(j) [− tail(i)], slack(i) = LF(i) − finish(i),
where the followers are the tasks that depend on i and the one that took i's slot in its pool.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

NONE = -1


class Graph:
    """A task graph under construction; tasks are numbered from 0 in the order they are added."""

    def __init__(self) -> None:
        self.duration: list[float] = []
        self.tail: list[float] = []
        self.pool: list[int] = []
        self.priority: list[int] = []
        self.followers: list[list[int]] = []
        self.unmet: list[int] = []  # how many tasks each still waits for
        self.slots: list[int] = []  # capacity of each pool
        self._pools: dict[Hashable, int] = {}

    def task(self, duration: float, pool: int = NONE, tail: float = 0.0, priority: int = 0) -> int:
        """Add a task of `duration` seconds and return its number; what follows it waits `tail` seconds more."""
        self.duration.append(duration)
        self.tail.append(tail)
        self.pool.append(pool)
        self.priority.append(priority)
        self.followers.append([])
        self.unmet.append(0)
        return len(self.duration) - 1

    def edge(self, before: int, after: int) -> None:
        self.followers[before].append(after)
        self.unmet[after] += 1

    def add_pool(self, key: Hashable, slots: int = 1) -> int:
        """The number of the pool called `key`, made on first use."""
        if key not in self._pools:
            self._pools[key] = len(self.slots)
            self.slots.append(slots)
        return self._pools[key]


@dataclass(frozen=True)
class Timing:
    """When every task ran, in seconds. `cause` is the task whose end let it start (NONE: it could start at once)."""

    start: list[float]
    finish: list[float]
    slack: list[float]
    cause: list[int]
    makespan: float

    def path(self) -> list[int]:
        """One critical path, first task first: from the last task to finish, back along the causes."""
        at = max(range(len(self.finish)), key=self.finish.__getitem__, default=NONE)
        path = []
        while at != NONE:
            path.append(at)
            at = self.cause[at]
        return path[::-1]


class StuckError(ValueError):
    """Tasks wait for each other in a circle."""

    def __init__(self, tasks: list[int]) -> None:
        super().__init__(f"{len(tasks)} tasks wait for each other")
        self.tasks = tasks


class _Run:
    """The state of one simulation."""

    def __init__(self, graph: Graph) -> None:
        n = len(graph.duration)
        self.graph = graph
        self.unmet = graph.unmet.copy()
        self.ready = [0.0] * n
        self.start = [0.0] * n
        self.finish = [0.0] * n
        self.cause = [NONE] * n
        self.successor = [NONE] * n  # the task that took this one's slot
        self.order: list[int] = []
        self.free = [deque([NONE] * slots) for slots in graph.slots]  # last holder of each free slot
        self.queue: list[list[tuple[int, float, int]]] = [[] for _ in graph.slots]
        self.events = [(0.0, ~i) for i in range(n) if not self.unmet[i]]  # ~i: i is ready, i: i is done
        heapq.heapify(self.events)

    def advance(self) -> None:
        """Everything that happens at the next instant: endings and arrivals first, then the pools serve."""
        now = self.events[0][0]
        touched: set[int] = set()
        while self.events and self.events[0][0] <= now:
            event = heapq.heappop(self.events)[1]
            if event < 0:
                self._arrive(~event, now, touched)
            else:
                self._complete(event, now, touched)
        for pool in touched:
            self._serve(pool, now)

    def _arrive(self, task: int, now: float, touched: set[int]) -> None:
        pool = self.graph.pool[task]
        if pool == NONE:
            self._begin(task, now)
        else:
            heapq.heappush(self.queue[pool], (self.graph.priority[task], now, task))
            touched.add(pool)

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = now
        self.finish[task] = end = now + self.graph.duration[task]
        heapq.heappush(self.events, (end, task))

    def _complete(self, task: int, now: float, touched: set[int]) -> None:
        self.order.append(task)
        pool = self.graph.pool[task]
        if pool != NONE:
            self.free[pool].append(task)
            touched.add(pool)
        arrival = now + self.graph.tail[task]
        for after in self.graph.followers[task]:
            if arrival >= self.ready[after]:
                self.ready[after], self.cause[after] = arrival, task
            self.unmet[after] -= 1
            if not self.unmet[after]:
                heapq.heappush(self.events, (self.ready[after], ~after))

    def _serve(self, pool: int, now: float) -> None:
        free, queue = self.free[pool], self.queue[pool]
        while free and queue:
            task = heapq.heappop(queue)[2]
            holder = free.popleft()
            if holder != NONE:
                self.successor[holder] = task
                if self.finish[holder] >= self.ready[task]:
                    self.cause[task] = holder
            self._begin(task, now)


def simulate(graph: Graph) -> Timing:
    """Run the graph to its end. Raises `StuckError` where tasks wait for each other."""
    run = _Run(graph)
    while run.events:
        run.advance()
    if len(run.order) < len(graph.duration):
        done = set(run.order)
        raise StuckError([i for i in range(len(graph.duration)) if i not in done])
    makespan = max((run.finish[i] + graph.tail[i] for i in run.order), default=0.0)
    return Timing(run.start, run.finish, _slack(run, makespan), run.cause, makespan)


def _slack(run: _Run, makespan: float) -> list[float]:
    graph = run.graph
    latest_start = [0.0] * len(run.order)
    slack = [0.0] * len(run.order)
    for task in reversed(run.order):
        latest = min((latest_start[j] for j in graph.followers[task]), default=makespan) - graph.tail[task]
        if run.successor[task] != NONE:
            latest = min(latest, latest_start[run.successor[task]])
        latest_start[task] = latest - graph.duration[task]
        slack[task] = latest - run.finish[task]
    return slack
