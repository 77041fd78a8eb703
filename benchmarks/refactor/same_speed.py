"""Does a refactoring cost time? Two checkouts' steps in turn, in many short blocks, on the same cores.

    python benchmarks/refactor/same_speed.py BEFORE AFTER --kind ddp --cores 8-9 --seconds 60
    python benchmarks/refactor/same_speed.py BEFORE AFTER --kind train --cores 8-11 --seconds 60

BEFORE and AFTER are folders that hold a package `thinwire`. `ddp`: compress_ddp with `max` on two ranks, a million
parameters. `train`: the training loop of `thinwire train` with `max`, dp 2 × pp 2. Ranks of both versions live all the
time; while those of one make a block of steps, those of the other wait for their next word. Blocks come in pairs, in
turn begun by either. Printed as one line of JSON: milliseconds per step of both, and the mean over pairs of the ratio
after / before, with half its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

RANKS = {"ddp": 2, "train": 4}
RUN = """\
[model]
hidden = 64
layers = 4
heads = 4
[data]
seq_len = 64
corpus_bytes = 40000
samples = 40
[mesh]
dp = 2
pp = 2
microbatches = 2
[optim]
batch = 8
steps = 1000000
[run]
out = "{out}"
loggers = []
[wire]
preset = "max"
"""


def ddp() -> Callable[[], None]:
    """One step of DDP."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)))
    tw.parallel.compress_ddp(model, "max")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(32, 512)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(folder: str) -> Callable[[], None]:
    """One step of the training loop."""
    from thinwire.train.config.sections import load
    from thinwire.train.loop import Trainer

    path = Path(folder) / f"run-{os.environ['RANK']}.toml"
    path.write_text(RUN.format(out=Path(folder) / "out"))
    return Trainer(load(path), say=lambda line: None)._train_step


def rank(kind: str, folder: str) -> None:
    """Make as many steps as every line of input says, and answer with their seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = ddp() if kind == "ddp" else train(folder)
    for _ in range(5):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - began, flush=True)
    os._exit(0)


class Version:
    """The ranks of one checkout."""

    def __init__(self, place: Path, kind: str, cores: list[int], folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = []
        for number in range(RANKS[kind]):
            world = {"RANK": number, "WORLD_SIZE": RANKS[kind], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = os.environ | {key: str(value) for key, value in world.items()}
            pin = partial(os.sched_setaffinity, 0, [cores[number % len(cores)]])
            self.ranks.append(subprocess.Popen(
                [sys.executable, __file__, "--rank", kind, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, preexec_fn=pin,
                env=env | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            ))  # fmt: skip
        for one in self.ranks:
            assert one.stdout is not None
            while one.stdout.readline().strip() != "ready":
                assert one.poll() is None, f"a rank of {place} has ended"

    def block(self, steps: int) -> float:
        """Seconds per step, of the slowest rank."""
        for one in self.ranks:
            assert one.stdin is not None
            one.stdin.write(f"{steps}\n")
            one.stdin.flush()
        return max(float(one.stdout.readline()) for one in self.ranks if one.stdout is not None) / steps

    def end(self) -> None:
        for one in self.ranks:
            one.kill()
            one.wait()


def compare(places: list[Path], kind: str, cores: list[int], seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / name for name in ("before", "after")]
        for home in homes:
            home.mkdir()
        versions = [Version(place, kind, cores, str(home)) for place, home in zip(places, homes)]
        try:
            steps = max(1, round(0.15 / versions[0].block(10)))
            pairs: list[tuple[float, float]] = []
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                if len(pairs) % 2:
                    after, before = versions[1].block(steps), versions[0].block(steps)
                else:
                    before, after = versions[0].block(steps), versions[1].block(steps)
                pairs.append((before, after))
        finally:
            for version in versions:
                version.end()
    ratios = [math.log(after / before) for before, after in pairs]
    mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        "kind": kind, "pairs": len(pairs), "steps_per_block": steps,
        "before_ms": 1e3 * statistics.median(b for b, _ in pairs),
        "after_ms": 1e3 * statistics.median(a for _, a in pairs),
        "ratio": math.exp(mean), "half_interval": math.exp(mean) * 1.96 * error,
        "median_ratio": math.exp(statistics.median(ratios)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--kind", choices=tuple(RANKS), default="ddp")
    parser.add_argument("--cores", default="0-1", help="first-last; ranks are spread over them")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    first, _, last = options.cores.partition("-")
    cores = list(range(int(first), int(last or first) + 1))
    places = [options.before.resolve(), options.after.resolve()]
    print(json.dumps(compare(places, options.kind, cores, options.seconds)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:4])
    else:
        main()
