"""`thinwire bench pipeline`: what compression of activations and gradients gains, and what it costs in quality.

Loss does not depend on the network's rate: every mode is trained once (per seed) on an unlimited network, and a few
cold and warm steps of it are timed at every rate. The rates follow from the shares s of the fp32 step that should be
exposed wire: T(rate) = T₀ + bits/rate is measured twice, and rate(s) = bits·(1 − s)/(T₀·s).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.network import Network
from thinwire.parallel.bench_pipeline_modes import MODES, Mode, predicted_bytes
from thinwire.parallel.bench_pipeline_ranks import SCHEDULES, Setup, pretrain, time_steps, train
from thinwire.report.show import progress, table, write_json
from thinwire.units import SLOWEST, parse_rate, show_bytes, show_rate

PRELOAD = ("torch", "torch.distributed.pipelining", "thinwire.parallel.bench_pipeline_ranks")
LIMIT = 600.0  # seconds for one launch beyond what is predicted
PROBE = 20e6  # bit/s of the launch that finds how many bits the fp32 step waits for
SHARES = "0.9,0.95,0.98,0.995"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=4, help="stages, one a host (%(default)s)")
    parser.add_argument("--shares", default=SHARES, help="of the fp32 step on the exposed wire (%(default)s)")
    parser.add_argument("--rates", default="", help="of every host's link, instead of --shares; comma-separated")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1F1B", help="(%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="modes whose name contains one of these words")
    parser.add_argument("--seeds", type=int, default=3, help="paired runs for the loss; 0: no training (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed, cold and warm each; 0: no timing (%(default)s)")
    for name, text in (
        ("epochs", "of fine-tuning"), ("samples", "fine-tuned on"), ("held-out", "samples"),
        ("pretrain", "steps before, in one process"), ("layers", "of a stage"), ("width", "of the model"),
        ("length", "bytes of a sample"), ("rows", "of a micro-batch"), ("microbatches", "of a step"),
    ):  # fmt: skip
        default = getattr(Setup(stages=1), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="written anew after every row")
    parser.add_argument("--figure", metavar="PATH", help="loss against time, step time against rate, speed-up")


def run(args: argparse.Namespace) -> int:
    setup, modes = _setup(args), _chosen(args.only)
    bench = Bench(setup, modes, args.steps, args.json)
    with Network(hosts=args.hosts, preload=PRELOAD) as net, tempfile.TemporaryDirectory() as folder:
        launches = args.seeds * (1 + len(modes))
        with progress("pipeline", launches + 1) as advance:
            bench.train(net, args.seeds, folder, advance)
            if args.steps:
                bench.time(net, [None, *bench.rates(net, args.rates, args.shares)])
            advance("timed", 1)
    bench.show()
    if args.figure:
        from thinwire.parallel.bench_pipeline_figure import draw

        draw(bench.result, args.figure)
    return 0


class Bench:
    """Gathers rows; `result` is what is written."""

    def __init__(self, setup: Setup, modes: dict[str, Mode], steps: int, path: str | None) -> None:
        self.setup, self.modes, self.steps, self.path = setup, modes, steps, path
        self.result: dict[str, Any] = {"setup": asdict(setup), "steps": steps, "loss": [], "time": []}

    def keep(self, kind: str, row: dict[str, Any]) -> None:
        self.result[kind].append(row)
        write_json(self.path, self.result)

    # --- quality

    def train(self, net: Network, seeds: int, folder: str, advance: Callable[[str, int], None]) -> None:
        """Paired: every mode starts from the same weights and sees the same batches."""
        for seed in range(seeds):
            setup = replace(self.setup, seed=seed)
            weights = str(Path(folder) / f"{seed}.pt")
            start = pretrain(setup, weights)
            advance(f"seed {seed} pre-trained", 1)
            for name, mode in self.modes.items():
                if mode.schedule and mode.schedule != setup.schedule:
                    advance(name, 1)  # the schedule does not change the loss
                    continue
                ranks = net.run(train, mode, setup, weights, timeout=LIMIT + 60 * setup.epochs, echo=False)
                totals = [_summed(rank["epochs"][e] for rank in ranks) for e in range(setup.epochs)]
                row = {"mode": name, "seed": seed, "pretrained": start, "losses": ranks[0]["losses"], "epochs": totals}
                self.keep("loss", row)
                advance(f"{name}, seed {seed}", 1)

    # --- time

    def rates(self, net: Network, rates: str, shares: str) -> list[float]:
        """As given, or so that the fp32 step spends the shares on the exposed wire."""
        if rates:
            return [rate for rate in (parse_rate(word, "rate") for word in rates.split(",")) if rate is not None]
        free = self.launch(net, MODES["fp32"], None)["warm"]
        slow = self.launch(net, MODES["fp32"], PROBE)["warm"]
        bits = max(slow - free, 1e-3) * PROBE
        self.result |= {"fp32_unlimited": free, "exposed_bits": bits}
        return [max(SLOWEST, bits * (1 - s) / (free * s)) for s in _shares(shares)]

    def time(self, net: Network, rates: list[float | None]) -> None:
        for rate in rates:
            for name, mode in self.modes.items():
                self.keep("time", {"mode": name, "rate": rate, **self.launch(net, mode, rate)})

    def launch(self, net: Network, mode: Mode, rate: float | None) -> dict[str, Any]:
        """Slowest rank's seconds of a cold and of a warm step (median), and bytes: predicted, framed, counted."""
        for host in range(len(net.hosts)):
            net.set_rate(host, "unlimited" if rate is None else rate)
        expected = 8 * self.predicted(mode, False) * self.setup.stages / (rate or 1e9)
        limit = LIMIT + 6 * (self.steps + 1) * expected
        before = net.run(time_steps, mode, self.setup, 0, timeout=limit, echo=False)
        ranks = net.run(time_steps, mode, self.setup, self.steps, timeout=limit, echo=False)
        slowest = {
            kind: [max(rank["seconds"][kind][s] for rank in ranks) for s in range(self.steps)]
            for kind in ("cold", "warm")
        }
        counts = [_summed(rank["counts"] for rank in run) for run in (before, ranks)]
        framed = sum(counts[1][way] - counts[0][way] for way in ("forward", "backward"))
        return {
            "cold": statistics.median(slowest["cold"]), "warm": statistics.median(slowest["warm"]), "all": slowest,
            "predicted": sum(self.predicted(mode, warm) * self.steps for warm in (False, True)),
            "framed": framed or None, "counted": ranks.total_sent - before.total_sent,
        }  # fmt: skip

    def predicted(self, mode: Mode, warm: bool) -> int:
        """Bytes of one step over all boundaries, where every message is compressed."""
        s = self.setup
        one = sum(predicted_bytes(mode, s.rows, s.length, s.width, warm))
        return one * s.microbatches * (s.stages - 1)

    # --- the table

    def show(self) -> None:
        if self.result["loss"]:
            cells = [(name, *cell) for name in self.modes if (cell := loss_cells(self.result, name))]
            table(
                "held-out loss, evaluated uncompressed", ("mode", "seeds", "loss", "over fp32", "± 95 %", "warm"),
                cells, "over fp32: mean over paired seeds of the relative difference after the last epoch",
            )  # fmt: skip
        if self.result["time"]:
            table("seconds a step", COLUMNS, [_time_cells(self.result, row) for row in self.result["time"]], CAPTION)


COLUMNS = ("rate", "mode", "cold s", "warm s", "× fp32", "× bf16", "ideal", "predicted", "framed", "counted")
CAPTION = (
    "slowest rank, median. Bytes over all timed steps and hosts: predicted by closed form, framed as sent, counted by "
    "the lab from outside. ideal: 1/((1 − s) + s·bits/32) with s the wire's share of the fp32 step at that rate"
)


def loss_cells(result: dict[str, Any], name: str) -> tuple[Any, ...] | None:
    """(seeds, loss, relative difference to fp32, half its confidence interval, share of warm visits)."""
    rows = [row for row in result["loss"] if row["mode"] == name]
    base = {row["seed"]: row["losses"][-1] for row in result["loss"] if row["mode"] == "fp32"}
    if not rows:
        return None
    gaps = [row["losses"][-1] / base[row["seed"]] - 1 for row in rows if row["seed"] in base]
    spread = 4.303 if len(gaps) == 3 else 2.0  # Student's t for three pairs, about two for many
    half = spread * statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    visits = _summed(epoch for row in rows for epoch in row["epochs"])
    warm = visits["warm"] / (visits["warm"] + visits["cold"]) if visits["warm"] else None
    mean = statistics.fmean(row["losses"][-1] for row in rows)
    return len(rows), mean, f"{100 * statistics.fmean(gaps):+.2f} %" if gaps else None, _percent(half), _percent(warm)


def _time_cells(result: dict[str, Any], row: dict[str, Any]) -> tuple[Any, ...]:
    fp32, bf16 = (_warm(result, name, row["rate"]) for name in ("fp32", "bf16"))
    return (
        show_rate(row["rate"]), row["mode"], row["cold"], row["warm"], fp32 and fp32 / row["warm"],
        bf16 and bf16 / row["warm"], ideal(result, row), show_bytes(row["predicted"]),
        "–" if row["framed"] is None else show_bytes(row["framed"]), show_bytes(row["counted"]),
    )  # fmt: skip


def ideal(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """The speed-up that compression of the wire's share of the fp32 step to bits/32 would give."""
    free, slow = _warm(result, "fp32", None), _warm(result, "fp32", row["rate"])
    if free is None or slow is None or row["rate"] is None:
        return None
    s = max(0.0, 1 - free / slow)
    return 1 / ((1 - s) + s * statistics.fmean(MODES[row["mode"]].bits) / 32)


def _warm(result: dict[str, Any], name: str, rate: float | None) -> float | None:
    return next((row["warm"] for row in result["time"] if row["mode"] == name and row["rate"] == rate), None)


def _summed(counts: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            out[name] = out.get(name, 0) + count
    return out


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def _shares(text: str) -> list[float]:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < s < 1 for s in shares):
        raise UsageError(f"--shares {text}: allowed are numbers between 0 and 1, comma-separated")
    return shares


def _setup(args: argparse.Namespace) -> Setup:
    names = ("epochs", "samples", "held_out", "pretrain", "layers", "width", "length", "rows", "microbatches")
    for name in ("hosts", *names):
        if getattr(args, name) < (2 if name == "hosts" else 1):
            raise UsageError(f"--{name} {getattr(args, name)}: too small")
    setup = Setup(args.hosts, schedule=args.schedule, **{name: getattr(args, name) for name in names})
    if setup.microbatches < args.hosts and setup.schedule == "1F1B":
        raise UsageError(f"--microbatches {setup.microbatches}: 1F1B needs one a stage, {args.hosts}")
    if setup.held_out % setup.microbatches or setup.samples < setup.batch:
        raise UsageError(f"--held-out must be a multiple of --microbatches, --samples at least {setup.batch}")
    return setup


def _chosen(only: str) -> dict[str, Mode]:
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    for word in words:
        if not any(word in name.lower() for name in MODES):
            raise UsageError(f"--only {word}: no mode's name contains it; there are {', '.join(MODES)}")
    return {n: m for n, m in MODES.items() if not words or n == "fp32" or any(word in n.lower() for word in words)}
