"""Long links: steps beside their prediction, what changed a step without latency, and collectives at 10 to 100 ms.

    python benchmarks/network/long_links.py --out out/long [--budget 480] [--labs 2] [--cores 8-15] [--only PARTS]
        [--trees out/trees] [--quick]
    python benchmarks/network/long_links.py --out out/long --table        markdown of all that is in the folder

Every finished cell is a line of rows.jsonl, and is not measured again. Labs run side by side, each on cores of its own.
Parts: predict (dp 2 × pp 2, the starting configuration with hidden 128; the planner's simulation from what ranks
measured beside the steps that follow), loss, opening (connections of eight streams), microbatches (as many as
the planner chooses), early (gradients that leave before a schedule ends), goals (cold steps over 50 ms),
variants (20 Mb/s without latency, one change taken back at a time), allreduce, trees (`thinwire train` of other
versions: folders in --trees).
The simulation is made by --table, from what was measured: it follows changes of the planner.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from long_links_ranks import allreduce_cells, append, opening_cells, train_cells, train_command
from long_links_table import show

from thinwire.config.presets import PRESETS
from thinwire.lab import Network

PRELOAD = ("torch", "torch.distributed.checkpoint", "transformers", "thinwire.train.loop", "thinwire.bench.allreduce")
WIRES: dict[str, dict[str, Any]] = {
    "off": {},
    "bf16": {"preset": "bf16"},
    "max": {"preset": "max"},
    "fused": {"preset": "max"},  # beside rows: the same vocabulary
    "rows": {"preset": "max", "embedding": {"collective": "quantized", "bits": 4, "sync": "rows"}},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "Interleaved1F1B": {"virtual": 2}, "ZBVZeroBubble": {}, "DualPipeV": {}, "1F1B": {},
}  # fmt: skip
TWO_HOPS = {"collective": "quantized", "bits": 4, "memory": "error_feedback", "hops": 2}
VARIANTS = ("now", "two hops", "receives late", "gradients late", "one unit at a time", "no checksums")
COLLECTIVES = {
    "OkTopk fp32+coded": 5, "TopkAllgather fp32+coded": 5, "TopkDSA fp32+coded": 5, "GTopk fp32+coded": 5,
    "OkTopk int8+coded": 5, "Quantized(4)": 4, "dense (Gloo)": 2,
}  # fmt: skip
GRACE = 150.0  # seconds after the budget in which a cell that has begun may end
Job = dict[str, Any]


def document(wire: str, steps: int, *, cold: bool = False, streams: int = 1, quick: bool = False) -> dict[str, Any]:
    """A run. Warm: every step has the same samples; cold: no sample comes twice."""
    sizes = {"hidden": 32, "layers": 2, "heads": 2} if quick else {"hidden": 128}
    vocab = {"vocab": 4096} if wire in ("rows", "fused") else {}  # of so few rows as bytes have, fused is cheaper
    data: dict[str, Any] = {"samples": 800, "held_out": 0.0} if cold else {"samples": 16, "held_out": 0.0}
    data |= {"corpus_bytes": 400_000, "tokenizer": "bytes"} | ({"seq_len": 32} if quick else {})
    return {
        "model": sizes | vocab, "data": data, "mesh": {"dp": 2, "pp": 2}, "optim": {"batch": 16, "steps": steps},
        "wire": WIRES[wire] | ({"streams": streams} if streams > 1 else {}),
    }  # fmt: skip


def training(part: str, rate: str, latency: str, cells: list[dict[str, Any]], loss: str = "0%", **network: Any) -> Job:
    about = {"part": part, "rate": rate, "latency": latency, "loss": loss, **network}
    return {
        "name": f"{part} {rate} {latency} {loss}", "about": about, "cells": cells, "hosts": 4,
        "network": {"rate": rate, "latency": latency, "loss": loss, **network},
    }  # fmt: skip


def predicted(wire: str, quick: bool, streams: int = 1, steps: int = 9, repeat: int = 0) -> dict[str, Any]:
    about = {"wire": wire, "streams": streams, **({"repeat": repeat} if repeat else {})}
    given = document(wire, 5 if quick else steps, streams=streams, quick=quick)
    return {"about": about, "document": given, "variant": "now", "predicted": True}


def cold(variant: str, repeat: int, quick: bool, tree: str | None = None) -> dict[str, Any]:
    given = document("max", 5 if quick else 11, cold=True, quick=quick)
    if variant == "two hops":
        given["wire"] = {**given["wire"], "gradient": TWO_HOPS, "embedding": {**TWO_HOPS, "sync": "fused"}}
    about = {"wire": "max", "variant": variant, "repeat": repeat}
    return {"about": about, "document": given, "variant": variant, "predicted": False, "tree": tree}


def by_schedule(rate: str, latency: str, quick: bool) -> Job:
    """Gradients that leave early, and with the schedule's end, in units of half a megabyte; bf16, so that they are
    large."""
    cells = []
    for schedule, more in SCHEDULES.items():
        for variant in ("now", "gradients late"):
            given = document("bf16", 5 if quick else 12, quick=quick)
            given["model"] |= {"layers": 4} if quick else {}
            given["mesh"] |= {"schedule": schedule, **more}
            given["wire"] = {"preset": "bf16", "gradient": {**PRESETS["bf16"]["gradient"], "unit_mb": 0.5}}
            about = {"wire": "bf16", "variant": variant, "collective": schedule}
            cells.append({"about": about, "document": given, "variant": variant, "predicted": False})
    return training("early", rate, latency, cells)


def by_microbatches(rate: str, latency: str, quick: bool) -> Job:
    """The planner decides, with and without the number of micro-batches; sixteen rows per replica."""
    cells = []
    for count in ("auto", 4):
        given = document("max", 5 if quick else 12, quick=quick)
        given |= {"wire": {"auto": True}, "optim": {**given["optim"], "batch": 32}}
        given["data"] |= {"samples": 32}
        given["mesh"] |= {"microbatches": count}
        about = {"wire": "auto", "variant": str(count)}
        cells.append({"about": about, "document": given, "variant": "now", "predicted": False})
    return training("microbatches", rate, latency, cells)


def allreduce(latency: str, quick: bool) -> Job:
    cells = [{"about": {"collective": name}, "steps": 2 if quick else n} for name, n in COLLECTIVES.items()]
    hosts, shape = (2, (64, 64)) if quick else (8, (2500, 4000))
    about = {"part": "allreduce", "rate": "100mbit", "latency": latency, "hosts": hosts}
    return {
        "name": f"allreduce {latency}", "about": about, "cells": cells, "hosts": hosts, "shape": shape,
        "density": 0.01, "network": {"rate": "100mbit", "latency": latency},
    }  # fmt: skip


def opening(quick: bool) -> Job:
    latency = "5ms" if quick else "50ms"
    about = {"part": "opening", "rate": "100mbit", "latency": latency, "loss": "0%"}
    cells = [{"about": {"streams": n, "repeat": i}} for n in (8,) for i in range(2 if quick else 10)]
    network = {"rate": "100mbit", "latency": latency}
    return {"name": "opening", "about": about, "cells": cells, "hosts": 4, "network": network}


def jobs(trees: Path | None, quick: bool) -> list[Job]:
    """All of them, the most important first."""
    long, short = [("100mbit", "50ms"), ("20mbit", "50ms")], [("20mbit", "0ms"), ("100mbit", "0ms")]
    middle = [("20mbit", "20ms"), ("100mbit", "20ms")]
    if quick:
        long, short, middle = [("100mbit", "5ms")], [], []
    cell = partial(predicted, quick=quick)
    eight, lossy = cell("max", streams=8), [cell("max", streams=n, steps=16) for n in (8, 1)]
    again = [cell("max", streams=n, steps=16, repeat=1) for n in (1, 8)]
    out = [training("predict", *long[0], [cell("max"), cell("off")], slow_start_after_idle=False)]
    out.append(training("loss", *long[0], again[:1], loss="0.1%"))
    out += [] if quick else [training("loss", "100mbit", "20ms", again, loss="0.1%")]
    out += [by_microbatches(*long[0], quick), by_schedule(*(short or long)[0], quick)]
    out.append(training("predict", *long[0], [cell("max", repeat=1), cell("fused")]))
    out += [training("predict", *link, [cell("rows", repeat=1), eight]) for link in middle[1:]]
    out.append(training("predict", *long[0], [cell("rows"), eight, cell("max")]))
    out.append(training("loss", *long[0], lossy, loss="0.1%"))
    out.append(training("loss", *long[0], lossy[1:], loss="0.1%", congestion="bbr"))
    out += [opening(quick), training("predict", *long[-1], [cell("rows"), eight])]
    out += [training("predict", *link, [cell("rows"), eight]) for link in middle]
    out += [training("predict", *link, [cell("rows"), eight]) for link in short]
    out.append(training("predict", *long[0], [cell("rows", streams=8), cell("off", streams=8)]))
    out += [training("loss", "100mbit", "20ms", lossy, loss="0.1%")] if not quick else []
    out += [training("predict", *link, [cell("rows", streams=8), cell("bf16", streams=8)]) for link in middle]
    out.append(training("predict", *long[0], [cell("max", repeat=n) for n in (1, 2)]))
    out += [training("loss", "100mbit", "0ms", lossy[1:], loss="0.1%")] if not quick else []
    out += [training("predict", *link, [cell(w) for w in ("off", "bf16", "max")]) for link in long + short + middle]
    out += [by_microbatches(*link, quick) for link in (*middle[:1], *short)]
    out += [by_schedule(*link, quick) for link in middle[1:]]
    orders = [VARIANTS, VARIANTS[::-1]]
    changes = [
        training("variants", "20mbit", "0ms", [cold(name, at, quick) for name in order])
        for at, order in enumerate(orders)
    ]
    out.append(changes[0])
    if not quick:
        for rate in ("100mbit", "20mbit"):
            out.append(training("goals", rate, "50ms", [cold("now", 0, quick)]))
        out.append(training("goals", "100mbit", "50ms", [cold("now", 0, quick)], slow_start_after_idle=False))
        out += [allreduce(latency, quick) for latency in ("10ms", "50ms", "100ms", "0ms")]
        out.append(changes[1])
    else:
        out.append(allreduce("5ms", quick))
    for at, folder in enumerate(sorted(trees.iterdir())) if trees is not None else ():
        cells = [cold(f"tree {folder.name}", 0, quick, str(folder.resolve())), cold("tree now", at, quick, os.getcwd())]
        out.append(training("trees", "20mbit", "0ms", cells))
    return out


def key_of(row: dict[str, Any]) -> str:
    names = ("part", "rate", "latency", "loss", "slow_start_after_idle", "wire", "streams", "variant", "repeat")
    return json.dumps([row.get(name) for name in (*names, "collective", "congestion")])


def left_over(job: Job, path: Path) -> Job:
    """The job without the cells whose rows are there."""
    lines = path.read_text().splitlines() if path.exists() else []
    done = {key_of(json.loads(line)) for line in lines}
    return {**job, "cells": [c for c in job["cells"] if key_of({**job["about"], **c["about"]}) not in done]}


def perform(job: Job) -> None:
    """In a process of its own: one lab."""
    if job["about"]["part"] == "trees":
        for cell in job["cells"]:
            if time.time() < job["until"]:
                with tempfile.TemporaryDirectory() as folder:
                    row = train_command(job, cell, Path(folder))
                append(job["rows"], {**job["about"], **cell["about"], **row})
                print(f"{job['name']}: {cell['about']} {row['measured']:.3f} s", flush=True)
        return
    work = {"allreduce": allreduce_cells, "opening": opening_cells}.get(job["about"]["part"], train_cells)
    link = {"hosts": job["hosts"], **job["network"], "preload": PRELOAD}
    with tempfile.TemporaryDirectory() as folder, Network(**link) as network:
        network.run(work, job | {"folder": folder}, timeout=job["until"] - time.time() + GRACE)


def launch(job: Job, cores: list[int], out: Path, number: int) -> subprocess.Popen[bytes]:
    path = out / f"job-{number}.json"
    path.write_text(json.dumps({**job, "cores": cores}))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with (out / f"job-{number}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, __file__, "--job", str(path)], env=variables, stdout=log, stderr=log)


def run_all(args: argparse.Namespace, waiting: list[Job], cores: list[list[int]]) -> None:
    """Jobs on as many labs as there are sets of cores, until the budget is spent."""
    began, number = time.time(), 0
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    while waiting or running:
        for lab, (job, process) in list(running.items()):
            if process.poll() is not None:
                print(f"{time.time() - began:.0f} s: {job['name']} ended with {process.returncode}", flush=True)
                del running[lab]
            elif time.time() > began + args.budget + GRACE:
                process.kill()  # its lab ends with it
        for lab, some in enumerate(cores):
            if lab not in running and waiting and time.time() < began + args.budget:
                job = left_over(waiting.pop(0), args.out / "rows.jsonl")
                if job["cells"]:
                    number += 1
                    job |= {"until": began + args.budget, "rows": str((args.out / "rows.jsonl").resolve())}
                    running[lab] = (job, launch(job, some, args.out, number))
        if time.time() >= began + args.budget:
            waiting.clear()
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/long"), help="folder of results (%(default)s)")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no cell begins (%(default)s)")
    parser.add_argument("--labs", type=int, default=2, help="side by side (%(default)s)")
    parser.add_argument("--cores", help="such as 8-15, shared out among the labs; default: the last eight")
    parser.add_argument("--only", default="", help="parts, comma-separated")
    parser.add_argument("--trees", type=Path, help="a folder of folders, each with a version of thinwire/")
    parser.add_argument("--quick", action="store_true", help="tiny cells, to try the script")
    parser.add_argument("--table", action="store_true", help="print what was measured, and measure nothing")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        job = json.loads(args.job.read_text())
        os.sched_setaffinity(0, job["cores"])
        perform(job)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        usable = sorted(os.sched_getaffinity(0))[-8:]
        if args.cores:
            first, _, last = args.cores.partition("-")
            usable = list(range(int(first), int(last or first) + 1))
        each = max(1, len(usable) // args.labs)
        cores = [usable[lab * each : (lab + 1) * each] for lab in range(args.labs)]
        parts = args.only.split(",") if args.only else None
        run_all(args, [j for j in jobs(args.trees, args.quick) if not parts or j["about"]["part"] in parts], cores)
    show(args.out / "rows.jsonl")


if __name__ == "__main__":
    main()
