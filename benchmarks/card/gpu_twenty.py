"""Does a run that loads all its kernels at the start ever stand still? dp 2 × pp 2, `max`, many times.

    python3 benchmarks/card/gpu_twenty.py --out FOLDER [--budget SECONDS] [--parallel N] [--runs 20] [--quick] [--table]
    python3 benchmarks/card/gpu_twenty.py --out FOLDER --preset paper-aqsgd --runs 5

A model of the Llama family at random (tied embedding, so two gradient groups per rank), sequences of 256, a batch of 16
in four micro-batches, four ranks on one card over sockets, THINWIRE_NEW_KERNELS=error; half of the runs through CUDA's
multi-process service. Every run is four new processes. One that does not end within LIMIT seconds has hung: its own
processes are ended, and the service is started anew. Under `paper-aqsgd` epochs are four steps long: the first is
exact, so other kernels than before are called in mid-run. A line of FOLDER/twenty.jsonl per run, written at once; runs
that are there are not made again. --quick: two runs of a small model on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_ranks
from gpu_pipeline import shared_card

RANKS, LIMIT = 4, {"cuda": 120.0, "cpu": 400.0}  # there Numba may have to compile
PRELOAD = ["torch", "torch.distributed.pipelining", "thinwire.train.rank", "thinwire.train.build", "transformers"]
MODEL = {"hidden": 576, "layers": 6, "heads": 9, "kv_heads": 3, "tied": True}
SMALL = {"hidden": 32, "layers": 4, "heads": 4, "tied": True}


def one_run(tell: Callable[[Any], None], device: str, folder: str, steps: int, preset: str) -> None:
    """A rank of one run; rank 0 tells the losses."""
    os.environ["THINWIRE_NEW_KERNELS"] = "error"
    from thinwire.train.config.sections import read_config
    from thinwire.train.metrics import read_events
    from thinwire.train.rank import train_rank

    gpu_ranks.use_reference_without_numba()
    began = time.monotonic()
    length = 256 if device == "cuda" else 32
    corpus = 4 * 16 * length if preset == "paper-aqsgd" else 400_000 if device == "cuda" else 40_000
    table = {
        "model": MODEL if device == "cuda" else SMALL,
        "data": {"seq_len": length, "corpus_bytes": corpus, "held_out": 0.05},
        "optim": {"batch": 16, "steps": steps, "warmup": 1, "lr": 1e-3},
        "mesh": {"dp": 2, "pp": 2, "microbatches": 4},
        "wire": {"preset": preset},
        "run": {"device": device, "out": folder, "eval_every": steps // 2, "checkpoint_every": 0},
    }
    lost = train_rank(read_config(table), False)
    took = time.monotonic() - began
    if os.environ["RANK"] == "0":
        events = list(read_events(Path(folder) / "metrics.jsonl"))
        losses = [event["loss"] for event in events if event["kind"] == "step"]
        tell({"losses": losses, "lost": bool(lost), "trained_s": took})


def attempt(device: str, steps: int, preset: str) -> dict[str, Any]:
    """One run: what it said, and whether it came to its end."""
    began, row, failures = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = device, f"{folder}/run", steps, preset
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
    until, steps = time.monotonic() + options.budget, 6 if device == "cuda" else 2
    for service in (True, False) if options.service == "both" else (options.service == "on",):
        left = [number for number in range(options.runs) if (options.preset, service, number) not in done]
        if not left or time.monotonic() > until:
            continue
        with ExitStack() as service_of:
            there = service and service_of.enter_context(shared_card(device))
            restart = threading.Lock()

            def run(number: int, service: bool = service, there: bool = there, restart: Any = restart) -> None:
                if time.monotonic() > until:
                    return
                row = attempt(device, steps, options.preset)
                with restart:
                    write({"preset": options.preset, "service": service, "there": there, "run": number} | row)

            first, *others = left
            run(first)  # compiles
            with ThreadPoolExecutor(options.parallel if service else min(options.parallel, 2)) as pool:
                list(pool.map(run, others))


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
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--preset", default="max")
    parser.add_argument("--service", choices=("both", "on", "off"), default="both")
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
