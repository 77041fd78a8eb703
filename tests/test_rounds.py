"""How many latencies of a training step pass one after another (rounds.py), counted on real ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rounds import Log, collectives_of, latencies
from train_ranks import rounds_of, settings

from thinwire.lab import Network

ROWS = {"preset": "max", "embedding": {"collective": "dense", "sync": "rows"}}
SQUARE = {"dp": 2, "pp": 2, "microbatches": 4}
# 1F1B over two stages 5 (its first receive is posted when its message leaves; a first forward hides that), gradients 1,
# the tied embedding over four ranks 1 more, the vote 1, and what a step's two directions keep each other waiting for.
MOST = {"max": 10, "off": 11, "rows": 10}  # threads of a rank take turns otherwise at times: up to one more


@pytest.mark.lab
@pytest.mark.timeout(200)
def test_latencies_of_a_step(tmp_path):
    """In the long run. The first steps shake hands and post nothing ahead; after the last it is saved."""
    wires = {"max": {"preset": "max"}, "off": {}, "rows": ROWS}
    often = {"eval_every": 0, "checkpoint_every": 0}
    with Network(hosts=4, preload=["train_warm"]) as net:
        for name, wire in wires.items():
            config = settings(tmp_path / name, wire, mesh=SQUARE, run=often)
            records = list(net.run(rounds_of, config, timeout=60, echo=False))
            marks = latencies(records)
            assert (marks[8] - marks[2]) / 6 <= MOST[name], f"{name}: {[b - a for a, b in pairwise(marks)]}"
            others = collectives_of([_steady(log) for log in records])
            assert others == [], f"{name}: not all messages of a step are thinwire's own"


def _steady(log: Log) -> Log:
    """Of the main thread, what is between the third mark and the last step."""
    events = log["MainThread"]
    marks = [place for place, event in enumerate(events) if event[0] == "mark"]
    return {"MainThread": events[marks[2] : marks[8]]}
