"""Should the preset `max` try lazy error on the way back (`memory = "auto"`)? Held-out loss over fp32, both beginnings.

    python benchmarks/pipeline/lazy_preset.py --json PATH [--mesh 1x4] [--steps 100] [--seeds 0,1,2,3]
    thinwire bench train --part loss --wires off --seeds 1      # pre-trains the model that is fine-tuned:
    python benchmarks/pipeline/lazy_preset.py --json PATH --model out/bench-train/pretrain/model [--rate 0.004] …

Four ranks, bytes, micro-batches of two samples of 128 tokens. From scratch: a Llama-class model of 1.7 M parameters,
the source of Python's library. Fine-tuning: some 256 samples of the language's manual, five times each (no
--steps). A seed fixes start and order of the data, so that differences are paired. Rows that the file holds are not
measured again. Steps are timed too; for that the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import tempfile
from pathlib import Path
from typing import Any

from thinwire.bench.train_options import sent
from thinwire.config.presets import PRESETS
from thinwire.lab import Network
from thinwire.pipeline.lazy_error import AGAIN, STEPS
from thinwire.quantities import half_interval
from thinwire.terminal import table, write_json
from thinwire.train.checkpoint import Checkpoints, whole
from thinwire.train.config.sections import read_config
from thinwire.train.local import PRELOAD, train_local

PLAIN = {key: value for key, value in PRESETS["max"]["backward"].items() if key != "memory"}
WIRES: dict[str, dict[str, Any]] = {
    "off": {"preset": "off"},
    "without": {"preset": "max", "backward": PLAIN},
    "by trial": {"preset": "max", "backward": PLAIN | {"memory": "auto"}},
}
SAMPLES, EPOCHS = 256, 5
PARTS = (slice(2, 2 * STEPS), slice(2 * STEPS, 2 * STEPS * AGAIN))


def train(
    network: Network, out: Path, wire: str, seed: int, mesh: str, steps: int | None, model: Path | None, rate: float
) -> dict[str, Any]:  # fmt: skip
    """One run: its losses, bytes and times of steps; of every boundary the trial's last answer."""
    dp, pp = map(int, mesh.split("x"))
    fine = {"paths": [pydoc_data.topics.__file__], "samples": 2 * SAMPLES, "held_out": 0.5}
    config = read_config({
        "model": {"hidden": 128, "layers": 8, "heads": 4} if model is None else {"path": str(model)},
        "data": {"seq_len": 128, "seed": seed, "tokenizer": "bytes"} | (fine if model else {"corpus_bytes": 1_500_000}),
        "mesh": {"dp": dp, "pp": pp, "microbatches": 8 // dp},
        "optim": {"batch": 16, "lr": rate, "warmup": 10} | ({"epochs": EPOCHS} if steps is None else {"steps": steps}),
        "run": {"out": str(out), "seed": seed, "eval_every": 0, "checkpoint_every": 0},
        "wire": WIRES[wire],
    })  # fmt: skip
    events = train_local(config, network=network, label=f"{wire}, seed {seed}")
    taken = [event for event in events if event["kind"] == "step"]
    return {
        "wire": wire, "seed": seed, "mesh": mesh, "steps": len(taken), "sent": sent(taken[-1]),
        "held_out": [event["held_out"] for event in events if event["kind"] == "eval"][-1],
        "seconds": [event["step_seconds"] for event in taken], "skips": taken[-1]["skips"], "trials": trials(out),
    }  # fmt: skip


def trials(out: Path) -> dict[str, list[float]]:
    """By boundary: is lazy error on at the end, and the gradients' error energy with it over that without."""
    folder = out / "checkpoints"
    state = Checkpoints(folder).read(whole(folder)[-1], lambda name: name.endswith("/trial"))
    return {name: [lazy, with_it / alone] for name, (_, _, lazy, alone, with_it) in
            ((name, value.tolist()) for name, value in state.items())}  # fmt: skip


def measure(args: argparse.Namespace, network: Network, found: dict[str, Any], folder: Path) -> None:
    rate, steps, model = (args.rate, None, Path(args.model)) if args.model else (2e-3, args.steps, None)
    rows = found.setdefault(f"{args.mesh}, {f'fine-tuned at {rate}' if model else f'{steps} steps'}", [])
    for seed in map(int, args.seeds.split(",")):
        for wire in WIRES:
            if not any(row["wire"] == wire and row["seed"] == seed for row in rows):
                rows.append(train(network, folder / f"{wire}-{seed}", wire, seed, args.mesh, steps, model, rate))
                write_json(args.json, found)


def show(found: dict[str, Any]) -> None:
    """A line for every cell and wire: excess over off of each seed, and the median of the first trial's steps (the
    first two of them allocate) and of those between it and the next."""
    lines = []
    for cell, rows in found.items():
        exact = {row["seed"]: row["held_out"] for row in rows if row["wire"] == "off"}
        for wire in WIRES:
            mine = [row for row in rows if row["wire"] == wire and row["seed"] in exact]
            excess = [100 * (row["held_out"] / exact[row["seed"]] - 1) for row in mine]
            half = half_interval(excess)
            spread = "" if half is None else f" ± {half:.2f}"
            lines.append((
                cell, wire, f"{statistics.mean(excess):+.2f}{spread} %", ", ".join(f"{one:+.2f}" for one in excess),
                sorted({sum(row["sent"].values()) for row in mine}),
                *(f"{statistics.median(s for row in mine for s in row['seconds'][part]):.3f}" for part in PARTS),
                " ".join(f"{sum(on for on, _ in row['trials'].values()):.0f}/{len(row['trials'])}" for row in mine),
            ))  # fmt: skip
    table(
        "Held-out loss over off",
        ("cell", "wire", "mean ± 95 %", "each", "bytes", "trial s", "after s", "lazy at"),
        lines,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="fine-tune this one instead of beginning from scratch")
    parser.add_argument("--mesh", default="1x4", help="replicas x stages, four ranks (1x4)")
    parser.add_argument("--steps", type=int, default=100, help="from scratch (100)")
    parser.add_argument("--rate", type=float, default=4e-3, help="of fine-tuning, at its peak (0.004)")
    parser.add_argument("--seeds", default="0,1,2,3")
    parser.add_argument("--json", required=True, help="results, added to what the file holds")
    args = parser.parse_args()
    path = Path(args.json)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with Network(hosts=4, preload=PRELOAD) as network, tempfile.TemporaryDirectory() as folder:
        measure(args, network, found, Path(folder))
    show(found)


if __name__ == "__main__":
    main()
