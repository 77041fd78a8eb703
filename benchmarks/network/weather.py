"""Does a run survive bad weather? The same training on a good network and on bad ones: seconds per step, and losses.

    python benchmarks/network/weather.py [--only "loss 1 %"] [--steps 30] [--json PATH]

dp 2 × pp 2 on four hosts of the lab, preset max, 20 Mb/s and 20 ms one way. Nothing is lost where every step's loss is
that of the run on the good network, to the bit, and no step was skipped.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import RunFailed
from thinwire.lab import Network
from thinwire.terminal import table, write_json
from thinwire.train.config.sections import read_config
from thinwire.train.local import PRELOAD, train_local
from thinwire.train.metrics import METRICS, Event, EventReader

LINK = {"rate": "20mbit", "latency": "20ms"}
CHANGE_AT = 8  # the step after which a network changes
BLACKOUT = 30.0  # seconds


def halved(network: Network) -> None:
    for host in range(4):
        network.set_rate(host, "10mbit")


def blackout(network: Network, seconds: float = BLACKOUT) -> None:
    network.link_down(3)
    time.sleep(seconds)
    network.link_up(3)


def cut(network: Network) -> None:
    network.link_down(3)


Change = Callable[[Network], None]
WEATHER: dict[str, tuple[dict[str, Any], Change | None]] = {
    "good": (LINK, None),
    "loss 1 %": (LINK | {"loss": "1%"}, None),
    "reordering 1 %": (LINK | {"reorder": "1%"}, None),
    "up 5, down 50 Mb/s": ({"up": "5mbit", "down": "50mbit", "latency": "20ms"}, None),
    "rate halves": (LINK, halved),
    "30 s without a packet": (LINK, blackout),
    "a cable cut for good": (LINK, cut),
}


def document(out: Path, steps: int) -> dict[str, Any]:
    return {
        "model": {"hidden": 128, "layers": 4, "heads": 4},
        "data": {"seq_len": 128, "corpus_bytes": 100_000, "held_out": 0.0, "samples": 64, "tokenizer": "bytes"},
        "mesh": {"dp": 2, "pp": 2, "microbatches": 4},
        "optim": {"batch": 32, "steps": steps},
        "wire": {"preset": "max"},
        "run": {"out": str(out), "eval_every": 0, "checkpoint_every": 5},
    }


def after_steps(path: Path, count: int, act: Callable[[], None]) -> threading.Thread:
    """A thread that acts once the run has done so many steps."""

    def watch() -> None:
        reader = EventReader(path)
        while sum(event["kind"] == "step" for event in reader.poll()) < count:
            time.sleep(0.2)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def run(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Seconds, losses and skips of a run, or the line in which it ended and how long that took."""
    given, change = WEATHER[name]
    config = read_config(document(folder / name, steps))
    with Network(hosts=4, **given, patience="120s", preload=PRELOAD) as network:
        if change is not None:
            after_steps(folder / name / METRICS, CHANGE_AT, lambda: change(network))
        began = time.monotonic()
        try:
            events = train_local(config, network=network, label=name, timeout=400)
        except RunFailed as error:
            return {"ended": str(error), "seconds": time.monotonic() - began}
    done: list[Event] = [event for event in events if event["kind"] == "step"]
    return {
        "seconds": statistics.median(event["step_seconds"] for event in done[3:]),
        "longest": max(event["step_seconds"] for event in done[3:]),
        "losses": [event["loss"] for event in done], "skips": done[-1]["skips"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WEATHER, action="append", help="beside the good one; may be given again")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", help="where results are written")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in WEATHER:
            if name == "good" or args.only is None or name in args.only:
                found[name] = run(name, Path(folder), args.steps)
                write_json(args.json, found)
    rows = []
    for name, one in found.items():
        if "ended" in one:
            rows.append([name, f"{one['seconds']:.0f} in all", "", one["ended"], ""])
        else:
            same = "the same" if one["losses"] == found["good"]["losses"] else "OTHER"
            rows.append([name, f"{one['seconds']:.2f}", f"{one['longest']:.2f}", same, one["skips"]])
    table("Weather", ("network", "seconds per step", "longest", "losses", "skipped"), rows)


if __name__ == "__main__":
    main()
