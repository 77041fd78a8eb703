"""Does the planner predict a step? Its simulation from what ranks measure, beside the steps that follow.

    python benchmarks/data_parallel/predicted.py [--rates 20mbit,100mbit] [--latencies 0ms,20ms,50ms] [--losses 0]
        [--wires off,bf16,max,rows] [--streams 1] [--steps 12] [--json PATH]

dp 2 × pp 2 on four hosts of the lab, Llama-class, 4 micro-batches per replica. Every run sees the same samples again
and again, so that steps are warm from the second on; the median of all but the first three counts.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from thinwire.lab import Network
from thinwire.terminal import table, write_json

PRELOAD = ("torch", "torch.distributed.checkpoint", "transformers", "thinwire.train.loop")
WIRES: dict[str, dict[str, Any]] = {
    "off": {},
    "bf16": {"preset": "bf16"},
    "safe": {"preset": "safe"},
    "max": {"preset": "max"},
    "rows": {"preset": "max", "embedding": {"collective": "quantized", "bits": 4, "sync": "rows"}},
}
SKIPPED = 3


def cells(runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """On every rank: per configuration the predicted and the measured seconds per step."""
    import torch.distributed as dist

    from thinwire.planner.simulate import simulate
    from thinwire.train.build import used_rows
    from thinwire.train.config.sections import read_config
    from thinwire.train.loop import Trainer
    from thinwire.train.metrics import METRICS, read_events
    from thinwire.train.tune.auto import KINDS, forms
    from thinwire.train.tune.timing import measure

    dist.init_process_group("gloo")
    out = []
    for folder, document in runs:
        config = read_config({**document, "run": {"out": folder, "eval_every": 0, "checkpoint_every": 0}})
        trainer = Trainer(config, say=lambda line: None)
        parts, wire = trainer.parts, trainer.checked.wire
        rows = used_rows(config, parts.blueprint, parts.samples)
        kinds = forms(config, wire)
        found = measure(config, kinds, parts.mesh, parts.stages, parts.named, rows, int(wire.streams))
        fused = wire.embedding is not None and wire.embedding.sync in ("fused", "rows")
        simulated = simulate(found.step(config.mesh.plan(), {kind: len(kinds[kind]) - 1 for kind in KINDS}, fused))
        trainer.fit()
        dist.barrier()
        taken = [e["step_seconds"] for e in read_events(Path(folder) / METRICS) if e["kind"] == "step"][SKIPPED:]
        out.append({"predicted": simulated.makespan, "measured": statistics.median(taken), "spent": simulated.spent})
    return out


def document(wire: dict[str, Any], streams: int, steps: int) -> dict[str, Any]:
    return {
        "model": {"hidden": 128, "layers": 4, "heads": 4},
        "data": {"seq_len": 256, "corpus_bytes": 200_000, "held_out": 0.0, "samples": 32, "tokenizer": "bytes"},
        "mesh": {"dp": 2, "pp": 2, "microbatches": 4},
        "optim": {"batch": 32, "steps": steps},
        "wire": {**wire, **({"streams": streams} if streams > 1 else {})},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="20mbit,100mbit")
    parser.add_argument("--latencies", default="0ms,20ms,50ms")
    parser.add_argument("--losses", default="0")
    parser.add_argument("--wires", default="off,bf16,max,rows")
    parser.add_argument("--streams", default="1")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", help="where the rows are written")
    args = parser.parse_args()
    names = args.wires.split(",")
    grid = itertools.product(*(getattr(args, key).split(",") for key in ("rates", "latencies", "losses", "streams")))
    rows: list[dict[str, Any]] = []
    for rate, latency, loss, streams in grid:
        folder = tempfile.mkdtemp()
        runs = [(f"{folder}/{name}", document(WIRES[name], int(streams), args.steps)) for name in names]
        with Network(hosts=4, rate=rate, latency=latency, loss=loss, preload=PRELOAD) as network:
            found = network.run(cells, runs, echo=False)[0]
        shutil.rmtree(folder)
        about = {"rate": rate, "latency": latency, "loss": loss, "streams": int(streams)}
        rows += [{**about, "wire": name, **cell} for name, cell in zip(names, found)]
        write_json(args.json, rows)
        for row in rows[-len(names) :]:
            print(" ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    ratios = [row["measured"] / row["predicted"] for row in rows]
    shown = [
        [*(row[key] for key in ("rate", "latency", "loss", "streams", "wire", "predicted", "measured"))] for row in rows
    ]
    table(
        "Seconds per warm step",
        ("rate", "latency", "loss", "streams", "wire", "predicted", "measured", "measured / predicted"),
        [[*row, ratio] for row, ratio in zip(shown, ratios)],
    )
    errors = [abs(ratio - 1) for ratio in ratios]
    print(f"{len(rows)} cells: median error {statistics.median(errors):.1%}, largest ratio {max(ratios):.2f}")


if __name__ == "__main__":
    main()
