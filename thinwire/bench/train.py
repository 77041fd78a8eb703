"""`thinwire bench train`: time to the same held-out loss, everything compressed, over slow links.

The loss of a run does not depend on how fast its wire is. So every wire is trained once a seed, unshaped, and a few of
its steps (cold and warm ones) are timed at each rate; a curve of loss against time is made of both. Rates are chosen
so that the wire takes a share s of the uncompressed step: s = 1 − (unshaped step)/(step at that rate).

A model is pre-trained first (on the tail of the corpus), then fine-tuned for some epochs on other text from there, at
the learning rate that is best for fp32 (of 5e-4, 1e-3, …, 8e-3, by held-out loss): at a lower one, what makes Adam's
steps a little smaller costs time. With --resume what is in the JSON file already is not done again, so that losses can
be had on a busy machine (--part loss) and times on an idle one (--part time).
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.bench.train_figure import curve_of, draw
from thinwire.bench.train_options import add_options, check_counts, check_folder, chosen, sent, windows
from thinwire.config.presets import PRESETS
from thinwire.errors import UsageError
from thinwire.installed import check_figures, check_training
from thinwire.lab import Network
from thinwire.quantities import half_interval, show_bytes, show_rate
from thinwire.terminal import read_json, table, write_json
from thinwire.train.config.sections import TrainConfig, read_config
from thinwire.train.local import PRELOAD, train_local

RANKS = 4
WIRES = ("off", "bf16", "safe", "paper-aqsgd", "paper-oktopk", "max")
PARTS = ("all", "loss", "time")
DECIDE = ("epochs", "samples", "pretrain", "lr")  # rows of other settings are another experiment's
TIMED_BATCHES = 3  # of a timing run: so many cold steps, then as many warm ones
DOCUMENT: dict[str, dict[str, Any]] = {
    "model": {"hidden": 128, "layers": 4, "heads": 4},
    "data": {"seq_len": 128, "held_out": 0.15, "tokenizer": "bytes"},
    "mesh": {"dp": 2, "pp": 2, "microbatches": 4},
    "optim": {"batch": 16, "warmup": 5, "schedule": "cosine"},
    "run": {"checkpoint_every": 0},
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench train`."""
    parser.description = __doc__
    parser.add_argument(
        "--wires", default=",".join(WIRES), help=f"presets, the first is the baseline ({','.join(WIRES)})"
    )
    parser.add_argument("--shares", default="0.95,0.99", help="of the uncompressed step spent on the wire (0.95,0.99)")
    add_options(parser, epochs=5, pretrain=300, out="out/bench-train")
    parser.add_argument("--lr", type=float, default=4e-3, help="of fine-tuning, at its peak (default 0.004)")
    parser.add_argument("--part", default="all", choices=PARTS, help="what to measure (default all)")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the --json file and do what is missing")
    parser.add_argument("--json", metavar="PATH", help="results, written as they come")
    parser.add_argument("--figure", metavar="PATH", help="held-out loss against time, one panel per share")


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench train` as `args` says; the exit status."""
    wires, shares = chosen("--wires", args.wires, PRESETS), _shares(args.shares)
    check_counts(args)
    check_training()
    if args.figure:
        check_figures("--figure")
    if args.resume and not args.json:
        raise UsageError("--resume goes on with the rows of a file: name it by --json")
    bench = Bench(Path(args.out), args)
    with Network(hosts=RANKS, preload=PRELOAD) as network:
        model = bench.pretrain(network)
        if args.part != "time":
            bench.losses(network, model, wires)
        if args.part != "loss":
            bench.times(network, model, wires, shares)
    if args.part != "loss":
        rows = bench.result["table"] = summary(bench.result, wires, shares)
        _show(rows)
        write_json(args.json, bench.result)
        if args.figure:
            draw(bench.result, wires, shares, args.figure)
    return 0


def _shares(given: str) -> list[float]:
    try:
        shares = [float(share) for share in given.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < 1 for share in shares):
        raise UsageError(f"--shares {given}: write numbers between 0 and 1, as 0.95,0.99")
    return shares


class Bench:
    """Gathers rows; `result` is what is written.

    `folder`: of the runs. `args`: the command's."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        check_folder(folder, "pretrain")
        settings = {name: value for name, value in vars(args).items() if name != "run"}
        self.result: dict[str, Any] = {"settings": settings, "loss": [], "time": []}
        if args.resume and Path(args.json).exists():
            self._go_on(read_json(args.json))
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _go_on(self, before: dict[str, Any]) -> None:
        for name in DECIDE:
            now, then = getattr(self.args, name), before["settings"].get(name)
            if now != then:
                raise UsageError(f"--{name} {now}: {self.args.json} was made with {then}; name another file")
        self.result |= {kind: before[kind] for kind in ("loss", "time")}

    def keep(self, kind: str, row: dict[str, Any]) -> None:
        """Add a `row` of that `kind` ("loss", "time"), and write all of them."""
        self.result[kind].append(row)
        write_json(self.args.json, self.result)

    def known(self, kind: str, **values: Any) -> dict[str, Any] | None:
        """The row of that `kind` with these `values`, if it was measured before."""
        return next((row for row in self.result[kind] if all(row.get(n) == v for n, v in values.items())), None)

    def losses(self, network: Network, model: Path, wires: list[str]) -> None:
        """Fine-tune `model` on `network` with every one of `wires` and every seed, unless that was done before."""
        for seed in range(self.args.seeds):
            for wire in wires:
                if self.known("loss", wire=wire, seed=seed) is None:
                    self.keep("loss", self.train(network, model, wire, seed))

    def times(self, network: Network, model: Path, wires: list[str], shares: list[float]) -> None:
        """Seconds of a step of `model` on `network`: of the first of `wires` unshaped, then of all at the rate of each
        of `shares`."""
        if self.known("time", share=None) is None:
            self.keep("time", {"share": None, **self.time(network, model, wires[0], None)})
        plain = self.known("time", share=None)
        assert plain is not None
        for share in shares:
            some = self.known("time", share=share)
            rate = some["rate"] if some else self.rate_for(network, model, wires[0], plain["warm"], share)
            for wire in wires:
                if self.known("time", share=share, wire=wire) is None:
                    self.keep("time", {"share": share, **self.time(network, model, wire, rate)})

    def pretrain(self, network: Network) -> Path:
        """A model that knows some Python, trained on `network`: bytes of the library, uncompressed. Its folder."""
        model = self.folder / "pretrain" / "model"
        if not (self.args.resume and model.exists()):
            config = self._config(
                "pretrain", "off", 0, {"corpus_bytes": 2_000_000},
                {"steps": self.args.pretrain, "warmup": 20, "lr": 3e-3},
            )  # fmt: skip
            train_local(config, network=network, label="pre-training")
        return model

    def train(self, network: Network, model: Path, wire: str, seed: int) -> dict[str, Any]:
        """Fine-tune `model` over `wire` on an unshaped `network`, its data in the order of `seed`: held-out loss by
        step, bytes by step."""
        optim = {"epochs": self.args.epochs, "lr": self.args.lr}
        data = {"samples": windows(self.args.samples, DOCUMENT["data"]["held_out"])}
        config = self._config(f"{wire}-{seed}", wire, seed, data, optim, model)
        events = train_local(config, network=network, label=f"{wire}, seed {seed}")
        evals = [(e["step"], e["held_out"]) for e in events if e["kind"] == "eval"]
        last = [e for e in events if e["kind"] == "step"][-1]
        steps = next(e for e in events if e["kind"] == "run")["steps"]
        return {"wire": wire, "seed": seed, "evals": evals, "sent": sent(last), "steps": steps,
                "steps_per_epoch": steps // self.args.epochs, "skips": last["skips"]}  # fmt: skip

    def time(self, network: Network, model: Path, wire: str, rate: float | None) -> dict[str, Any]:
        """Seconds of a cold and of a warm step of `model` over `wire` on `network`, whose links have that `rate` (None:
        unshaped)."""
        plain = wire in ("off", "bf16")
        steps = TIMED_BATCHES if plain else 2 * TIMED_BATCHES
        data = {"samples": TIMED_BATCHES * DOCUMENT["optim"]["batch"], "held_out": 0.0}
        config = self._config(f"time-{wire}", wire, 0, data, {"steps": steps, "warmup": 0, "lr": self.args.lr}, model)
        for host in range(RANKS):
            network.set_rate(host, "unlimited" if rate is None else rate)
        events = train_local(config, network=network, label=f"{wire} at {show_rate(rate)}")
        for host in range(RANKS):
            network.set_rate(host, "unlimited")
        taken = [e["step_seconds"] for e in events if e["kind"] == "step"]
        cold = statistics.median(taken[1:TIMED_BATCHES])  # the first allocates
        warm = cold if plain else statistics.median(taken[TIMED_BATCHES:])
        return {"wire": wire, "rate": rate, "cold": cold, "warm": warm}

    def rate_for(self, network: Network, model: Path, wire: str, unshaped: float, share: float) -> float:
        """The rate at which `wire` takes that `share` of a plain step of `model` on `network`, which lasts `unshaped`
        seconds without a limit: guessed from a timed one, twice."""
        rate = 50e6
        for _ in range(2):
            shaped = self.time(network, model, wire, rate)["warm"]
            wanted = unshaped / (1 - share)
            rate *= max(shaped - unshaped, 0.05 * shaped) / (wanted - unshaped)
        return rate

    def _config(
        self, name: str, wire: str, seed: int, data: dict[str, Any], optim: dict[str, Any], model: Path | None = None
    ) -> TrainConfig:
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        document = {section: dict(values) for section, values in DOCUMENT.items()}
        document["data"] |= data | {"seed": seed}
        document["optim"] |= optim
        document["run"] |= {"out": str(out), "seed": seed, "eval_every": 0 if model is None else 6}
        if model is not None:
            document["model"] = {"path": str(model)}
        return read_config({**document, "wire": {"preset": wire}})


def reached(curve: list[tuple[float, float]], loss: float) -> float:
    """When a curve of (time, loss) first reaches a loss, by a straight line between points; infinity: never."""
    for (t0, l0), (t1, l1) in pairwise(curve):
        if l1 <= loss:
            return t1 if l0 <= l1 else t0 + min(1.0, max(0.0, (l0 - loss) / (l0 - l1))) * (t1 - t0)
    return math.inf


def summary(result: dict[str, Any], wires: list[str], shares: list[float]) -> list[dict[str, Any]]:
    """One row per share and wire of `result`: speed-up to the loss that both it and the baseline reach, mean over the
    seeds. `wires`: their names, the baselines first. `shares`: of the wire in a step."""
    rows = []
    for share in shares:
        times = {t["wire"]: t for t in result["time"] if t["share"] == share}
        for wire in wires:
            ratios: dict[str, list[float]] = {base: [] for base in wires[:2]}
            excess = []
            mine = [row for row in result["loss"] if row["wire"] == wire]
            for one in mine:
                for base in ratios:
                    other = next(r for r in result["loss"] if r["wire"] == base and r["seed"] == one["seed"])
                    goal = max(min(v for _, v in one["evals"]), min(v for _, v in other["evals"]))
                    pair = [reached(curve_of(r, times[r["wire"]]), goal) for r in (other, one)]
                    ratios[base].append(pair[0] / pair[1])
                    if base == wires[0]:
                        excess.append(one["evals"][-1][1] / other["evals"][-1][1] - 1)
            time, nbytes = times[wire], sum(mine[0]["sent"].values())
            rows.append({
                "share": share, "wire": wire, "rate": time["rate"], "cold": time["cold"], "warm": time["warm"],
                **{f"over {base}": statistics.mean(values) for base, values in ratios.items()},
                "held_out": statistics.mean(one["evals"][-1][1] for one in mine), "excess": excess, "sent": nbytes,
            })  # fmt: skip
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    bases = [key for key in rows[0] if key.startswith("over ")]
    columns = ("wire share", "rate", "wire", "cold step s", "warm step s", *(f"× {b}" for b in bases), "held-out",
               "excess % ± 95 %", "sent")  # fmt: skip
    shown = []
    for row in rows:
        excess = 100 * statistics.mean(row["excess"])
        half = half_interval(row["excess"])
        spread = "" if half is None else f" ± {100 * half:.2f}"
        shown.append((
            f"{100 * row['share']:.3g} %", show_rate(row["rate"]), row["wire"], row["cold"], row["warm"],
            *(f"{row[b]:.2f}" for b in bases), f"{row['held_out']:.4f}", f"{excess:+.2f}{spread}",
            show_bytes(row["sent"]),
        ))  # fmt: skip
    table("Time to the same held-out loss, cold first epoch included", columns, shown)
