"""Does `[wire] auto` choose well? A step with each preset and with auto, side by side, on links of several rates.

    python benchmarks/data_parallel/auto_train.py [--rates 5mbit,50mbit,unlimited] [--steps 8] [--json PATH]

dp 2 × pp 2 on four hosts of the lab, Llama-class, 0.9 M parameters, 4 micro-batches of 4 × 128 tokens a replica. Every
run sees the same 32 samples again and again, so that steps are warm from the second on; medians without the first two.
Of auto, what it decided and what it expected is shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from thinwire.config.presets import PRESETS
from thinwire.lab import Network
from thinwire.terminal import table, write_json
from thinwire.train.config.sections import read_config
from thinwire.train.local import PRELOAD, train_local
from thinwire.train.tune.auto import Decision, describe

BATCH = 32
OURS = PRESETS["max"]
WIRES: dict[str, dict[str, Any]] = {
    "off": {},
    "bf16": {"preset": "bf16"},
    "safe": {"preset": "safe"},
    "max": {"preset": "max"},
    "max, critical": OURS | {way: OURS[way] | {"when": "critical"} for way in ("forward", "backward")},
    "auto": {"preset": "auto"},
}
SKIPPED = 2


def timed(network: Network, folder: Path, wire: dict[str, Any], steps: int, label: str) -> dict[str, Any]:
    """Seconds of the warm steps of one run, and the decision where one was made."""
    config = read_config({
        "model": {"hidden": 128, "layers": 4, "heads": 4},
        "data": {"seq_len": 128, "corpus_bytes": 100_000, "held_out": 0.0, "samples": BATCH, "tokenizer": "bytes"},
        "mesh": {"dp": 2, "pp": 2, "microbatches": 4},
        "optim": {"batch": BATCH, "steps": steps},
        "run": {"out": str(folder), "eval_every": 0, "checkpoint_every": 0},
        "wire": wire,
    })  # fmt: skip
    events = train_local(config, network=network, label=label)
    taken = [e["step_seconds"] for e in events if e["kind"] == "step"][SKIPPED:]
    decided = next((e for e in events if e["kind"] == "decision"), None)
    return {"seconds": statistics.median(taken), "taken": taken, "decision": decided}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="5mbit,50mbit,unlimited")
    parser.add_argument("--wires", default="|".join(WIRES), help="some of them, separated by |")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="results, added to what the file holds")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}
    for rate in args.rates.split(","):
        given = None if rate == "unlimited" else rate
        with Network(hosts=4, rate=given, preload=PRELOAD) as network, tempfile.TemporaryDirectory() as folder:
            for name in args.wires.split("|"):
                run = timed(network, Path(folder) / name, WIRES[name], args.steps, f"{name}, {rate}")
                found.setdefault(rate, {})[name] = run
                write_json(args.json, found)
    rows = [
        [rate, *(runs[name]["seconds"] if name in runs else None for name in WIRES)] for rate, runs in found.items()
    ]
    table("Seconds a warm step", ("rate", *WIRES), rows)
    for rate, runs in found.items():
        event = runs.get("auto", {}).get("decision")
        if event:
            print(f"{rate}: {describe(Decision(**{k: v for k, v in event.items() if k not in ('kind', 'step')}))}")


if __name__ == "__main__":
    main()
