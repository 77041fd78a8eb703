"""Seconds of a round between four sites over slow links, measured in the lab: the model of --times is checked by it.

    python benchmarks/quality/local_seconds.py [--rates 10mbit 100mbit 300mbit] [--latency 50ms] [--real] [--json PATH]

--real: messages as long as those of local_real.py between sites with SmolLM2-135M, which nothing has to be coded for;
those of every step are DENSE_PART times shorter, and their seconds multiplied.

Four sites of one process each. Nothing is computed between rounds: weights move by noise, and `local.step()` is timed,
every method with a round after each step. What a step takes in training is its computing and 1/H of that.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from frontier_jobs import SITES, low
from local_real import FOUR, exact, job, rival, signs, two_hops
from stacked_model import Size
from stacked_run import PER_STEP, Job
from stacked_sites import Wire, per_step_wire, table_of
from torch import nn

from thinwire.collectives import Dense, Gather
from thinwire.lab import Network
from thinwire.lab.topology import in_sites, make_link
from thinwire.local_steps.schedule import split_fragments
from thinwire.parallel import LocalSteps
from thinwire.terminal import table, write_json

SIZE = Size(256, 4, 256)
PLAIN = {"outer_lr": 1.0, "momentum": 0.0, "nesterov": False}
METHODS: dict[str, dict[str, Any]] = {
    "ours, rank 3": low(rank=3, shrink=43.0), "ours, rank 8": low(rank=8), "SparseLoCo": {"preset": "sparseloco"},
    "Streaming DiLoCo": {"preset": "streaming-diloco", "fragments": 1, "delay": 0},
    "four bits": {"wire": "max", **PLAIN}, "bf16": {"wire": "bf16", **PLAIN}, "fp32": {"wire": "off", **PLAIN},
}  # fmt: skip
DENSE_PART = 20
REAL = {
    "SparseLoCo, local-max": rival("sparseloco", 10, 0.0, 1.0), "two bits, a fragment of 8": two_hops(82, 0.0),
    "local-signs": signs(0.0), "two bits": two_hops(9, 0.0),
    "Streaming DiLoCo, a fragment of 4": rival("streaming-diloco", 30, 0.0, 1.0),
    "four bits per step": job(FOUR, 0, {}, 0.0), "fp32": exact(0.0),
}  # fmt: skip


def as_long(run: Job) -> tuple[dict[str, Any], int, int]:
    """(a table `[local]`, values, part): exact values in messages as long as a run's are, or `part` times shorter."""
    settings = table_of(run.table, run.every) if run.table else None
    reduction = (settings.wire.gradient if settings else None) or per_step_wire(PER_STEP.get(run.method, "off"))
    parts = split_fragments(run.size.shapes(), settings.fragments if settings else 1)
    nbytes = sum(Wire(reduction, names, run.size, SITES).bytes_of_turns[0] for names in parts) / len(parts)
    gathered = isinstance(reduction.collective, Gather)
    part = 1 if run.table else DENSE_PART
    sent = SITES - 1 if gathered else 2 * (SITES - 1) / SITES  # times a site's values
    kind = {
        "collective": "gather" if gathered else "two_hop",
        "codec": {"codec": "identity"},
        "memory": "plain",
        "exact_dims": 0,
    }
    wire: Any = "off" if isinstance(reduction.collective, Dense) else {"gradient": {**kind, "unit_mb": 1e4}}
    return {"wire": wire, **PLAIN}, int(nbytes / part / sent / 4), part


def rounds(settings: dict[str, Any], count: int, values: int = 0) -> float:
    """One site: seconds of a round, the mean over all but the first. values: of one tensor, instead of the model's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = {"all": torch.zeros(1, values)} if values else SIZE.views(SIZE.initial(0)[None])
    parameters = {name: nn.Parameter(w[0].clone()) for name, w in first.items()}
    inner = torch.optim.SGD(parameters.values(), lr=1.0)
    local = LocalSteps(parameters.items(), inner, {**settings, "every": 1})
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for _ in range(count + 1):
        for p in parameters.values():
            p.data += 1e-3 * (torch.randn(p.shape, generator=generator) if not values else 1.0)
        dist.barrier()
        began = time.perf_counter()
        local.step()
        seconds.append(time.perf_counter() - began)
    local.close()
    return sum(seconds[1:]) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "300mbit"])
    parser.add_argument("--latency", default="50ms", help="one way, between two sites (default 50ms)")
    parser.add_argument("--only", nargs="*", choices=[*METHODS, *REAL])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    names = args.only or list(REAL if args.real else METHODS)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for rate in args.rates:
        for name in names:
            settings, values, part = as_long(REAL[name]) if args.real else (METHODS[name], 0, 1)
            link = make_link({"rate": rate, "latency": args.latency}, "")
            with Network(topology=in_sites(SITES, 1, link), preload=("torch",)) as net:
                seconds = net.run(rounds, settings, args.rounds, values, timeout=600.0, echo=False)
            found[name][rate] = part * max(seconds)
            print(f"{rate}, {name}: {found[name][rate]:.3f} s per round", flush=True)
    cells = [(name, *(f"{row[rate]:.3f} s" for rate in args.rates)) for name, row in found.items()]
    table(f"A round between {SITES} sites, {args.latency} one way", ("method", *args.rates), cells)
    write_json(args.json, {"latency": args.latency, "seconds": found})


if __name__ == "__main__":
    main()
