"""Members on slow links, each killed and added again at random: one run.

    python benchmarks/data_parallel/elastic/one_run.py                        # 500 steps, ten deaths each, 50 Mb/s
    python benchmarks/data_parallel/elastic/one_run.py --steps 60 --deaths 1
    python benchmarks/data_parallel/elastic/one_run.py --method local         # or torchft, or a preset; --deaths 0

A model of a million parameters predicts the next byte of this project's documentation, whose checksum is `text`. A run
ends when `--steps` steps have counted, or as many samples as in as many rounds of ten local steps of all members.
Whoever is there, a step has the same samples, and a run as many. Printed as one line of JSON: the longest time between
two steps that counted (from the first one with all four on), in how many steps weights differed between members (0 is
right), held-out loss, deaths, steps that did not count, residuals that were lost with the dead (their norm beside that
of a survivor), the bytes that crossed the members' links, and for each death the seconds until the next step that
counted.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from member import PRELOAD, Life, pages, train, warm_up

import thinwire as tw
from thinwire.lab import Network

PORT = 29610
LIMITS = {"min_members": 2, "timeout": 5, "patience": 60}


def keep(folder: str, options: dict[str, Any], addresses: list[str]) -> int:
    """On every host. On the first: the lighthouse. On the others a member, killed and started again; how often."""
    rank, home = int(os.environ["RANK"]), Path(folder)
    warm_up()
    if rank == 0:
        with tw.elastic.Lighthouse(addresses[0], PORT, min_members=2, lost_seconds=1.0, join_seconds=5.0):
            while not (home / "finished").exists():
                time.sleep(0.1)
            time.sleep(2)
        return 0
    chance = random.Random(1000 * options["seed"] + rank)
    last = options["steps"] - options["steps"] // 10
    deaths = sorted(chance.sample(range(options["steps"] // 10, last), options["deaths"]))
    for life in itertools.count():
        process = os.fork()
        if process == 0:
            try:
                live(home, options, addresses[rank], f"http://{addresses[0]}:{PORT}", f"member{rank}", life)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if _watch(home, f"member{rank}.{life}", process, deaths, chance, options["apart"]):
            return life
    return 0


def live(home: Path, options: dict[str, Any], host: str, lighthouse: str, name: str, life: int) -> None:
    """One life of a member; the first one at the end says so."""

    def ended(one: Life) -> bool:
        return one.progress >= 1 or (home / "finished").exists()  # who comes after the end does not begin anew

    loss = train(home / f"{name}.{life}", options, host, lighthouse, name, ended)
    if not (home / "finished").exists():  # who came after the end has not trained
        (home / f"finished.{name}").write_text(json.dumps({"loss": loss}))
        os.replace(home / f"finished.{name}", home / "finished")


def _watch(
    home: Path, notes: str, process: int, deaths: list[int], chance: random.Random, apart: float
) -> bool:  # fmt: skip
    """Until the run has ended (True), or the member was killed at the first of the `deaths`, which is then taken.
    apart: seconds until the next life, beside at most two that are drawn."""
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            if status:
                raise RuntimeError(f"{notes} ended by itself with status {status}")
            return True
        if (home / "finished").exists():
            return _end(process)
        if deaths and _last_step(home / notes) >= deaths[0] and _may_die(home, notes):
            time.sleep(chance.uniform(0, 0.3))  # anywhere in a step
            os.kill(process, signal.SIGKILL)
            (home / f"{notes}.dead").write_text(str(time.monotonic()))
            os.waitpid(process, 0)
            deaths.pop(0)
            time.sleep(chance.uniform(0, 2) + apart)
            return False
        time.sleep(0.02)


def _may_die(home: Path, notes: str) -> bool:
    """Not where fewer than two others have made a step: if all are dead at once the run begins anew."""
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        dead = {path.stem for path in home.glob("*.dead")}
        newest: dict[str, Path] = {}
        for path in home.glob("member*.*"):
            if path.suffix != ".dead":
                newest[path.stem] = max(path, newest.get(path.stem, path), key=lambda p: int(p.suffix[1:]))
        alive = [path.name for path in newest.values() if path.name not in dead and path.stat().st_size]
        if len(alive) < 3:
            return False
        (home / f"{notes}.dead").touch()
        return True


def _end(process: int) -> bool:
    """Others are through: this member has five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if os.waitpid(process, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def _last_step(notes: Path) -> int:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else -1


def measure(options: dict[str, Any], rate: str, timeout: float, notes: Path | None) -> dict[str, Any]:
    options = LIMITS | options
    if notes is not None:
        notes.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory() if notes is None else nullcontext(str(notes)) as folder,
        Network(hosts=options["members"] + 1, rate=rate, preload=PRELOAD, patience=60, end_dead=False) as net,
    ):
        addresses = [str(host.address) for host in net.hosts]
        results = net.run(keep, folder, options, addresses, timeout=timeout, echo=False)
        loss = json.loads((Path(folder) / "finished").read_text())["loss"]
        found = {
            path.name: [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")]
            for path in Path(folder).glob("m*.*")
            if path.suffix != ".dead"
        }
        killed = [float(path.read_text()) for path in Path(folder).glob("m*.dead") if path.stat().st_size]
    crossed = sum(results.traffic[host.name].sent for host in net.hosts[1:])
    return {"loss": loss, "deaths": sum(results), "bytes": crossed, **summarise(found, options["members"], killed)}


def summarise(found: dict[str, list[dict[str, Any]]], members: int, killed: list[float]) -> dict[str, Any]:
    weights: dict[int, set[str]] = {}
    first: dict[int, float] = {}
    lost, kept, failed = [], [], 0
    survivors = {
        max((n for n in found if n.startswith(f"member{i}.")), key=lambda n: int(n.split(".")[1]))
        for i in range(1, members + 1)
    }
    for name, lines in found.items():
        failed += sum(not line["counts"] for line in lines)
        counted = [line for line in lines if line["counts"]]
        for line in counted:
            weights.setdefault(line["step"], set()).add(line["weights"])
            first[line["step"]] = min(line["at"], first.get(line["step"], line["at"]))
        norms = [line["residual"] for line in counted if line["residual"] is not None]
        (kept if name in survivors else lost).extend(norms[-1:])
    whole = [line["step"] for lines in found.values() for line in lines if line["size"] == members]
    begun = min(whole, default=min(first))
    times = [first[step] for step in sorted(first) if step >= begun]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    after = [[death, *[at for at in times if at > death][:2]] for death in sorted(killed)]  # the first may be whole yet
    return {
        "after_deaths": [round(max(b - a for a, b in itertools.pairwise(x)), 2) for x in after if len(x) > 1],
        "steps": len(first), "progress": max(x["progress"] for lines in found.values() for x in lines),
        "seconds": times[-1] - times[0], "longest_pause": max(gaps),
        "pauses_over_5_s": sum(gap > 5 for gap in gaps), "median_step": statistics.median(gaps),
        "steps_with_different_weights": sum(len(found) > 1 for found in weights.values()),
        "member_steps": sum(len(lines) for lines in found.values()), "member_steps_not_counted": failed,
        "residuals_lost": len(lost), "norm_of_lost_residuals": statistics.fmean(lost) if lost else 0.0,
        "norm_of_survivors_residuals": statistics.fmean(kept) if kept else 0.0,
        "sent_by_members": sum(lines[-1]["sent"] for lines in found.values() if lines),
        "state_taken_by_newcomers": sum(lines[-1]["healed"] for lines in found.values() if lines),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--deaths", type=int, default=10, help="of each member")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--width", type=int, default=400, help="of the model: 400 is a million parameters")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--method", default="max", help="a preset, off, local, local-dense, or torchft")
    parser.add_argument("--apart", type=float, default=0.0, help="seconds between a death and the next life")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3000)
    parser.add_argument("--notes", type=Path, help="keep every member's notes in this folder")
    options = vars(parser.parse_args())
    rate, timeout, notes = options.pop("rate"), options.pop("timeout"), options.pop("notes")
    same = f"{zlib.crc32(pages()):08x}"  # losses can be compared where runs have trained on the same text
    print(json.dumps(options | {"rate": rate, "text": same} | measure(options, rate, timeout, notes)), flush=True)


if __name__ == "__main__":
    main()
