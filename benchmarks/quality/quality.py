"""Held-out loss against bytes: data-parallel training on four ranks with every method, at its own best learning rate.

    python benchmarks/quality/quality.py --json out/quality/runs.jsonl --figure docs/figures/quality-frontier.png

Every method meets every rate of its task with seed 0, then its best rate with the other seeds; a seed fixes
initialisation and data order, so differences to dense are paired. Runs are written line by line and never repeated: a
stopped benchmark goes on where it was. Ranks are real processes (Gloo over loopback, one thread each), forked from
this one. Without Numba the reference kernels are used; they give the same bits and take longer.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quality_methods import METHODS
from quality_tasks import RANKS, TASKS, Data, digest, load
from quality_train import LIMIT, Run, preload, run_rank, use_reference_kernels

FORK = multiprocessing.get_context("fork")
QUICK = {"tasks": "cnn", "methods": "dense,OkTopk 5 %,LowRank 2", "steps": 6, "seeds": 2, "rates": 1, "jobs": 2}
Rows = dict[tuple[Any, ...], dict[str, Any]]


@dataclass
class Job:
    """A run in flight: its ranks, and where the first rank's row comes from."""

    run: Run
    ranks: list[Any]
    answer: Connection
    deadline: float
    store: str

    @staticmethod
    def start(run: Run, data: Data, folder: str) -> Job:
        store = tempfile.mktemp(dir=folder)
        ours, theirs = FORK.Pipe(duplex=False)
        ranks = [
            FORK.Process(target=_rank, args=(run, rank, store, data, theirs if rank == 0 else None), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        return Job(run, ranks, ours, time.monotonic() + LIMIT, store)

    def end(self) -> dict[str, Any] | None:
        """The row, or None where the ranks broke or took too long; none of them is left."""
        try:
            row = self.answer.recv() if self.answer.poll() else None
        except EOFError:
            row = None
        for process in self.ranks:
            process.join(10 if row is not None else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
        self.answer.close()
        Path(self.store).unlink(missing_ok=True)
        return row


def _rank(run: Run, rank: int, store: str, data: Data, answer: Connection | None) -> None:
    signal.alarm(round(LIMIT))  # also where nobody is left to end this
    try:
        row = run_rank(run, rank, store, data)
    except Exception:
        print(f"{run} rank {rank}:\n{traceback.format_exc()[-1500:]}", file=sys.stderr, flush=True)
        os._exit(1)
    if answer is not None:
        answer.send(row)
        answer.close()
    os._exit(0)  # no destructors of a forked process


def wanted(plan: argparse.Namespace, rows: Rows, data: str) -> Iterator[Run]:
    """What there is to run, method by method: all rates with seed 0 and, once they are done, the best with the rest."""
    for method in plan.methods:
        for task in (name for name in plan.tasks if METHODS[method].suits(TASKS[name].optimiser)):
            steps, rates = plan.steps or TASKS[task].steps, TASKS[task].rates[-plan.rates :]
            sweep = [Run(task, method, rate, 0, steps, data) for rate in rates]
            yield from (run for run in sweep if run.key() not in rows)
            if all(run.key() in rows for run in sweep):
                best = min(sweep, key=lambda run: loss(rows[run.key()]))
                seeds = (replace(best, seed=seed) for seed in range(1, plan.seeds))
                yield from (run for run in seeds if run.key() not in rows)


def loss(row: dict[str, Any]) -> float:
    return float("inf") if row["held"] is None else float(row["held"])


def carry_out(plan: argparse.Namespace, data: Data, rows: Rows, out: Path) -> None:
    """Keep `plan.jobs` runs in flight until nothing is wanted or the time is up."""
    until, mark = time.monotonic() + 60 * plan.minutes, digest(data)
    jobs: list[Job] = []
    failed: set[tuple[Any, ...]] = set()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            busy = {job.run.key() for job in jobs} | failed
            if time.monotonic() < until and len(jobs) < plan.jobs:
                run = next((run for run in wanted(plan, rows, mark) if run.key() not in busy), None)
                if run is not None:
                    jobs.append(Job.start(run, data, folder))
                    continue
            if not jobs:
                return
            ready = wait([job.answer for job in jobs], timeout=1.0)
            for job in [j for j in jobs if j.answer in ready or time.monotonic() > j.deadline]:
                jobs.remove(job)
                row = job.end()
                if row is None:
                    failed.add(job.run.key())
                    print(f"failed: {job.run}", file=sys.stderr, flush=True)
                    continue
                rows[job.run.key()] = row
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{len(rows)}: {row['task']} {row['method']} rate {row['rate']:g} seed {row['seed']}: "
                      f"{loss(row):.4f}, {row['bytes']:,.0f} B, {row['seconds']:.1f} s", flush=True)  # fmt: skip


def read(out: Path) -> Rows:
    """Rows of earlier calls; a line that was cut off is left out."""
    rows: Rows = {}
    names = [field.name for field in fields(Run)]
    for line in out.read_text().splitlines() if out.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[tuple(row[name] for name in names)] = row
    return rows


def _listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names: list[str] = []
        for pattern in text.split(","):
            names += (found := [name for name in known if fnmatch.fnmatchcase(name, pattern.strip())])
            if not found:
                raise argparse.ArgumentTypeError(f"{pattern!r}: allowed are {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=_listed(list(TASKS)), default="*")
    parser.add_argument("--methods", type=_listed(list(METHODS)), default="*", help="patterns")
    parser.add_argument("--steps", type=int, help="of every task, instead of its own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, default=3, help="how many of a task's learning rates")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of four ranks each")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run starts after this time")
    parser.add_argument("--quick", action="store_true", help="a few steps of a few methods on the digits")
    parser.add_argument("--data", type=Path, default=Path("out/quality/data.pt"), help="made where it is missing")
    parser.add_argument("--json", type=Path, default=Path("out/quality/runs.jsonl"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--no-report", action="store_true", help="runs only")
    return parser.parse_args(argv)


def main() -> None:
    plan = arguments()
    if plan.quick:
        plan = arguments([*sys.argv[1:], *(w for k, v in QUICK.items() for w in (f"--{k}", str(v)))])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked, which CUDA does not survive
    torch.set_num_threads(1)
    if importlib.util.find_spec("numba") is None:
        use_reference_kernels()
    preload()
    data = load(plan.data)
    plan.json.parent.mkdir(parents=True, exist_ok=True)
    rows = read(plan.json)
    carry_out(plan, data, rows, plan.json)
    if not plan.no_report:
        from quality_figure import bars_of_points, figure
        from quality_report import markdown, summarise

        points = summarise([row for row in rows.values() if row["data"] == digest(data)], plan)
        print(markdown(points))
        if plan.figure:
            figure(bars_of_points(points), plan.figure)


if __name__ == "__main__":
    main()
