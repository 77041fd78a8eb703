"""Is sparse training as good as dense, on Ok-Topk's own tasks and to the end of a schedule? Losses of many workers.

    python benchmarks/papers/oktopk_data.py … --out DATA                                  # once, where data is
    python benchmarks/papers/oktopk.py --data DATA --out OUT --parallel 6 --budget 480    # goes on where it stopped
    python benchmarks/papers/oktopk.py --out OUT --table --figure OUT/length.png          # what is there
    python benchmarks/papers/oktopk.py --out OUT --quick                                  # seconds, on made-up data

VGG-16 on CIFAR-10 (SGD), a Llama-class model on Python source (AdamW) and a two-layer LSTM on AN4 (Adam); dense,
Ok-Topk as published at 1 and 2 %, gTopk, four bits with error feedback, EF21, DIANA, Rand-DIANA. Workers are members of
an in-process group. A finished run is one line of OUT/runs.jsonl and is not repeated; a seed fixes weights, order and
augmentation, so differences to dense are paired. --probe measures speed: some steps of every method.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from oktopk_data import made_up, read
from oktopk_methods import CORE, LOW_RANK, METHODS, WARM, WARM_1
from oktopk_tasks import TASKS
from oktopk_train import Run, train

SPAWN = multiprocessing.get_context("spawn")
LENGTHS = {
    "vgg": (5, 10, 40),
    "llama": (0.2, 0.6, 6),
    "an4": (10, 20, 80),
    "an4-sgd": (),
    "an4-small": (10, 20, 80),
    "an4-small-sgd": (10, 20, 80),
}  # epochs, beside the full schedule's
LARGE = ["vgg", "llama", "an4", "an4-sgd"]
Rows = dict[tuple[Any, ...], dict[str, Any]]


def plan(options: argparse.Namespace) -> list[Run]:
    """All runs, the most important of each task first: claims over three seeds, then lengths and other methods."""
    if options.quick:
        return [
            Run(task, method, seed, 4, 1) for task in options.tasks for method in options.methods for seed in range(2)
        ]

    def full(task: str, seeds: tuple[int, ...], methods: Any, workers: int = 4, rate: float = 1.0) -> list[Run]:
        epochs = options.epochs.get(task, TASKS[task].full)
        return [Run(task, method, seed, workers, epochs, rate) for seed in seeds for method in methods]

    def lengths(task: str, which: slice) -> list[Run]:
        methods = ("dense", WARM, WARM_1) if task == "vgg" else claimed[task]
        return [Run(task, m, 0, 4, epochs) for epochs in LENGTHS[task][which] for m in methods]

    claimed = {task: CORE if TASKS[task].warmup == 0 else (*CORE, WARM) for task in TASKS}
    rest = [method for method in METHODS if method not in (*CORE, WARM, *LOW_RANK)]
    published = ("dense", WARM, "Ok-Topk 2 %")  # with 16 workers this is the authors' setting for VGG
    runs = [*full("vgg", (0, 1, 2), claimed["vgg"]), *lengths("vgg", slice(1)), *full("vgg", (0,), (WARM_1,))]
    runs += [Run("vgg", method, 0, 4, LENGTHS["vgg"][0]) for method in rest]
    runs += [*lengths("vgg", slice(1, 2)), *full("vgg", (0,), published[:2], 16), *lengths("vgg", slice(2, 3))]
    runs += full("llama", (0,), CORE)
    runs += [Run("llama", method, 0, 4, LENGTHS["llama"][0]) for method in ("dense", *LOW_RANK)]
    runs += lengths("llama", slice(2))
    runs += [*full("llama", (1, 2), CORE), *full("llama", (0,), (*rest, *LOW_RANK)), *full("vgg", (0,), published, 16)]
    runs += [*full("an4", (0,), claimed["an4"])]
    runs += [run for rate in (1, 3, 0.3) for run in full("an4-sgd", (0,), published, rate=rate)]
    runs += [*full("an4", (1, 2), claimed["an4"]), *full("an4", (0,), rest), *lengths("an4", slice(2))]
    runs += [*full("vgg", (0, 1, 2), rest), *full("llama", (1, 2), rest), *lengths("llama", slice(2, 3))]
    runs += [*full("vgg", (0,), CORE, rate=0.5), *full("llama", (0,), CORE, rate=0.5), *lengths("an4", slice(2, 3))]
    runs += [*full("an4-small", (0, 1, 2), claimed["an4-small"]), *lengths("an4-small", slice(2))]
    runs += full("an4-small-sgd", (0, 1, 2), (*published[:2], WARM_1, "Ok-Topk 2 %", "Ok-Topk 1 %", "4 bits"))
    runs += [*full("an4-small-sgd", (0,), published[1:2], 16), *full("an4-small-sgd", (0,), ("gTopk 1 %",))]
    runs += [run for rate in (0.5, 2) for run in full("an4-small-sgd", (0,), published[:2], rate=rate)]
    runs += lengths("an4-small-sgd", slice(2))
    return [
        run for run in dict.fromkeys(runs)
        if run.task in options.tasks and run.method in options.methods and run.seed in options.seeds
    ]  # fmt: skip


# --- processes


def work(options: argparse.Namespace, until: float, runs: Any, rows: Any) -> None:
    """One process: runs from the queue until it is empty or no time is left."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    tasks: dict[str, Any] = {}
    while time.time() < until:
        try:
            run = runs.get_nowait()
        except queue.Empty:
            break
        try:
            if run.task not in tasks:
                data = made_up(run.task) if options.quick else read(options.data, run.task)
                tasks[run.task] = TASKS[run.task](data, device, options.quick)
            rows.put(train(run, tasks[run.task], options.probe, until + options.grace))
        except Exception:
            rows.put({"run": str(run), "failed": traceback.format_exc()[-3000:]})
    rows.put(None)


def carry_out(options: argparse.Namespace, before: Rows) -> int:
    """Run what is missing; how many failed."""
    missing = [run for run in plan(options) if run.key() not in before][: options.limit]
    runs: Any = SPAWN.Queue() if options.parallel else queue.Queue()
    for run in missing:
        runs.put(run)
    until = time.time() + options.budget
    print(f"{len(missing)} runs to do, {min(max(options.parallel, 1), len(missing))} at a time", flush=True)
    if missing and not options.quick and any(run.task == "vgg" for run in missing):
        read(options.data, "vgg")  # decodes once
    began = time.time()
    if not options.parallel:
        done: list[bool] = []
        work(options, until, runs, SimpleNamespace(put=lambda row: row and done.append(kept(options, row, began))))
        return done.count(False)
    rows = SPAWN.Queue()
    count = min(options.parallel, len(missing))
    processes = [SPAWN.Process(target=work, args=(options, until, runs, rows), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    lost = gather(options, rows, processes, began)
    for process in processes:
        process.kill()  # all have said that they ended
        process.join()
    return lost


def gather(options: argparse.Namespace, rows: Any, processes: list[Any], began: float) -> int:
    """Write rows as they come, until every process has ended; how many runs failed."""
    failed, count = 0, len(processes)
    while count:
        try:
            row = rows.get(timeout=2)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                raise SystemExit("the processes were killed; what they had finished is written") from None
            continue
        if row is None:
            count -= 1
        else:
            failed += not kept(options, row, began)
    return failed


def kept(options: argparse.Namespace, row: dict[str, Any], began: float) -> bool:
    """Write a run's row; False, and a word about it, if the run failed."""
    if "failed" in row:
        print(f"failed: {row['run']}\n{row['failed']}", file=sys.stderr, flush=True)
        return False
    file = options.out / ("probe.jsonl" if options.probe else "runs-cpu.jsonl" if options.cpu else "runs.jsonl")
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(said(row, time.time() - began), flush=True)
    return True


def said(row: dict[str, Any], at: float) -> str:
    figures = ", ".join(f"{name} {row[name]:.4f}" for name in ("loss", "error", "letters", "words") if name in row)
    return (
        f"{at:6.1f} s: {row['task']} {row['method']}, seed {row['seed']}, {row['workers']} workers, {row['steps']} "
        f"steps ({row['epochs']:g} epochs, rate × {row['rate']:g}, {row['how']}): {figures}; "
        f"{1e3 * row['seconds'] / row['steps']:.1f} ms and {row['bytes'] / 1e6:.3f} MB per step"
    )


@contextmanager
def shared_card(used: bool) -> Iterator[None]:
    """CUDA's multi-process service, where it is there: kernels of several processes run at once."""
    control = shutil.which("nvidia-cuda-mps-control") if used and torch.cuda.is_available() else None
    on = control is not None and subprocess.run([control, "-d"]).returncode == 0
    if used and torch.cuda.is_available():
        print("processes share the card " + ("by MPS" if on else "in turn"), flush=True)
    try:
        yield
    finally:
        if on:
            subprocess.run([str(control)], input="quit\n", text=True)


def read_rows(folder: Path) -> Rows:
    """Of earlier calls, also of one that runs now on the CPU; a line that was cut off is left out."""
    rows: Rows = {}
    for line in [line for file in sorted(folder.glob("runs*.jsonl")) for line in file.read_text().splitlines()]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[tuple(row[field.name] for field in fields(Run))] = row
    return rows


def names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        wanted = [name.strip() for name in text.split(",")]
        if bad := [name for name in wanted if name not in known]:
            raise argparse.ArgumentTypeError(f"{bad[0]!r}: allowed are {', '.join(known)}")
        return wanted

    return parse


def epochs_of(text: str) -> dict[str, float]:
    return {task: float(epochs) for task, _, epochs in (part.partition("=") for part in text.split(","))}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder that oktopk_data.py filled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=names(TASKS), default=LARGE, help="; an4-small is for a CPU")
    parser.add_argument("--methods", type=names(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--epochs", type=epochs_of, default={}, help="of the full schedule, such as vgg=30,llama=2")
    parser.add_argument("--parallel", type=int, default=6, help="runs at a time, each in a process; 0: in this one")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run begins")
    parser.add_argument("--grace", type=float, default=1e9, help="seconds after those, when runs are given up")
    parser.add_argument("--probe", type=int, default=0, help="end every run after so many steps: how fast is it?")
    parser.add_argument("--limit", type=int, default=None, help="begin so many runs at most")
    parser.add_argument("--cpu", action="store_true", help="although a card is there; into runs-cpu.jsonl")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small networks on made-up data")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--docs", type=Path, help="put the table into this page, between its two marks; run nothing")
    parser.add_argument("--figure", type=Path, help="draw what is there, run nothing")
    options = parser.parse_args()
    if options.data is None and not (options.quick or options.table or options.docs or options.figure):
        parser.error("which --data? or --quick")
    return options


def show(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from oktopk_report import draw, into_page, markdown

    if options.table:
        print(markdown(rows))
    if options.docs:
        options.docs.write_text(into_page(options.docs.read_text(), markdown(rows)))
    if options.figure:
        draw(rows, options.figure)


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = read_rows(options.out)
    if options.table or options.docs or options.figure:
        show(options, list(rows.values()))
        return
    with shared_card(not options.no_mps and not options.cpu):
        failed = carry_out(options, {} if options.probe else rows)
    if failed:
        raise SystemExit(f"{failed} runs failed")


if __name__ == "__main__":
    main()
