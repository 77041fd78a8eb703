"""Held-out loss against bytes per token: per-step wires and local steps, methods × H × sites × seeds, on one card.

    python benchmarks/quality/local_frontier.py --corpus code/python.xz --stage tune --steps 1000 --out out
    python benchmarks/quality/local_frontier.py --corpus code/python.xz --stage frontier seeds --steps 5000 --out out
    python benchmarks/quality/local_frontier.py --corpus code/python.xz --jobs jobs.jsonl --budget 400 --out out
    python benchmarks/quality/local_frontier.py --quick --out out/quick             # tiny, on a CPU, in a minute
    python benchmarks/quality/local_frontier.py --pack FOLDER … --corpus code/python.xz     # Python files → a corpus
    python benchmarks/quality/local_frontier_report.py out                          # table and figure

All sites are in one process: their weights are stacked, and what they exchange is computed as between processes (see
stacked_exchange.py). Runs of equal sizes train side by side (--together). All methods see equal tokens and an equal
global batch; the same seed gives the same data and weights to all. A site's bytes are what it sends, which is what it
receives. A finished run is one line of OUT/frontier.jsonl, and one that is there already is not made again.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from frontier_jobs import STAGES, Protocol, key
from stacked_model import Size, pack
from stacked_run import Job, run_jobs
from torch import Tensor

Row = dict[str, Any]
ADDED: Row = {"beta2": 0.95}  # what rows of before do not say
_TEXT: dict[str, tuple[Tensor, Tensor]] = {}  # of this process


def done(path: Path) -> list[Row]:
    """Finished runs; a line that was cut off is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def is_done(job: Job, stage: str, rows: list[Row]) -> bool:
    wanted = json.loads(json.dumps(key(job, stage)))
    return any(all({**ADDED, **row}.get(name) == value for name, value in wanted.items()) for row in rows)


def fleets(jobs: list[Job], together: int) -> list[list[Job]]:
    """Jobs that can train side by side, in the order of the first of each."""
    out: list[list[Job]] = []
    for job in jobs:
        kind = (job.copies, job.steps, job.batch, job.size)
        for fleet in out:
            first = fleet[0]
            if len(fleet) < together and (first.copies, first.steps, first.batch, first.size) == kind:
                fleet.append(job)
                break
        else:
            out.append([job])
    return out


def work(jobs: list[Job], corpus: str, device: str, graph: bool) -> list[Row]:
    """In a process of its own, or in this one."""
    if device == "cpu":
        torch.set_num_threads(1)
    if corpus not in _TEXT:
        text, held = jobs[0].size.read(Path(corpus))
        _TEXT[corpus] = (text.to(device), held.to(device))
    try:
        return run_jobs(jobs, *_TEXT[corpus], graph)
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def read_jobs(path: Path) -> list[Job]:
    """One per line; `size` is [width, layers, length]."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [Job(**{**line, "size": Size(*line.get("size", ()))}) for line in lines]


class Runner:
    """Runs fleets until the budget is spent, and writes their rows at once."""

    def __init__(self, options: argparse.Namespace, path: Path) -> None:
        self.options, self.path = options, path
        self.began = time.perf_counter()
        self.pool: ProcessPoolExecutor | None = None  # its processes keep the text and compiled kernels
        self.failed = 0  # fleets, in processes of their own: the others go on
        self.seconds: dict[str, float] = {}  # per unit of a job's work, of the last fleet of that size

    def run(self, jobs: list[Job], stage: str) -> None:
        """Those that are not in the file yet."""
        rows = done(self.path)
        left = [job for job in jobs if not is_done(job, stage, rows)]
        waiting = fleets(left, self.options.together)
        print(f"{stage}: {len(jobs)} runs, {len(left)} to do in {len(waiting)} fleets", flush=True)
        given = (str(self.options.corpus), self.options.device, self.options.graph)
        if self.options.parallel == 1:
            for fleet in waiting:
                if self.has_time(fleet):
                    self.write(work(fleet, *given), stage)
            return
        if self.pool is None:
            self.pool = ProcessPoolExecutor(self.options.parallel, get_context("spawn"))
        under_way: set[Future[list[Row]]] = set()
        while under_way or waiting:
            while waiting and len(under_way) < self.options.parallel:
                fleet = waiting.pop(0)
                if self.has_time(fleet):
                    under_way.add(self.pool.submit(work, fleet, *given))
            if not under_way:
                break
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in ended:
                if future.exception() is not None:
                    self.failed += 1
                    traceback.print_exception(future.exception())
                else:
                    self.write(future.result(), stage)

    def has_time(self, fleet: list[Job]) -> bool:
        """Will these runs end before the budget is spent, if they take as long as earlier ones?"""
        expected = sum(job.work * self.seconds.get(str(asdict(job.size)), 0.0) for job in fleet)
        return time.perf_counter() - self.began + expected < self.options.budget

    def write(self, rows: list[Row], stage: str) -> None:
        self.seconds[str(rows[0]["size"])] = sum(row["seconds"] for row in rows) / sum(row["work"] for row in rows)
        with self.path.open("a") as file:
            for row in rows:
                row["stage"] = "tune" if stage == "tune" else "grid"
                row["device"] = torch.cuda.get_device_name() if self.options.device == "cuda" else "cpu"
                file.write(json.dumps(row) + "\n")
                file.flush()
                less = row["fp32_bytes_per_token"] / max(row["bytes_per_token"], 1e-12)
                what = f"{row['method']}, {row['sites']} sites, H {row['every']}, seed {row['seed']}, lr {row['lr']}"
                outer = row["table"].get("outer_lr")
                what += f", outer {outer}" if outer is not None else ""
                now = time.perf_counter() - self.began
                found = f"{row['held']:.4f}, {less:.0f}× fewer, {row['seconds']:.1f} s, {row['teraflops']:.0f} TFLOP/s"
                print(f"{now:6.0f} s  {what}: {found}", flush=True)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of frontier.jsonl")
    parser.add_argument("--corpus", type=Path, help="a file that --pack wrote")
    parser.add_argument("--pack", type=Path, nargs="+", help="write the corpus from the Python files of these folders")
    parser.add_argument("--limit", type=int, default=40_000_000, help="bytes of a packed corpus")
    parser.add_argument("--jobs", type=Path, help="runs to make, a JSON object per line, instead of stages")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=16384, help="per step, over all sites")
    parser.add_argument("--together", type=int, default=4, help="runs that train side by side")
    parser.add_argument("--parallel", type=int, default=1, help="processes")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds in all; no run begins that would take longer"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    parser.add_argument("--tune-steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    options.graph = options.device == "cuda" and not options.eager
    return options


def main() -> None:
    options = parsed(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    if options.pack:
        print("bytes to train on and held out:", *pack(options.pack, options.corpus, options.limit))
        return
    size = Size()
    if options.quick:
        import sysconfig

        size, options.steps, options.tune_steps, options.tokens = Size(64, 1, 32), 60, 30, 16 * 32
        options.corpus = options.out / "quick.xz"
        if not options.corpus.exists():
            pack([Path(sysconfig.get_paths()["stdlib"]) / "json", Path(sysconfig.get_paths()["stdlib"]) / "email"],
                 options.corpus, 500_000)  # fmt: skip
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    path, batch = options.out / "frontier.jsonl", options.tokens // size.length
    runner = Runner(options, path)
    if options.jobs:
        runner.run(read_jobs(options.jobs), "jobs")
    for stage in options.stage if not options.jobs else ():
        steps = options.tune_steps if stage == "tune" else options.steps
        runner.run(Protocol(steps, batch, size).stage(stage), stage)
    if runner.failed:
        raise SystemExit(f"{runner.failed} fleets failed")


if __name__ == "__main__":
    main()
