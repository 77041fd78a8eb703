"""Random kills of a run with two sites, each resumed: does it come to the bits of the undisturbed run?

    python benchmarks/network/site_kills.py [--kills 20] [--seed 0] [--json PATH]

Two sites, each a pipeline of two stages, on hosts of the lab; local-max between the sites in two fragments, applied one
step later; `max` inside a site; a checkpoint every second step. A rank picked at random is killed (kill -9) at a random
moment of its next steps, with other ranks wherever they are: computing, averaging, writing a checkpoint. The run is
then started again with --resume. At its end every step's loss, every site's loss per round, the bytes between sites and
the published weights must be those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from thinwire.lab import Network, RankFailed
from thinwire.terminal import table, write_json
from thinwire.train.config.sections import TrainConfig, read_config
from thinwire.train.local import PRELOAD, topology
from thinwire.train.metrics import METRICS, EventReader, read_events
from thinwire.train.rank import train_rank

POLL = 0.01  # seconds between two looks at the metrics
AHEAD = 3  # a kill comes within so many steps after the run has gone on
PATIENCE = 90.0  # seconds that a run may take to make them, and to end after a kill


def settings(out: Path, steps: int) -> TrainConfig:
    """The run's configuration, in the folder `out`."""
    return read_config({
        "model": {"hidden": 32, "layers": 4, "heads": 4},
        "data": {"seq_len": 32, "corpus_bytes": 20_000, "samples": 64, "held_out": 0.0, "tokenizer": "bytes"},
        "mesh": {"sites": 2, "pp": 2, "microbatches": 2},
        "optim": {"batch": 8, "steps": steps, "warmup": 2, "lr": 3e-3},
        "run": {"eval_every": 0, "checkpoint_every": 2, "keep": 3, "out": str(out)},
        "wire": {"preset": "max"},
        "local": {"preset": "local-max", "every": 5, "fragments": 2, "delay": 1},
    })  # fmt: skip


def outcome(out: Path) -> dict[str, Any]:
    """What a run came to, read from the files it wrote."""
    events = read_events(out / METRICS)
    steps = [event for event in events if event["kind"] == "step"]
    weights = hashlib.blake2b(digest_size=8)
    for file in sorted((out / "model").glob("*.safetensors")):
        weights.update(file.read_bytes())
    return {
        "losses": [(event["step"], event["loss"]) for event in steps],
        "between sites": steps[-1]["site_bytes"],
        "weights": weights.hexdigest(),
    }


def disturb(net: Network, config: TrainConfig, kills: int, rng: random.Random) -> list[tuple[int, int]]:
    """Train by `config`, killed so many times and resumed; (step, rank) of every kill."""
    struck: list[tuple[int, int]] = []
    resume, out = False, Path(config.run.out)
    last = config.optim.steps or 0
    while len(struck) < kills:
        reader = EventReader(out / METRICS)
        first = _done(reader) if resume else 0
        job = net.start(train_rank, config, resume, echo=False)
        resume = True
        goal = min(first + rng.randint(1, AHEAD), last - 1)
        limit = time.monotonic() + PATIENCE
        while not job.watch(POLL) and _done(reader) < goal:
            if time.monotonic() > limit:
                job.stop()
                raise SystemExit(f"the run has not made {goal} steps in {PATIENCE:.0f} s")
        job.watch(rng.random() * 0.1)
        rank = rng.randrange(config.mesh.ranks)
        if not job.done:
            job.kill(rank)
        try:
            job.wait(PATIENCE)
        except RankFailed:
            struck.append((_done(reader), rank))
    net.run(train_rank, config, True, timeout=PATIENCE, echo=False)
    return struck


def _done(reader: EventReader) -> int:
    """The last step in the metrics."""
    return max((event["step"] for event in reader.poll() if event["kind"] == "step"), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write the result there")
    args = parser.parse_args()
    steps = 10 + (AHEAD + 1) * args.kills
    with tempfile.TemporaryDirectory() as folder:
        smooth, rough = (settings(Path(folder) / name, steps) for name in ("smooth", "rough"))
        with Network(topology=topology(smooth.mesh, None, "2ms", "0%"), preload=PRELOAD) as net:
            net.run(train_rank, smooth, False, timeout=300.0, echo=False)
            struck = disturb(net, rough, args.kills, random.Random(args.seed))
        expected, found = outcome(Path(smooth.run.out)), outcome(Path(rough.run.out))
    rows = [(name, "the same bits" if found[name] == expected[name] else "DIFFERS") for name in expected]
    table(f"{len(struck)} kills in {steps} steps, resumed", ("", "beside the undisturbed run"), rows)
    print("killed (step, rank):", ", ".join(map(str, struck)))
    write_json(
        args.json, {"kills": struck, "steps": steps, "same": found == expected, "expected": expected, "found": found}
    )
    return 0 if found == expected else 1


if __name__ == "__main__":
    raise SystemExit(main())
