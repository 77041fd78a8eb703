"""What compression costs on a real model: fine-tuning with each wire, over paired seeds, with 95 % intervals.

    python benchmarks/quality/real_model.py --model DIR --text FILE [--wires off,max] [--seeds 0,1,2] [--rates 1e-4]
        [--epochs 2] [--mesh 1x4] [--device cuda] [--parallel 3] [--out out/real] [--quick]

dp 1 × pp 4 (or --mesh) on hosts of the lab without a limit, batch 16, samples of 256 tokens, a tenth held out. A seed
is that of the order of samples, the same for all wires. Runs that are done already are not done again: call it again
to go on.
--quick trains a tiny random model on Python's library instead, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from thinwire.quantities import half_interval
from thinwire.terminal import table, write_json
from thinwire.train.metrics import METRICS, read_events

WIRES: dict[str, dict[str, Any]] = {
    "off": {},
    "bf16": {"preset": "bf16"},
    "safe": {"preset": "safe"},
    "paper-aqsgd": {"preset": "paper-aqsgd"},
    "paper-aqsgd, frozen": {"preset": "paper-aqsgd"},
    "max": {"preset": "max"},
    "direct 4/4": {way: {"codec": "quantize", "bits": 4} for way in ("forward", "backward")},
    "direct 3/3": {way: {"codec": "quantize", "bits": 3} for way in ("forward", "backward")},
    "rotated 4/4": {
        way: {"codec": "rotated", "inner": {"codec": "quantize", "bits": 4}} for way in ("forward", "backward")
    },
}


OPTIMISERS = {"paper-aqsgd, frozen": "frozen_adam"}  # as published between replicas: Adam's momentum, variance frozen


def document(args: argparse.Namespace, wire: str, seed: int, rate: float, out: Path) -> dict[str, Any]:
    """The run's configuration."""
    data: dict[str, Any] = {"seq_len": 256, "held_out": 0.1, "seed": seed, "paths": [args.text]}
    model: dict[str, Any] = {"path": args.model}
    if args.quick:
        data = {"seq_len": 32, "held_out": 0.1, "seed": seed, "corpus_bytes": 20_000, "samples": 96}
        model = {"hidden": 32, "layers": 4, "heads": 4}
    return {
        "model": model, "data": data, "wire": WIRES[wire],
        "mesh": {"dp": args.mesh[0], "pp": args.mesh[1], "microbatches": 4 // args.mesh[0]},
        "optim": {
            "name": OPTIMISERS.get(wire, "adamw"), "batch": 16, "epochs": args.epochs, "lr": rate, "warmup": 10,
        },
        "run": {
            "out": str(out), "seed": seed, "device": args.device, "eval_every": args.every, "checkpoint_every": 0,
            "autocast": args.autocast,
        },
    }  # fmt: skip


def toml(tables: dict[str, Any], prefix: str = "") -> str:
    """Tables of texts, numbers, lists and tables as TOML."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def held_out(args: argparse.Namespace, wire: str, seed: int, rate: float) -> list[float]:
    """Held-out losses of a run, the first before any step; it is made unless it was."""
    folder = Path(args.out) / f"{wire.replace(', ', '-').replace(' ', '-').replace('/', '-')}-{rate:g}-{seed}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "given.toml").write_text(toml(document(args, wire, seed, rate, folder / "run")))
        ranks = str(args.mesh[0] * args.mesh[1])
        words = [sys.executable, "-m", "thinwire", "train", str(folder / "given.toml"), "--local", ranks]
        subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
        with (folder / "log").open("w") as log:
            subprocess.run(words, stdout=log, stderr=log, check=True)
        (folder / "done").touch()
    events = read_events(folder / "run" / METRICS)
    losses = [event["held_out"] for event in events if event["kind"] == "eval"]
    print(f"{wire}, rate {rate:g}, seed {seed}: {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    return losses


def interval(values: list[float]) -> str:
    """Mean ± half of the 95 % interval."""
    half = half_interval(values)
    return f"{statistics.fmean(values):+.3f}" + ("" if half is None else f" ± {half:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--text", default="")
    parser.add_argument("--wires", default="off,paper-aqsgd,max,direct 4/4")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default="1e-4", help="learning rates; the first is for all wires, others for off")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=0, help="steps between evaluations; 0: at start and end only")
    parser.add_argument("--mesh", type=lambda text: tuple(map(int, text.split("x"))), default=(1, 4), help="dp x pp")
    parser.add_argument("--autocast", default="off", help="off or bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", default="out/real")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    wires, seeds = args.wires.split(";" if ";" in args.wires else ","), [int(seed) for seed in args.seeds.split(",")]
    first, *others = [float(rate) for rate in args.rates.split(",")]
    runs = [(wire, seed, first) for seed in seeds for wire in wires] + [("off", s, r) for r in others for s in seeds]
    with ThreadPoolExecutor(args.parallel) as pool:
        losses = dict(zip(runs, pool.map(lambda run: held_out(args, *run), runs)))
    write_json(args.json, [{"wire": w, "seed": s, "rate": r, "held_out": found} for (w, s, r), found in losses.items()])
    rows = []
    for wire, rate in [(wire, first) for wire in wires] + [("off", rate) for rate in others]:
        last = [losses[wire, seed, rate][-1] for seed in seeds]
        plain = [losses["off", seed, first][-1] for seed in seeds if ("off", seed, first) in losses]
        worse = [100 * (one / exact - 1) for one, exact in zip(last, plain)]
        rows.append([wire, f"{rate:g}", f"{statistics.fmean(last):.4f}", interval(worse) if worse else ""])
    table("Held-out loss at the end", ("wire", "rate", "mean", f"% over off, {len(seeds)} paired seeds"), rows)


if __name__ == "__main__":
    main()
