"""All runs about members that come and go, several labs at once, each pinned to cores of its own.

    python benchmarks/data_parallel/elastic/evidence.py --out out/elastic --cores 0-15 --budget 500 --end 590
    python benchmarks/data_parallel/elastic/evidence.py --out out/elastic --only main,faults
    python benchmarks/data_parallel/elastic/evidence.py --out out/elastic --summary
    python benchmarks/data_parallel/elastic/evidence.py --out out/quick --quick

Groups, in the order in which they begin: main (500 steps, every member killed ten times, three seeds, and undisturbed),
local (as main with rounds of local steps), torchft (torchft alone in fp32 beside thinwire, 150 steps, three deaths),
faults (100 runs of a minute with kills, freezes and cut links), heal (a state over 50 Mb/s). One line of JSON per run
is appended to OUT/runs.jsonl as it ends; runs that are there are not made again. torchft is taken from --torchft, a
folder with its unpacked wheels, where it is not installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
GROUPS = ("main", "faults", "local", "torchft", "heal")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """name: in runs.jsonl. words: of its command. cores: that it is given; 0.25: shared with others. seconds: limit."""

    name: str
    group: str
    words: tuple[str, ...]
    cores: float
    seconds: float


def one(name: str, group: str, cores: float, seconds: float, **options: object) -> Run:
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return Run(name, group, ("one_run.py", *words, "--timeout", str(seconds)), cores, seconds)


def runs(quick: bool, faults: str, each: int) -> Iterator[Run]:
    """faults: first and last seed of such runs. each: cores of a run with compression; one of torchft alone waits for
    the link most of the time."""
    seeds = SEEDS[:1] if quick else SEEDS
    size: dict[str, object] = {"width": 50} if quick else {}
    steps, deaths = (20, 1) if quick else (500, 10)
    for group, method, cores in (("main", "max", each), ("local", "local", 1)):
        for number, seed in itertools.product((deaths, 0), seeds):
            name = f"{method}-{steps}-{number}-{seed}"
            yield one(name, group, cores, 580, method=method, steps=steps, deaths=number, seed=seed, **size)
    steps, deaths = (10, 1) if quick else (150, 3)
    for number, seed, method in itertools.product((deaths, 0), seeds, ("torchft", "max")):
        name = f"{method}-{steps}-{number}-{seed}-beside"
        cores = each if method == "max" else 0.34
        yield one(name, "torchft", cores, 580, method=method, steps=steps, deaths=number, seed=seed, **size)
    first, last = (int(seed) for seed in faults.split("-"))
    for seed in range(first, first + 1 if quick else last + 1):
        chosen = "local" if seed % 4 == 3 else "max"
        words = ("faults.py", "--seed", str(seed), "--method", chosen, "--seconds", "10" if quick else "45")
        yield Run(f"faults-{seed}", "faults", words, 0.25, 200)
    yield Run("heal", "heal", ("heal.py", *(("--width", "100", "--steps", "5") if quick else ())), 1, 300)


class Running:
    """A run that was started, on some cores."""

    def __init__(self, run: Run, cores: list[int], out: Path) -> None:
        self.run, self.cores, self.began = run, cores, time.monotonic()
        self.log = (out / f"{run.name}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / run.words[0]), *run.words[1:]], stdout=subprocess.PIPE, stderr=self.log,
            text=True, start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip

    def result(self) -> dict[str, Any] | None:
        """Once it has ended, or its time is over."""
        late = time.monotonic() - self.began > self.run.seconds + 20
        if self.process.poll() is None and not late:
            return None
        about = {"name": self.run.name, "group": self.run.group, "wall": time.monotonic() - self.began}
        if late:
            self.kill()
            return about | {"failed": f"not through after {self.run.seconds:g} s"}
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        if self.process.returncode:
            said = (Path(self.log.name).read_text().strip().splitlines() or ["nothing was said"])[-1]
            return about | {"failed": said[:300]}
        return about | json.loads(lines[-1])

    def kill(self) -> None:
        """With it its lab ends."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Cores:
    """Which core has how much to do."""

    def __init__(self, text: str) -> None:
        first, _, last = text.partition("-")
        self.load = dict.fromkeys(range(int(first), int(last or first) + 1), 0.0)

    def take(self, wanted: float) -> list[int] | None:
        """The least busy ones; None where there are not enough."""
        share = min(wanted, 1.0)
        free = sorted((core for core in self.load if self.load[core] + share <= 1), key=lambda core: -self.load[core])
        count = max(1, round(wanted))
        if len(free) < count:
            return None
        for core in free[:count]:
            self.load[core] += share
        return free[:count]

    def give_back(self, cores: list[int], wanted: float) -> None:
        for core in cores:
            self.load[core] -= min(wanted, 1.0)


def work(waiting: list[Run], cores: Cores, file: TextIO, out: Path, options: argparse.Namespace) -> None:
    """Start what fits, note what ends, until all has ended or the time is over."""
    began, running = time.monotonic(), []
    try:
        while running or waiting:
            now = time.monotonic() - began
            if now > options.budget:
                waiting.clear()
            for run in list(waiting):
                place = cores.take(run.cores)
                if place is not None:
                    waiting.remove(run)
                    running.append(Running(run, place, out))
            for one in list(running):
                found = one.result()
                if found is not None:
                    running.remove(one)
                    cores.give_back(one.cores, one.run.cores)
                    file.write(json.dumps(found) + "\n")
                    file.flush()
                    print(f"{now:5.0f} s  {one.run.name}: {brief(found)}; {len(running)} running", flush=True)
            if now > options.end:
                print(f"{now:5.0f} s  the time is over: {', '.join(one.run.name for one in running)} ended", flush=True)
                return
            time.sleep(0.2)
    finally:
        for one in running:
            one.kill()


def brief(found: dict[str, Any]) -> str:
    keys = (
        "failed", "loss", "seconds", "longest_pause", "steps_with_different_weights", "deaths", "bytes", "hangs",
        "tracebacks", "steps",
    )  # fmt: skip
    return ", ".join(f"{key} {found[key]:.6g}" if isinstance(found[key], (int, float)) else f"{key} {found[key]}"
                     for key in keys if key in found)  # fmt: skip


def summary(found: list[dict[str, Any]]) -> None:
    """What must be shown, from the lines that are there."""
    good = [line for line in found if "failed" not in line]
    for kind in ("max-500-", "local-500-", "torchft-150-", "max-150-"):
        disturbed = [x for x in good if x["name"].startswith(kind) and x["deaths"] > 0]
        calm = [x for x in good if x["name"].startswith(kind) and x["deaths"] == 0]
        for what, rows in (("killed", disturbed), ("undisturbed", calm)):
            if rows:
                mean = {
                    key: statistics.fmean(x[key] for x in rows) for key in ("loss", "seconds", "bytes", "median_step")
                }
                print(f"{kind}{what}: {len(rows)} runs, mean {brief(mean)}, median step {mean['median_step']:.3f} s, "
                      f"longest pause {max(x['longest_pause'] for x in rows):.1f} s, deaths "
                      f"{[x['deaths'] for x in rows]}, steps with different weights "
                      f"{sum(x['steps_with_different_weights'] for x in rows)}, losses "
                      f"{[round(x['loss'], 4) for x in rows]}")  # fmt: skip
    faults = [x for x in good if x.get("kind") == "faults"]
    if faults:
        lines = sorted({end for x in faults for end in x["ends"]})
        sums = {key: sum(x[key] for x in faults) for key in ("hangs", "tracebacks", "lives")}
        print(f"faults: {len(faults)} runs, {sums}; ends: {lines}")
    for line in found:
        if "failed" in line or line.get("kind") == "heal":
            print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cores", default=f"0-{(os.cpu_count() or 1) - 1}")
    parser.add_argument("--each", type=int, default=2, help="cores of a run with compression")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run begins")
    parser.add_argument("--end", type=float, default=1e9, help="seconds after which runs are ended")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, with commas")
    parser.add_argument("--faults", default="0-99", help="first and last seed of the runs with faults")
    parser.add_argument("--torchft", type=Path, help="a folder with torchft, unpacked")
    parser.add_argument("--quick", action="store_true", help="a small form of everything")
    parser.add_argument("--summary", action="store_true", help="only of what is there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not options.summary:
        root = str(HERE.parents[2])
        places = [root, *([str(options.torchft.resolve())] if options.torchft else [])]
        os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        made = {line["name"] for line in found if "failed" not in line}
        chosen = options.only.split(",")
        waiting = [
            r for r in runs(options.quick, options.faults, options.each) if r.group in chosen and r.name not in made
        ]
        with path.open("a") as file:
            work(waiting, Cores(options.cores), file, options.out, options)
        found = [json.loads(line) for line in path.read_text().splitlines()]
    summary(found)


if __name__ == "__main__":
    main()
