"""Does a run that loads all its kernels at the start ever stand still? dp 2 × pp 2, `max`, many times.

    python3 benchmarks/card/gpu_twenty.py --out FOLDER [--budget SECONDS] [--parallel N] [--runs 20] [--quick] [--table]
    python3 benchmarks/card/gpu_twenty.py --out FOLDER --preset paper-aqsgd --runs 5

A model of the Llama family at random (tied embedding, so two gradient groups per rank), sequences of 256, a batch of 16
in four micro-batches, four ranks on one card over sockets, THINWIRE_NEW_KERNELS=error; half of the runs through CUDA's
multi-process service. Every run is four new processes. The first one compiles; after it several run side by side, and
each such batch has a service of its own. One that does not end within LIMIT seconds has hung: its own processes are
ended. Under `paper-aqsgd` epochs are four steps long: the first is exact, so other kernels than before are called in
mid-run. --short: two steps of four layers and short sequences and one evaluation, for runs that share the card without
the service. A line of FOLDER/twenty.jsonl per run, written at once; runs that are there are not made again. --quick:
two runs of a small model on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_ranks

RANKS, LIMIT = 4, {"cuda": 75.0, "cpu": 400.0}  # there Numba may have to compile
PRELOAD = ["torch", "torch.distributed.pipelining", "thinwire.train.rank", "thinwire.train.build", "transformers"]
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MODEL = {"hidden": 576, "layers": 6, "heads": 9, "kv_heads": 3, "tied": True}
SMALL = {"hidden": 32, "layers": 4, "heads": 4, "tied": True}


@contextmanager
def service(wanted: bool) -> Iterator[str]:
    """A folder in which a rank finds CUDA's multi-process service, which ends with this; or finds none."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, PIPE: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if control is not None:
            subprocess.run([control, "-d"], env=environment, check=True, timeout=20)
        try:
            yield folder
        finally:
            if control is not None:
                try:
                    subprocess.run([control], input="quit -t 1\n", text=True, env=environment, timeout=20)
                except subprocess.TimeoutExpired:
                    print("the multi-process service does not end", flush=True)


def one_run(
    tell: Callable[[Any], None], device: str, folder: str, steps: int, preset: str, pipe: str, short: bool
) -> None:
    """A rank of one run; rank 0 tells the losses. pipe: where the multi-process service is, if it is."""
    os.environ |= {"THINWIRE_NEW_KERNELS": "error", PIPE: pipe}
    from thinwire.train.config.sections import read_config
    from thinwire.train.metrics import read_events
    from thinwire.train.rank import train_rank

    gpu_ranks.use_reference_without_numba()
    began = time.monotonic()
    length = 32 if device == "cpu" else 64 if short else 256
    corpus = 4 * 16 * length if preset == "paper-aqsgd" else 400_000 if device == "cuda" and not short else 40_000
    table = {
        "model": SMALL if device == "cpu" else MODEL | {"layers": 4} if short else MODEL,
        "data": {"seq_len": length, "corpus_bytes": corpus, "held_out": 0.05},
        "optim": {"batch": 16, "steps": steps, "warmup": 1, "lr": 1e-3},
        "mesh": {"dp": 2, "pp": 2, "microbatches": 4},
        "wire": {"preset": preset},
        "run": {"device": device, "out": folder, "eval_every": steps if short else steps // 2, "checkpoint_every": 0},
    }
    lost = train_rank(read_config(table), False)
    took = time.monotonic() - began
    if os.environ["RANK"] == "0":
        events = list(read_events(Path(folder) / "metrics.jsonl"))
        losses = [event["loss"] for event in events if event["kind"] == "step"]
        tell({"losses": losses, "lost": bool(lost), "trained_s": took})


def attempt(device: str, steps: int, preset: str, pipe: str, short: bool) -> dict[str, Any]:
    """One run: what it said, and whether it came to its end. pipe: as for `one_run`."""
    began, row, failures = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = device, f"{folder}/run", steps, preset, pipe, short
        for rank, what in gpu_ranks.launch(one_run, RANKS, *arguments, seconds=LIMIT[device]):
            if isinstance(what, gpu_ranks.Failure):
                failures.append(f"rank {rank}: {what[-400:]}")
            else:
                row |= what
    hung = any("no answer" in failure for failure in failures)
    good = not failures and len(row.get("losses", ())) == steps and not row.get("lost")
    return row | {"seconds": time.monotonic() - began, "good": good, "hung": hung, "failures": failures}


def measure(options: argparse.Namespace, write: Callable[[dict], None], done: set, device: str) -> None:
    gpu_ranks.PRELOAD[:] = PRELOAD
    until, steps = time.monotonic() + options.budget, options.steps if device == "cuda" else 2
    one_writes, alone = threading.Lock(), 0 if done else 1
    for with_service in (True, False) if options.service == "both" else (options.service == "on",):
        left = [number for number in range(options.runs) if (options.preset, with_service, number) not in done]
        side_by_side = options.parallel if with_service else min(options.parallel, options.unshared)
        each = side_by_side if with_service else len(left)  # without it there is nothing to start anew
        batches = [left[:alone]] + [left[i : i + each] for i in range(alone, len(left), each or 1)]
        alone = 0
        for batch in filter(None, batches):
            if time.monotonic() > until:
                break
            with service(with_service and device == "cuda") as pipe:
                beside = min(len(batch), side_by_side)

                def run(number: int, pipe: str = pipe, beside: int = beside, shared: bool = with_service) -> None:
                    if time.monotonic() > until:
                        return
                    row = attempt(device, steps, options.preset, pipe, options.short)
                    with one_writes:
                        write({"preset": options.preset, "service": shared, "run": number, "beside": beside - 1} | row)

                with ThreadPoolExecutor(beside) as pool:
                    list(pool.map(run, batch))


def table(rows: list[dict]) -> str:
    lines = [
        "| preset | multi-process service | runs | came to their end | hung | other failures | median s |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, service in dict.fromkeys((row["preset"], row["service"]) for row in rows):
        of = [row for row in rows if (row["preset"], row["service"]) == (preset, service)]
        middle = sorted(row["seconds"] for row in of)[len(of) // 2]
        good, hung = sum(row["good"] for row in of), sum(row["hung"] for row in of)
        name, other = "on" if service else "off", len(of) - good - hung
        lines.append(f"| {preset} | {name} | {len(of)} | {good} | {hung} | {other} | {middle:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--unshared", type=int, default=2, help="side by side without the service")
    parser.add_argument("--runs", type=int, default=20, help="with the service, and so many without it")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--preset", default="max")
    parser.add_argument("--service", choices=("both", "on", "off"), default="both")
    parser.add_argument("--short", action="store_true", help="two steps of a smaller model")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "twenty.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if options.table:
        print(table(rows))
        return 0

    def write(row: dict) -> None:
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({k: v for k, v in row.items() if k != "losses"}, f"{len(row.get('losses', ()))} steps", flush=True)

    if options.short:
        options.steps = 2
    if options.quick:
        options.runs, options.parallel = 1, 1
    measure(
        options,
        write,
        {(row["preset"], row["service"], row["run"]) for row in rows},
        "cpu" if options.quick else "cuda",
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
