"""`thinwire bench pipeline`: what compression of activations and gradients gains, and what it costs in quality.

Loss does not depend on the network's rate: every mode is trained once (per seed) on an unlimited network, and a few
cold and warm steps of it are timed at every rate (ablations: at the slowest but one). The rates follow from the shares
s of the fp32 step that should be exposed wire: T(rate) = T₀ + bits/rate is measured twice, and
rate(s) = bits·(1 − s)/(T₀·s). What is in the JSON file already is not done again with --resume.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thinwire.bench.pipeline_modes import MODES, OURS, Mode, predicted_bytes
from thinwire.bench.pipeline_options import Setup, read_setup, read_shares
from thinwire.bench.pipeline_ranks import pretrain, time_steps, train
from thinwire.bench.pipeline_table import show, summed
from thinwire.errors import UsageError
from thinwire.lab.network import Network
from thinwire.quantities import SLOWEST, parse_rate
from thinwire.terminal import progress, read_json, write_json

PRELOAD = ("torch", "torch.distributed.pipelining", "thinwire.bench.pipeline_ranks")
LIMIT = 600.0  # seconds for one launch beyond what is predicted
PROBE = 20e6  # bit/s of the launch that finds how many bits the fp32 step waits for
ABLATIONS = "ablations"


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench pipeline` as `args` says; the exit status."""
    setup, modes = read_setup(args), _chosen(args.only)
    bench = Bench(setup, modes, args.steps, args.json, args.resume)
    with Network(hosts=args.hosts, preload=PRELOAD) as net, tempfile.TemporaryDirectory() as folder:
        launches = args.seeds * (1 + len(modes))
        with progress("pipeline", launches + 1) as advance:
            bench.train(net, args.seeds, folder, advance)
            if args.steps:
                bench.time(net, [None, *bench.rates(net, args.rates, args.shares)])
            advance("timed", 1)
    show(bench.result, list(modes))
    if args.figure:
        from thinwire.bench.pipeline_figure import draw

        draw(bench.result, args.figure)
    return 0


class Bench:
    """Gathers rows; `result` is what is written.

    `setup`: model, data and training. `modes`: by name, what is measured. `steps`: timed ones of each kind. `path`: the
    JSON file, None for none. `resume`: go on with the rows of that file."""

    def __init__(self, setup: Setup, modes: dict[str, Mode], steps: int, path: str | None, resume: bool) -> None:
        self.setup, self.modes, self.steps, self.path = setup, modes, steps, path
        self.result: dict[str, Any] = {"setup": asdict(setup), "steps": steps, "loss": [], "time": []}
        if resume:
            assert path is not None
            before = read_json(path)
            if before.get("setup") != self.result["setup"]:
                raise UsageError(f"{path}: was made with other settings: {before.get('setup')}")
            unknown = {row["mode"] for kind in ("loss", "time") for row in before[kind]} - MODES.keys()
            if unknown:
                raise UsageError(f"{path}: has rows of {', '.join(sorted(unknown))}; modes are {', '.join(MODES)}")
            self.result = before

    def has(self, kind: str, **what: Any) -> bool:
        """Is there a row of that `kind` ("loss", "time") with the values in `what`?"""
        return any(all(row[name] == value for name, value in what.items()) for row in self.result[kind])

    def keep(self, kind: str, row: dict[str, Any]) -> None:
        """Add a `row` of that `kind`, and write all of them."""
        self.result[kind].append(row)
        write_json(self.path, self.result)

    # --- quality

    def train(self, net: Network, seeds: int, folder: str, advance: Callable[[str, int], None]) -> None:
        """Paired: every mode starts from the same weights and sees the same batches.

        `net`: unlimited. `seeds`: how many. `folder`: for the weights. `advance`: of the progress bar."""
        for seed in range(seeds):
            setup = replace(self.setup, seed=seed)
            weights = str(Path(folder) / f"{seed}.pt")
            missing = [name for name, mode in self.modes.items() if not mode.schedule]  # which does not change the loss
            missing = [name for name in missing if not self.has("loss", mode=name, seed=seed)]
            if not missing:
                advance(f"seed {seed}: done before", 1 + len(self.modes))
                continue
            start = pretrain(setup, weights)
            advance(f"seed {seed} pre-trained", 1)
            advance("done before", len(self.modes) - len(missing))
            for name in missing:
                mode = self.modes[name]
                ranks = net.run(train, mode, setup, weights, timeout=LIMIT + 60 * setup.epochs, echo=False)
                totals = [summed(rank["epochs"][e] for rank in ranks) for e in range(setup.epochs)]
                row = {"mode": name, "seed": seed, "pretrained": start, "losses": ranks[0]["losses"], "epochs": totals}
                self.keep("loss", row)
                advance(f"{name}, seed {seed}", 1)

    # --- time

    def rates(self, net: Network, rates: str, shares: str) -> list[float]:
        """In bit/s, as `rates` says, or so that the fp32 step on `net` spends the `shares` on the exposed wire."""
        if rates:
            return [rate for rate in (parse_rate(word, "rate") for word in rates.split(",")) if rate is not None]
        if "exposed_bits" not in self.result:
            free = self.launch(net, MODES["fp32"], None)["warm"]
            slow = self.launch(net, MODES["fp32"], PROBE)["warm"]
            self.result |= {"fp32_unlimited": free, "exposed_bits": max(slow - free, 1e-3) * PROBE}
            write_json(self.path, self.result)
        free, bits = self.result["fp32_unlimited"], self.result["exposed_bits"]
        return [max(SLOWEST, bits * (1 - s) / (free * s)) for s in read_shares(shares)]

    def time(self, net: Network, rates: list[float | None]) -> None:
        """Time every mode on `net` at each of `rates` (None: unlimited); ablations at few of them."""
        limited = sorted(rate for rate in rates if rate is not None)
        for rate in rates:
            for name, mode in self.modes.items():
                if mode.ablation and rate not in (None, *limited[:2][-1:]):
                    continue
                if not self.has("time", mode=name, rate=rate):
                    self.keep("time", {"mode": name, "rate": rate, **self.launch(net, mode, rate)})

    def launch(self, net: Network, mode: Mode, rate: float | None) -> dict[str, Any]:
        """Slowest rank's seconds of a cold and of a warm step (median) of `mode` on `net` at `rate`; where that is
        None, an unlimited network, also bytes: predicted, framed, counted. They do not depend on the rate."""
        for host in range(len(net.hosts)):
            net.set_rate(host, "unlimited" if rate is None else rate)
        expected = 8 * self.predicted(mode, False) * self.setup.stages / (rate or 1e9)
        limit = LIMIT + 6 * (self.steps + 1) * expected
        ranks = net.run(time_steps, mode, self.setup, self.steps, timeout=limit, echo=False)
        slowest = {
            kind: [max(rank["seconds"][kind][s] for rank in ranks) for s in range(len(ranks[0]["seconds"][kind]))]
            for kind in ("cold", "warm")
        }
        warm = statistics.median(slowest["warm"])
        row = {"cold": statistics.median(slowest["cold"] or [warm]), "warm": warm, "all": slowest}
        if rate is not None:
            return row
        before = net.run(time_steps, mode, self.setup, 0, timeout=limit, echo=False)
        counts = [summed(rank["counts"] for rank in run) for run in (before, ranks)]
        framed = sum(counts[1][way] - counts[0][way] for way in ("forward", "backward"))
        kinds = [kind == "warm" for kind in ("cold", "warm") if slowest[kind]]
        return row | {
            "predicted": sum(self.predicted(mode, warm) * self.steps for warm in kinds), "framed": framed or None,
            "counted": ranks.total_sent - before.total_sent,
        }  # fmt: skip

    def predicted(self, mode: Mode, warm: bool) -> int:
        """Bytes of one step in `mode` over all boundaries, where every message is compressed; `warm`: of samples that
        both ends remember."""
        s = self.setup
        one = sum(predicted_bytes(mode, s.rows, s.length, s.width, warm))
        return one * s.microbatches * (s.stages - 1)


def _chosen(only: str) -> dict[str, Mode]:
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    for word in words:
        if word != ABLATIONS and not any(word in name.lower() for name in MODES):
            raise UsageError(f"--only {word}: no mode's name contains it; there are {', '.join(MODES)}")

    def chosen(name: str, mode: Mode) -> bool:
        ours = ABLATIONS in words and (mode.ablation or name == OURS)
        return not words or name == "fp32" or ours or any(word in name.lower() for word in words)

    return {name: mode for name, mode in MODES.items() if chosen(name, mode)}
