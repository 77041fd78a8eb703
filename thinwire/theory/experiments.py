"""What `thinwire convex` runs: figures as lists of independent tasks, spread over the machine's cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from thinwire.codecs import NaturalDither, RandK, TopK
from thinwire.memory import EF21
from thinwire.theory import methods, problems, steps, two_stage
from thinwire.theory.methods import Method
from thinwire.theory.mixed import Mixed
from thinwire.theory.problems import Problem
from thinwire.theory.simulate import Trace, expected_steps, simulate

DENSITIES = (0.3, 0.5, 0.9)
LEVELS = (3, 5, 8)
MILD = {"EF21": 0.9, "EControl": 0.9}  # densities with --quick: at 0.3 the two take as long as all others together
MIXED = (0.2, 0.5, 0.9)  # densities of unlike workers
LAMBDAS = (0.01, 3.0, 10.0, 40.0, 150.0)  # of ridge, for κ from 800 down to 10
AFAR, NEAR = 1e9, 1e-12  # ‖x⁰ − x*‖ and the error to reach, where iterations are drawn against κ
HORIZONS = (256, 1024, 4096, 16384, 65536)
MOST_PROCESSES = 8
WORTH_A_POOL = 60_000  # steps; fewer are done before a process has imported torch
PLOTTED = "DIANA, plotted step"


@dataclass(frozen=True)
class Task:
    """One curve: its figure, its label there, how to make it, and roughly how many steps that takes."""

    figure: str
    label: str
    make: Callable[[], Any]
    cost: int


@dataclass
class Results:
    """Traces by figure and label; for the two-stage model, by line: horizon → ‖∇f‖² per run."""

    seeds: Sequence[int]
    traces: dict[str, dict[str, Trace]] = field(default_factory=dict)
    two_stage: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, task: Task, outcome: Any) -> None:
        if isinstance(outcome, Trace):
            self.traces.setdefault(task.figure, {})[task.label] = outcome
        else:
            line, horizon = task.label.rsplit(" ", 1)
            self.two_stage.setdefault(line, {})[int(horizon)] = outcome


def plan(chosen: Sequence[str], seeds: Sequence[int], quick: bool) -> list[Task]:
    """The tasks of the chosen problems, fewer with `quick`. The plotted step, logistic regression and κ take the first
    seed only."""
    tasks: list[Task] = []
    if "ridge" in chosen:
        tasks += _comparison(seeds, MILD if quick else {})
        tasks += _different_workers(seeds, quick) + _conditions(seeds[:1])
        tasks += [] if quick else _densities(seeds, DENSITIES) + _dithering(seeds)
    if "logistic" in chosen:
        tasks += _logistic(seeds[:1], problems.SPLITS[-1:] if quick else problems.SPLITS)
    if "interpolation" in chosen:
        tasks += _interpolation(seeds, (0.5, 0.3) if quick else (0.5, 0.3, 0.1))
    if "two-stage" in chosen:
        tasks += _two_stage(seeds, HORIZONS[:-1] if quick else HORIZONS)
    return tasks


def run(tasks: Sequence[Task], results: Results, advance: Callable[[str, int], None]) -> Results:
    """Run all tasks, the longest first, and add their outcomes to `results` in the order in which they were planned.

    advance(note, count): called after each task."""
    order = sorted(range(len(tasks)), key=lambda i: -tasks[i].cost)
    done: dict[int, Any] = {}
    for i, outcome in _outcomes(order, tasks):
        done[i] = outcome
        advance(f"{tasks[i].figure}: {tasks[i].label}", 1)
    for i, task in enumerate(tasks):
        results.add(task, done[i])
    return results


def _outcomes(order: Sequence[int], tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(cores, len(tasks), MOST_PROCESSES)
    calls = [(i, tasks[i].make) for i in order]
    if processes <= 1 or sum(task.cost for task in tasks) < WORTH_A_POOL:
        yield from map(_call, calls)
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads
    with context.Pool(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap_unordered(_call, calls)


def _call(numbered: tuple[int, Callable[[], Any]]) -> tuple[int, Any]:
    return numbered[0], numbered[1]()


def _task(figure: str, label: str, method: Method, problem: Problem, seeds: Sequence[int]) -> Task:
    make = partial(simulate, method, problem, list(seeds))
    return Task(figure, label, make, expected_steps(method, problem))


def _comparison(seeds: Sequence[int], other: Mapping[str, float]) -> list[Task]:
    """All methods at one density, but those named in `other` at theirs."""
    problem = problems.ridge(seeds)
    tasks = [_task("methods", m.name, m, problem, seeds) for m in methods.every(problem) if m.name not in other]
    for name, q in other.items():
        method = next(m for m in methods.every(problem, q) if m.name == name)
        tasks.append(_task("methods", f"{name}, q = {q}", method, problem, seeds))
    return tasks


def _different_workers(seeds: Sequence[int], quick: bool) -> list[Task]:
    """Worker i has its own ω_i: strong compression where f_i is smooth (small L_i), mild where it is not."""
    tasks = []
    problem = problems.ridge(seeds)
    place = problem.L_i.mean(dim=0).argsort().argsort().tolist()
    codec = Mixed(tuple(RandK(MIXED[at * len(MIXED) // problem.workers]) for at in place))
    for m in [methods.dcgd(codec)] if quick else [methods.dcgd(codec), methods.diana(codec)]:
        tasks.append(_task("workers", f"{m.name}, ω_i", m, problem, seeds))
    return tasks


def _conditions(seeds: Sequence[int]) -> list[Task]:
    """GDCI and VR-GDCI at several κ = L_max/μ, from so far that no radius is in the way."""
    tasks = []
    for lam in LAMBDAS:
        problem = problems.ridge(seeds, lam=lam).from_afar(AFAR)
        kappa = float((problem.L_max / problem.mu).mean())
        for m in (methods.gdci(RandK(0.3)), methods.vr_gdci(RandK(0.3))):
            limit = expected_steps(m, problem, NEAR) * (1 if m.exact else 3)
            make = partial(simulate, m, problem, list(seeds), NEAR, limit)
            tasks.append(Task("kappa", f"{m.name}, κ = {kappa:.1f}", make, limit))
    return tasks


def _densities(seeds: Sequence[int], densities: Sequence[float]) -> list[Task]:
    """The paper's first figure: Rand-K at several q; DIANA with both steps."""
    tasks = []
    for q in densities:
        tasks += _sweep("randk", f"q = {q}", RandK(q), seeds)
    return tasks


def _dithering(seeds: Sequence[int]) -> list[Task]:
    """The paper's second figure: natural dithering at several s; without the slow plotted step at the smallest s."""
    tasks = []
    for s in LEVELS:
        tasks += _sweep("dither", f"s = {s}", NaturalDither(s), seeds, plotted=s > min(LEVELS))
    return tasks


def _sweep(
    figure: str, setting: str, codec: RandK | NaturalDither, seeds: Sequence[int], plotted: bool = True
) -> list[Task]:
    """DIANA and Rand-DIANA with all seeds; DIANA with the slow plotted step with the first."""
    problem, first = problems.ridge(seeds), seeds[:1]
    both = (methods.diana(codec), methods.rand_diana(codec, problem))
    tasks = [_task(figure, f"{m.name}, {setting}", m, problem, seeds) for m in both]
    if plotted:
        slow = methods.diana(codec, steps.diana_plotted, PLOTTED)
        tasks.append(_task(figure, f"{slow.name}, {setting}", slow, problems.ridge(first), first))
    return tasks


def _logistic(seeds: Sequence[int], splits: Sequence[str]) -> list[Task]:
    tasks = []
    for split in splits:
        problem, codec = problems.logistic(seeds, split), RandK(0.3)
        rows = [methods.gd(), methods.dcgd(codec), methods.diana(codec), methods.rand_diana(codec, problem)]
        rows.append(Method("EF21", TopK(0.3), EF21(), steps.ef21))
        tasks += [_task("logistic", f"{m.name}, split {split}", m, problem, seeds) for m in rows]
    return tasks


def _interpolation(seeds: Sequence[int], densities: Sequence[float]) -> list[Task]:
    """Plain DCGD where all ∇f_i(x*) vanish, and where they do not."""
    problem, tasks = problems.interpolation(seeds), []
    tasks.append(_task("interpolation", "GD", methods.gd(), problem, seeds))
    for q in densities:
        method = methods.dcgd(RandK(q), exact=True)
        tasks.append(_task("interpolation", f"DCGD, q = {q}", method, problem, seeds))
    ridge = problems.ridge(seeds)
    tasks.append(_task("interpolation", "DCGD on ridge, q = 0.3", methods.dcgd(RandK(0.3)), ridge, seeds))
    return tasks


def _two_stage(seeds: Sequence[int], horizons: Sequence[int]) -> list[Task]:
    return [
        Task("two-stage", f"{line.name} {t}", partial(two_stage.train, line, list(seeds), t), t)
        for line in two_stage.lines()
        for t in horizons
    ]
