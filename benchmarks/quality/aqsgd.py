"""AQ-SGD on its own ground: real models over paired seeds, each run in one process with the bits of real ranks.

    python benchmarks/quality/aqsgd.py --tasks sst2,cola --models MINILM,MINILM --data sst2.tsv,cola.tsv
        [--device cuda] [--parallel 12] [--budget 200] [--out out/aqsgd] [--only "fp32,ours 3/3"] [--quick]
    python benchmarks/quality/aqsgd.py --tasks wikitext --models SmolLM2.gguf --data wikitext-2-test.txt --parallel 8
    python benchmarks/quality/aqsgd.py --table --out out/aqsgd            # Markdown, of what is there

Rates are tried for fp32 with seed 0; then all wires run at the best, seed after seed. Rows are appended to
OUT/runs.jsonl as runs end, and a run that is there is not made again. No run begins after --budget seconds. --quick:
tiny random models on data of their own. How to fill the folders: docs/papers.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "card"))
os.environ.setdefault("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or a question about cards forbids them to forked workers

import torch
from aqsgd_table import tables
from aqsgd_tasks import ENDS, TASKS, THREE, WIRES, config, tiny_sentences
from gpu_pipeline import shared_card

from thinwire.bench.one_process.training import OneProcess
from thinwire.config.wire import Wire
from thinwire.pipeline.precompile import try_link
from thinwire.train.build import Checked, check
from thinwire.train.model.gguf import as_folder, is_gguf


class Job(NamedTuple):
    task: str
    wire: str
    seed: int
    rate: float


class Place(NamedTuple):
    """Where a task's model and data are."""

    model: str
    data: str
    device: str
    deadline: float  # of time.time(), after which nothing begins,
    end: float = float("inf")  # and nothing goes on
    progress: str = ""  # a file for evaluations of runs under way


CHECKED: dict[str, Checked] = {}  # by task: read before the workers are forked
QUICK = {"seeds": 2, "rates": (1e-3, 3e-3)}


def train(job: Job, place: Place) -> dict[str, Any] | None:
    """One run in a worker; None where it is too late to begin, or to go on."""
    if time.time() > place.deadline:
        return None
    torch.set_num_threads(1)
    began = time.perf_counter()
    given = config(TASKS[job.task], job.wire, job.seed, job.rate, place.model, place.data, place.device)
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run = OneProcess(given, CHECKED[job.task])
    evals, sent, every = [run.evaluate()], [run.sent()], TASKS[job.task].every
    curve = [(0, evals[0]["held_out"])]
    while run.step < run.steps:
        if time.time() > place.end:
            return None
        loss, _ = run.train_step()
        ended = run.step % run.epoch == 0 or run.step == run.steps
        if ended or (every and run.step % every == 0):
            found = run.evaluate()
            curve.append((run.step, found["held_out"]))
            if place.progress:
                keep_point(place.progress, {**job._asdict(), "curve": curve, "bytes": [*sent, run.sent()]})
            if ended:
                evals.append(found)
                sent.append(run.sent())
    row = {
        **job._asdict(), "steps": run.steps, "epoch": run.epoch, "last_loss": loss, "bytes": sent,
        **{key: [one[key] for one in evals] for key in evals[0]}, "seconds": time.perf_counter() - began,
        **({"curve": curve} if every else {}),
        "microbatches": given.mesh.microbatches, "samples": len(run.samples.train),
        "held_out_samples": len(run.samples.held_out),
        "peak": torch.cuda.max_memory_allocated() if place.device == "cuda" else 0,
    }  # fmt: skip
    del run
    gc.collect()
    return row


def keep_point(file: str, row: dict[str, Any]) -> None:
    """What a run has found so far, should it be ended from outside; several write there."""
    with open(file, "a") as out:
        out.write(json.dumps(row) + "\n")


def warm(names: list[str], width: int, device: str) -> None:
    """Compile the kernels of these wires while other workers try rates."""
    like = torch.zeros(1, device=device)
    for name in names:
        wire = Wire.of(WIRES[name]).with_epoch(1)
        for link in (wire.forward, wire.backward):
            try_link(link, (16, width), like)


class Schedule:
    """Which run is next: of every task first the rates, then the grid at the best of them.

    rows: what is there already. chosen: wires, by task.
    """

    def __init__(self, rows: list[dict[str, Any]], tasks: list[str], quick: bool, only: list[str]) -> None:
        self.found = {Job(*(row[key] for key in Job._fields)): row for row in rows}
        self.tasks, self.quick, self.only = tasks, quick, only
        self.begun: set[Job] = set(self.found)

    def wires(self, task: str, seed: int = 0) -> list[str]:
        claimed = (THREE if TASKS[task].dp == 1 else TASKS[task].wires[:4]) if self.quick else TASKS[task].claimed
        named = claimed if seed or self.quick else TASKS[task].wires
        return [wire for wire in named if not self.only or wire in self.only]

    def next(self) -> list[Job]:
        """What may begin now, and has not."""
        jobs: list[Job] = []
        for task in self.tasks:
            rates = QUICK["rates"] if self.quick else TASKS[task].rates
            sweep = [Job(task, "fp32", 0, rate) for rate in rates]
            jobs += sweep if len(sweep) > 1 else []  # one rate is chosen already
            if len(sweep) == 1 or all(job in self.found for job in sweep):
                best = min(sweep, key=lambda job: self.found[job]["held_out"][-1]) if len(sweep) > 1 else sweep[0]
                seeds = QUICK["seeds"] if self.quick else TASKS[task].seeds
                jobs += [Job(task, wire, seed, best.rate) for seed in range(seeds) for wire in self.wires(task, seed)]
        jobs.sort(key=lambda job: job.seed > 0 and job.wire not in (*THREE, *ENDS))  # these have all seeds first
        new = [job for job in dict.fromkeys(jobs) if job not in self.begun]
        self.begun |= {*new}
        return new


def run_all(args: argparse.Namespace, places: dict[str, Place], path: Path) -> None:
    schedule = Schedule(read(path), list(places), args.quick, wires(args.only))
    card = shared_card(args.device) if args.device == "cuda" else nullcontext()
    with card, workers(args, places) as pool:
        waiting: set[Future[Any]] = {pool.submit(train, job, places[job.task]) for job in schedule.next()}
        if args.device == "cuda" and len(waiting) < args.parallel:
            names = [name for name in WIRES if any(name in schedule.wires(task) for task in places)]
            for _ in range(args.parallel - len(waiting)):
                waiting.add(pool.submit(warm, names, 384, args.device))
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                if future.exception() is not None:
                    print(f"a run failed: {future.exception()!r}", flush=True)
                elif (row := future.result()) is not None:
                    keep(row, path)
                    schedule.found[Job(*(row[key] for key in Job._fields))] = row
            waiting |= {pool.submit(train, job, places[job.task]) for job in schedule.next()}


def workers(args: argparse.Namespace, places: dict[str, Place]) -> ProcessPoolExecutor:
    """Forked, so that libraries and data are there already; where the card refuses that, begun anew."""
    fork = multiprocessing.get_context("fork")
    if args.device == "cuda":
        with ProcessPoolExecutor(1, mp_context=fork) as pool:
            refused = pool.submit(touch, args.device).exception()
        if refused is not None:
            print(f"workers cannot be forked ({refused!r}): they begin anew", flush=True)
            anew = multiprocessing.get_context("spawn")
            return ProcessPoolExecutor(args.parallel, mp_context=anew, initializer=read_data, initargs=(places,))
    return ProcessPoolExecutor(args.parallel, mp_context=fork)


def wires(text: str) -> list[str]:
    return [one.strip() for one in text.split(";" if ";" in text else ",") if one.strip()]


def touch(device: str) -> None:
    torch.zeros(1, device=device)


def read_data(places: dict[str, Place]) -> None:
    for task, place in places.items():
        CHECKED[task] = check(config(TASKS[task], "fp32", 0, 1e-4, place.model, place.data, place.device))


def keep(row: dict[str, Any], path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    losses = " ".join(f"{loss:.4f}" for loss in row["held_out"])
    print(f"{row['task']}, {row['wire']}, rate {row['rate']:g}, seed {row['seed']}: {losses} "
          f"({row['seconds']:.1f} s)", flush=True)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """The rows; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            print(f"{path}: a line that is no JSON is left out", file=sys.stderr)
    return rows


def places(args: argparse.Namespace, out: Path, began: float) -> dict[str, Place]:
    tasks = args.tasks.split(",")
    models = args.models.split(",") if args.models else [""] * len(tasks)
    data = args.data.split(",") if args.data else [""] * len(tasks)
    if args.quick:
        (out / "sentences.tsv").write_text(tiny_sentences())
        data = [str(out / "sentences.tsv") if TASKS[task].kind == "classify" else "" for task in tasks]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:  # its threads end with it
        folders = [pool.submit(as_folder, m, str(Path(m).parent), print) if is_gguf(m) else None for m in models]
        models = [m if folder is None else folder.result() for m, folder in zip(models, folders)]
    ends, kept = (began + args.budget, began + args.budget + args.grace), str(out / "progress.jsonl")
    found = {
        task: Place(model, one, args.device, *ends, kept) for task, model, one in zip(tasks, models, data, strict=True)
    }
    read_data(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="sst2", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--models", default="", help="a folder or GGUF file per task")
    parser.add_argument("--data", default="", help="a file per task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run begins")
    parser.add_argument("--grace", type=float, default=1e9, help="seconds after those, when runs are given up")
    parser.add_argument("--only", default="", help="these wires, between commas or semicolons; rates are tried anyway")
    parser.add_argument("--out", default="out/aqsgd")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--quick", action="store_true")
    args, began = parser.parse_args(), time.time()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        torch.set_num_threads(1)
        run_all(args, places(args, out, began), out / "runs.jsonl")
        print(f"{time.time() - began:.0f} s", flush=True)
    print(tables(read(out / "runs.jsonl")))


if __name__ == "__main__":
    main()
