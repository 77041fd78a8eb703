"""`thinwire bench allreduce`: every collective on an emulated slow network: seconds, bytes, words per k."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thinwire import collectives as room
from thinwire.bench.allreduce_options import read_hosts, read_numel
from thinwire.bench.allreduce_ranks import HalfHook, measure, selection
from thinwire.codecs import LowRank, Quantize, TopK
from thinwire.codecs.entries import Entries
from thinwire.collectives.base import Collective
from thinwire.errors import UsageError
from thinwire.lab.network import Network
from thinwire.planner import network as cost
from thinwire.quantities import parse_rate, parse_time, show_bytes, show_rate
from thinwire.terminal import progress, table, write_json

LONG = 10.0  # seconds; an exchange predicted to take longer is done once
LIMIT = 600.0  # seconds for one launch beyond what is predicted
BITS, RANK = 4, 4  # of the dense rivals
MODEL_HOSTS = tuple(2**i for i in range(1, 9))  # to 256: the closed forms, drawn as a model
NOT_RUN = "torch's PowerSGD hook is not run: it calls a collective inside a future's callback and hangs on Gloo."
PARTS = ("rotation", "bucketing", "repartition", "balancing")  # of Ok-Topk
ABLATIONS: dict[str, dict[str, Any]] = {
    **{f"without {part}": {part: False} for part in PARTS},
    "without all four": dict.fromkeys(PARTS, False),
    **{f"{rule} thresholds": {"thresholds": rule} for rule in ("reused", "nudged")},
}
CODINGS = (("fp32", "int32"), ("fp32", "coded"), ("int8", "coded"))


@dataclass(frozen=True)
class Row:
    """A collective, whether it selects k entries, and the closed form of its bytes per rank on p ranks."""

    collective: Collective
    sparse: bool
    predict: Callable[[int], cost.Cost]


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench allreduce` as `args` says; the exit status."""
    hosts, numel = read_hosts(args.hosts), read_numel(args.numel)
    rate = parse_rate(args.rate, "rate")
    shape, k = _matrix(numel), TopK(args.density).count(numel)
    rows = _chosen(contestants(shape, args.density, args.ablation), args.only)
    results: list[dict[str, Any]] = []
    settings = {"rate": rate, "numel": numel, "k": k, "density": args.density, "workers": args.workers}
    settings |= {"latency": args.latency, "not_run": NOT_RUN, "model": _model(rows, k, rate, args.latency)}

    def keep(latest: list[dict[str, Any]]) -> None:
        """A run that is cut off leaves what it has measured."""
        write_json(args.json, {**settings, "rows": results + latest})

    with progress("allreduce", len(hosts) * len(rows) * args.rounds) as advance:
        for size in hosts:
            with Network(hosts=size, rate=rate, latency=args.latency, preload=("thinwire.bench.allreduce",)) as net:
                bench = _Bench(net, rate, shape, k, args.workers, args.steps)
                picked = net.run(selection, numel, k, timeout=LIMIT, echo=False)[0]
                results += bench.compare(rows, args.rounds, picked, advance, keep)
    _show(results, k, rate, args)
    if args.figure:
        from thinwire.bench.allreduce_figure import draw

        draw(results, settings["model"], args.figure, f"{numel:,} values, {100 * args.density:g} %, {show_rate(rate)}")
    return 0


def contestants(shape: tuple[int, int], density: float, ablation: bool = False) -> dict[str, Row]:
    """Name → row, for tensors of `shape` and sparse collectives that pick `density` of them. Sparse ones appear in
    every coding that fits them; Gather and TwoHop as TopkAllgather and Quantized. ablation: Ok-Topk without its parts
    too."""
    n = math.prod(shape)
    k = TopK(density).count(n)
    coded = Quantize(BITS).nbytes((n,), torch.float32)
    raw = LowRank(RANK).is_raw(shape)
    sides = (4.0 * n, 0.0) if raw else (4.0 * RANK * shape[0], 4.0 * RANK * shape[1])
    rows = {
        "dense (Gloo)": Row(room.Dense(), False, lambda p: cost.dense_ring(4 * n, p)),
        "fp16 (torch's DDP hook)": Row(HalfHook(), False, lambda p: cost.dense_ring(2 * n, p)),
        f"Quantized({BITS})": Row(room.Quantized(BITS), False, lambda p: cost.two_hop(coded, p)),
        f"LowRank({RANK})": Row(room.LowRank(RANK), False, lambda p: cost.low_rank(*sides, p)),
    }
    for values, indices in CODINGS:
        rows |= _sparse(n, k, density, values, indices)
    entry = Entries("fp32", "int32").nbytes(n, k) / k
    for name, how in ABLATIONS.items() if ablation else ():
        rows[f"OkTopk {name}"] = Row(room.OkTopk(density, **how), True, lambda p: cost.ok_topk(k, p, entry, True))
    return rows


def _sparse(n: int, k: int, density: float, values: str, indices: str) -> dict[str, Row]:
    entry, coding = Entries(values, indices).nbytes(n, k) / k, f"{values}+{indices}"

    def tree(p: int) -> cost.Cost:
        """gTopk by the mean over ranks, as everything is counted here: 2(P − 1) messages on P ranks."""
        return cost.Cost(2 * k * entry * (p - 1) / p, cost.gtopk(k, p, entry).messages)

    return {
        f"TopkAllgather {coding}": Row(
            room.TopkAllgather(density, values, indices), True, lambda p: cost.topk_allgather(k, p, entry)
        ),
        f"TopkDSA {coding}": Row(
            room.TopkDSA(density, values, indices), True, lambda p: cost.topk_dsa(n, k, p, entry, 4)
        ),
        f"GTopk {coding}": Row(room.GTopk(density, values, indices), True, tree),
        f"OkTopk {coding}": Row(
            room.OkTopk(density, values=values, indices=indices), True, lambda p: cost.ok_topk(k, p, entry, True)
        ),
    }


@dataclass
class _Bench:
    """One network, on which collectives are launched in turn."""

    net: Network
    rate: float | None
    shape: tuple[int, int]
    k: int
    workers: str
    steps: int

    def compare(
        self,
        rows: dict[str, Row],
        rounds: int,
        picked: dict[str, float],
        advance: Callable[[str, int], None],
        keep: Callable[[list[dict[str, Any]]], None],
    ) -> list[dict[str, Any]]:
        """A result for each row; `keep` gets all there are after every launch."""
        size, out = len(self.net.hosts), []
        idle = self._launch(room.Dense(), 0, 0.0)[1]  # what handshake and parting cost
        launches: dict[str, list[tuple[list[Any], float]]] = {name: [] for name in rows}
        for _ in range(rounds):
            for name, row in rows.items():
                expected = row.predict(size).seconds(cost.LinkSpeed(self.rate))
                steps = 1 if expected > LONG else self.steps
                launches[name].append(self._launch(row.collective, steps, steps * expected))
                advance(f"{name}, {size} hosts", 1)
                out = [self._row(n, rows[n], done, idle, picked) for n, done in launches.items() if done]
                dense = next((row["seconds"] for row in out if row["collective"].startswith("dense")), None)
                out = [row | {"times_dense": None if dense is None else dense / row["seconds"]} for row in out]
                keep(out)
        return out

    def _launch(self, collective: Collective, steps: int, expected: float) -> tuple[list[Any], float]:
        """(per rank and step what was measured, mean bytes per host as the lab counts what was sent)."""
        limit = LIMIT + 4 * expected
        results = self.net.run(measure, collective, self.shape, self.k, self.workers, steps, timeout=limit, echo=False)
        return list(results), results.total_sent / len(results)

    def _row(
        self,
        name: str,
        row: Row,
        launches: list[tuple[list[Any], float]],
        idle: float,
        picked: dict[str, float],
    ) -> dict[str, Any]:
        """Seconds: the slowest rank's, median over steps but the first of a launch, where thresholds are made."""
        size, steps = len(self.net.hosts), len(launches[0][0][0])
        slowest = [[max(r[s]["seconds"] for r in ranks) for s in range(steps)] for ranks, _ in launches]
        later = [second for times in slowest for second in (times[1:] or times)]
        every = [rank[s] for ranks, _ in launches for rank in ranks for s in range(steps)]
        counted = statistics.fmean(sent - idle for _, sent in launches) / steps
        payload, beside = (statistics.fmean(r[kind] for r in every) for kind in ("payload", "beside"))
        busiest = max(statistics.fmean(step["payload"] for step in rank) for ranks, _ in launches for rank in ranks)
        return {
            "collective": name, "hosts": size, "steps": steps * len(launches), "sparse": row.sparse,
            "seconds": statistics.median(later), "seconds_first": statistics.median(t[0] for t in slowest),
            "seconds_all": slowest, "select": _selecting(name, row, picked),
            "wire": cost.LinkSpeed(self.rate).occupied(counted), "predicted": row.predict(size).nbytes,
            "payload": payload, "payload_busiest": busiest, "beside": beside, "counted": counted,
            "words_per_k": payload / 4 / self.k if row.sparse else None,
            "passed": [int(step["passed"]) for step in launches[0][0][0]] if row.sparse else None,
        }  # fmt: skip


def _model(rows: dict[str, Row], k: int, rate: float | None, latency: str) -> dict[str, list[dict[str, float]]]:
    """Closed forms, per row and number of hosts: words per k and seconds of wire and latency, no computing."""
    link = cost.LinkSpeed(rate, parse_time(latency, "latency"))
    return {
        name: [
            {"hosts": p, "words_per_k": row.predict(p).nbytes / 4 / k, "seconds": row.predict(p).seconds(link)}
            for p in MODEL_HOSTS
        ]
        for name, row in rows.items()
    }


def _selecting(name: str, row: Row, picked: dict[str, float]) -> float | None:
    """Ok-Topk reuses its threshold, the others select exactly."""
    if not row.sparse:
        return None
    return picked["reused" if name.startswith("OkTopk") else "exact"]


def _matrix(numel: int) -> tuple[int, int]:
    """numel as the squarest matrix, for LowRank."""
    rows = next(r for r in range(math.isqrt(numel), 0, -1) if numel % r == 0)
    return rows, numel // rows


def _chosen(rows: dict[str, Row], only: str) -> dict[str, Row]:
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    for word in words:
        if not any(word in name.lower() for name in rows):
            raise UsageError(f"--only {word}: no collective's name contains it; there are {', '.join(rows)}")
    return {name: row for name, row in rows.items() if not words or any(word in name.lower() for word in words)}


def _show(results: list[dict[str, Any]], k: int, rate: float | None, args: argparse.Namespace) -> None:
    cells = [
        (
            row["hosts"], row["collective"], row["steps"], row["select"], row["wire"], row["seconds"],
            row["seconds_first"], row["times_dense"], show_bytes(row["predicted"]), show_bytes(row["payload"]),
            show_bytes(row["beside"]), show_bytes(row["counted"]), row["words_per_k"],
        )
        for row in results
    ]  # fmt: skip
    columns = (
        "P", "collective", "steps", "select s", "wire s", "total s", "first s", "× dense", "predicted", "payload",
        "beside", "counted", "words/k",
    )  # fmt: skip
    caption = (
        "bytes per rank and step, mean over ranks: predicted by closed form, payload and what goes beside it (counts, "
        "histograms) as handed to torch.distributed, counted by the lab from outside. wire s: counted ÷ rate. "
        "select s: one rank alone, also part of total. " + NOT_RUN
    )
    title = f"{args.numel} values, k = {k:,}, {show_rate(rate)}, {args.workers} workers"
    table(title, columns, cells, caption)
