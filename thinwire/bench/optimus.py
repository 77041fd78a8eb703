"""`thinwire bench optimus`: Optimus-CC's ladder, rung by rung, and ours beside it; and which stages to compress.

baseline → compressed backprop → + lazy error → + epilogue only → + fused embedding → + selective stages; then our
critical set with AQ-SGD forward, and the preset max. Four parts, kept in the JSON file as they come: losses and memory
can be had on a busy machine, times on an idle one:

loss    a model pre-trained a while is fine-tuned on dp 2 × pp 4, unshaped, a run per rung and seed
time    a few warm steps per rung on dp 2 × pp 4 at --rate
stages  the same mesh, gradients of the first 0, 1, … 4 stages compressed: measured, simulated, and what slack picks
memory  the same mesh and a model of 25 M parameters, unshaped: the most that a rank takes, by rung
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from thinwire.bench.optimus_figure import draw
from thinwire.bench.train_options import add_options, check_counts, check_folder, chosen, sent, windows
from thinwire.config.presets import PRESETS
from thinwire.installed import check_figures, check_training
from thinwire.lab import Network
from thinwire.quantities import half_interval, parse_rate, show_bytes
from thinwire.terminal import table, write_json
from thinwire.train.config.sections import TrainConfig, read_config
from thinwire.train.local import PRELOAD, train_local
from thinwire.train.metrics import read_events

PARTS = ("all", "loss", "time", "stages", "memory")
DEEP = {"dp": 2, "pp": 4, "microbatches": 4}
MARK = ".bench-optimus"  # in a folder of ours
TIMED = 4  # steps, the first of which does not count
DOCUMENT: dict[str, dict[str, Any]] = {
    "model": {"hidden": 128, "layers": 4, "heads": 4},
    "data": {"seq_len": 128, "held_out": 0.15, "tokenizer": "bytes"},
    "optim": {"batch": 16, "warmup": 5, "lr": 1e-3},
    "run": {"checkpoint_every": 0, "eval_every": 0},
}
LARGE = {"hidden": 512, "layers": 8, "heads": 8}  # a model whose gradients and residuals show in a rank's memory
FUSED, SEPARATE = {"sync": "fused"}, {"sync": "separate"}
LOW = {"codec": "low_rank", "rank": 16}
OPTIMUS, OURS = PRESETS["paper-optimus"], PRESETS["max"]
GRADIENT = OPTIMUS["gradient"] | {"rank": 16}  # of rank 128 the matrices of so small a model would stay exact
LADDER: dict[str, dict[str, Any]] = {
    "baseline": {"embedding": SEPARATE},
    "compressed backprop": {"backward": LOW, "embedding": SEPARATE},
    "+ lazy error": {"backward": LOW | {"memory": "error_feedback"}, "embedding": SEPARATE},
    "+ epilogue only": {"backward": OPTIMUS["backward"], "embedding": SEPARATE},
    "+ fused embedding": {"backward": OPTIMUS["backward"], "embedding": FUSED},
    "+ selective stages": OPTIMUS | {"gradient": GRADIENT},
    "ours: critical": OURS | {way: OURS[way] | {"when": "critical"} for way in ("forward", "backward")},
    "max": OURS,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire bench optimus`."""
    parser.description = __doc__
    parser.add_argument("--part", default="all", choices=PARTS, help="what to measure (default all)")
    parser.add_argument("--rungs", default=",".join(LADDER), help="some of the ladder, the first is the baseline")
    parser.add_argument("--rate", default="20mbit", help="of every host's link, for the timed parts (default 20mbit)")
    add_options(parser, epochs=3, pretrain=200, out="out/bench-optimus")
    parser.add_argument("--json", metavar="PATH", help="results, written as they come; what is there is kept")
    parser.add_argument("--figure", metavar="PATH", help="step time against the number of compressed stages")


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench optimus` as `args` says; the exit status."""
    rungs = chosen("--rungs", args.rungs, LADDER)
    check_counts(args)
    parse_rate(args.rate, "--rate")
    check_training()
    if args.figure:
        check_figures("--figure")
    bench = Bench(Path(args.out), args, rungs)
    if args.part in ("all", "loss"):
        bench.losses()
    if args.part in ("all", "time"):
        bench.times()
    if args.part in ("all", "stages"):
        bench.stages()
    if args.part in ("all", "memory"):
        bench.memory()
    bench.show()
    if args.figure and "stages" in bench.result:
        draw(bench.result["stages"], args.figure)
    return 0


class Bench:
    """Gathers rows; `result` is what is written.

    `folder`: of the runs. `args`: the command's. `rungs`: names out of LADDER, the first being the baseline."""

    def __init__(self, folder: Path, args: argparse.Namespace, rungs: list[str]) -> None:
        self.folder, self.args, self.rungs = folder, args, rungs
        check_folder(folder, MARK)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        self.result: dict[str, Any] = {"settings": {k: v for k, v in vars(args).items() if k != "run"}, "loss": []}
        if args.json and Path(args.json).exists():
            self.result |= {k: v for k, v in json.loads(Path(args.json).read_text()).items() if k != "settings"}

    # --- the three parts

    def losses(self) -> None:
        """Fine-tune every rung with every seed on an unlimited network, unless that was done before."""
        with Network(hosts=8, preload=PRELOAD) as network:
            model = self._pretrained(network)
            for seed in range(self.args.seeds):
                for rung in self.rungs:
                    if not any((row["rung"], row["seed"]) == (rung, seed) for row in self.result["loss"]):
                        self._keep("loss", [*self.result["loss"], self._fine_tuned(network, model, rung, seed)])

    def times(self) -> None:
        """Time a step of every rung on links of `--rate`."""
        with Network(hosts=8, rate=self.args.rate, preload=PRELOAD) as network:
            for rung in self.rungs:
                rows = [row for row in self.result.get("time", []) if row["rung"] != rung]
                row = {"rung": rung, **self._timed(network, LADDER[rung], rung, tied=True)}
                self._keep("time", [*rows, row])

    def stages(self) -> None:
        """Low-rank gradients on the first k stages; the rule's own run says what it measured."""
        from thinwire.planner.critical import mixed
        from thinwire.planner.simulate import simulate
        from thinwire.planner.step import Send, Traffic
        from thinwire.train.tune.measured import Measured

        rows = []
        with Network(hosts=8, rate=self.args.rate, preload=PRELOAD) as network:
            slack = self._timed(network, {"gradient": GRADIENT | {"stages": "slack"}}, "slack", tied=False)
            events = read_events(self.folder / "slack" / "metrics.jsonl")
            found = next(event for event in events if event["kind"] == "decision")
            measured, schedule = Measured(**found["measured"]), self._config("plan", {}, 0, DEEP).mesh.plan()
            exact = {"forward": 0, "backward": 0, "embedding": 0}
            plain, packed = (measured.step(schedule, exact | {"gradient": level}) for level in (0, 1))
            for count in range(DEEP["pp"] + 1):
                chosen = list(range(count))
                wire = {"gradient": GRADIENT | {"stages": chosen}}
                picked = frozenset(Send(Traffic.GRADIENT, stage, 0) for stage in chosen)
                row = {"stages": chosen, "simulated": simulate(mixed(plain, packed, picked.__contains__)).makespan}
                rows.append(row | self._timed(network, wire, f"first-{count}", tied=False))
        self._keep("stages", {"rows": rows, "slack": slack, "picked": found["stages"], "times": found["measured"]})

    def memory(self) -> None:
        """The peak of every rank, of a model large enough for it to show."""
        with Network(hosts=8, preload=PRELOAD) as network:
            for rung in self.rungs:
                rows = [row for row in self.result.get("memory", []) if row["rung"] != rung]
                wire = LADDER[rung]
                if rung == "+ selective stages":  # this model's matrices are large enough for the paper's own rank
                    wire = OPTIMUS
                config = self._timed_config(f"memory-{rung}".replace(" ", "-"), wire, tied=True, **LARGE)
                end = train_local(config, network=network, label=rung)[-1]
                self._keep("memory", [*rows, {"rung": rung, "ranks": end["memory"]}])

    # --- single runs

    def _pretrained(self, network: Network) -> Path:
        model = self.folder / "pretrain" / "model"
        if not model.exists():
            config = self._config("pretrain", {"embedding": FUSED}, 0, DEEP, data={"corpus_bytes": 1_000_000},
                                  optim={"steps": self.args.pretrain, "lr": 3e-3, "warmup": 20})  # fmt: skip
            train_local(config, network=network, label="pre-training")
        return model

    def _fine_tuned(self, network: Network, model: Path, rung: str, seed: int) -> dict[str, Any]:
        """As the rung says, with its stages, its rank and its way to synchronise the embedding."""
        name = f"loss-{list(LADDER).index(rung)}-{seed}"
        shutil.rmtree(self.folder / name, ignore_errors=True)
        config = self._config(
            name, LADDER[rung], seed, DEEP, model={"path": str(model)},
            data={"samples": windows(self.args.samples, DOCUMENT["data"]["held_out"])},
            optim={"epochs": self.args.epochs},
        )  # fmt: skip
        events = train_local(config, network=network, label=f"{rung}, seed {seed}")
        last = [e for e in events if e["kind"] == "step"][-1]
        return {
            "rung": rung, "seed": seed, "steps": last["step"], "skips": last["skips"], "sent": sent(last),
            "held_out": [e["held_out"] for e in events if e["kind"] == "eval"],
        }  # fmt: skip

    def _timed(self, network: Network, wire: dict[str, Any], name: str, tied: bool) -> dict[str, Any]:
        """Seconds and bytes of a step on samples that have been seen."""
        config = self._timed_config(name.replace(" ", "-"), wire, tied)
        events = [e for e in train_local(config, network=network, label=name) if e["kind"] == "step"]
        taken = [e["step_seconds"] for e in events][1:]
        before, after = sent(events[-2]), sent(events[-1])
        own = {kind: value - before[kind] for kind, value in after.items()}
        return {"seconds": statistics.median(taken), "taken": taken, "sent": own}

    def _timed_config(self, name: str, wire: dict[str, Any], tied: bool, **model: int) -> TrainConfig:
        """Of a run of a few steps on the same samples."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        batch = 2 * DOCUMENT["optim"]["batch"]
        data = {"samples": batch, "held_out": 0.0, "corpus_bytes": 100_000}
        optim = {"steps": 1 + TIMED, "batch": batch}
        return self._config(name, wire, 0, DEEP, model={"tied": tied, **model}, data=data, optim=optim)

    def _config(
        self, name: str, wire: dict[str, Any], seed: int, mesh: dict[str, Any], **changed: dict[str, Any]
    ) -> TrainConfig:
        out = self.folder / name
        document = {section: values | changed.get(section, {}) for section, values in DOCUMENT.items()}
        if "path" in document["model"]:
            document["model"] = changed["model"]
        document["data"] |= {"seed": seed}
        document["run"] |= {"out": str(out), "seed": seed}
        return read_config({**document, "mesh": mesh, "wire": wire})

    def _keep(self, part: str, value: Any) -> None:
        self.result[part] = value
        write_json(self.args.json, self.result)

    # --- tables

    def show(self) -> None:
        """Print the tables of what has been measured."""
        times = {row["rung"]: row for row in self.result.get("time", [])}
        rows = []
        for rung in self.rungs:
            excess, time = self._excess(rung), times.get(rung)
            half = half_interval(excess)
            spread = "" if half is None else f" ± {half:.2f}"
            rows.append((
                rung, f"{time['seconds']:.3f}" if time else "–",
                show_bytes(sum(time["sent"].values())) if time else "–",
                f"{statistics.mean(excess):+.2f}{spread}" if excess else "–",
            ))  # fmt: skip
        table(
            f"Optimus-CC's ladder at {self.args.rate}",
            ("rung", "step s", "sent per step", "held-out excess % ± 95 %"),
            rows,
        )
        if "memory" in self.result:
            peaks = {row["rung"]: row["ranks"] for row in self.result["memory"]}
            table("The most that ranks take", ("rung", "one rank", "all ranks"), [
                (rung, show_bytes(max(ranks)), show_bytes(sum(ranks))) for rung, ranks in peaks.items()
            ])  # fmt: skip
        if "stages" in self.result:
            part = self.result["stages"]
            shown = [(str(r["stages"]), f"{r['seconds']:.3f}", f"{r['simulated']:.3f}") for r in part["rows"]]
            shown.append((f"slack: {part['picked']}", f"{part['slack']['seconds']:.3f}", ""))
            table("Stages whose gradients are compressed", ("stages", "measured s", "simulated s"), shown)

    def _excess(self, rung: str) -> list[float]:
        """Held-out loss over the baseline's of the same seed, in per cent."""
        last = {(row["rung"], row["seed"]): row["held_out"][-1] for row in self.result["loss"]}
        pairs = [(last.get((rung, s)), last.get((self.rungs[0], s))) for s in range(self.args.seeds)]
        return [100 * (one / base - 1) for one, base in pairs if one is not None and base is not None]
