"""Three members that are pipelines of two ranks, disturbed at random: does every process end, and with a clear line?

    python benchmarks/data_parallel/elastic/faults_pipelines.py --seed 3 [--seconds 45] [--heal later]

`thinwire train --elastic` on hosts of the lab at 50 Mb/s. For `--seconds` things happen to members, about every three
seconds to one of them: kill -9 of the whole member or of one of its ranks, SIGSTOP of either for up to ten seconds, its
link cut for up to ten seconds. A member whose ranks have all ended is started again, as whoever runs it would do. Then
nothing more happens until 20 more steps have counted, and all members are asked to end. Printed as one line of JSON:
what happened, steps, how processes ended (each with its last line), and hangs: processes that had not ended `--grace`
seconds after the last event. 0 is right, as are 0 tracebacks.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from thinwire.lab import Job, Network
from thinwire.lab.events import last_step
from thinwire.train.config.sections import load
from thinwire.train.members.launch import ENDED, PRELOAD, _on_host

MEMBERS, RANKS, MORE = 3, 2, 20
KINDS = ("kill", "kill one", "freeze", "freeze one", "cut")
LONGEST = 10.0  # seconds of a freeze or a cut
QUIET = 3.0  # seconds between two events, on the average
RUN = """
[model]
layers = 2
hidden = 32
heads = 2
[data]
seq_len = 16
samples = 200
[mesh]
dp = 3
pp = 2
microbatches = 2
[optim]
batch = 12
steps = 100000
warmup = 0
[run]
out = "{out}"
eval_every = 0
checkpoint_every = 25
elastic = true
min_replicas = 2
heal = "{heal}"
loggers = []
seed = {seed}
[wire]
preset = "max"
"""


class Hosts:
    """The members' processes, and what is done to them."""

    def __init__(self, net: Network, job: Job, out: Path) -> None:
        self.net, self.job, self.out = net, job, out
        self.ranks = {
            member: [place.rank for place in job.placements if place.host_number == member]
            for member in range(1, MEMBERS + 1)
        }
        self.noted: set[int] = set()  # ranks whose end is known
        self.ends: list[str] = []
        self.where: list[str] = []  # tracebacks
        self.cut: Counter[int] = Counter()
        self.undo: list[tuple[float, str, int, list[int]]] = []  # when, what, member, ranks

    def happen(self, kind: str, member: int, chance: random.Random, latest: float) -> None:
        ranks = self.ranks[member] if " " not in kind else [chance.choice(self.ranks[member])]
        ranks = [rank for rank in ranks if self.job.statuses[rank] is None]
        until = min(self.job.seconds + chance.uniform(0.2, LONGEST), latest)
        if kind.startswith("kill"):
            for rank in ranks:
                self.job.lose(rank)
        elif kind.startswith("freeze"):
            for rank in ranks:
                self.job.pause(rank)
            self.undo.append((until, "thaw", member, ranks))
        else:
            self.cut[member] += 1
            self.net.link_down(member)
            self.undo.append((until, "restore", member, []))

    def tick(self, restarts: bool) -> None:
        """Undo what is due, note who has ended, and start members again whose ranks have all ended."""
        for due in [one for one in self.undo if one[0] <= self.job.seconds]:
            self.undo.remove(due)
            _, what, member, ranks = due
            for rank in ranks:
                if self.job.statuses[rank] is None:
                    self.job.resume(rank)
            self.cut[member] -= what == "restore"
            if what == "restore" and not self.cut[member]:
                self.net.link_up(member)
        for member, ranks in self.ranks.items():
            for rank in ranks:
                if self.job.statuses[rank] is not None and rank not in self.noted:
                    self.noted.add(rank)
                    self.ends.append(self._last_line(rank))
            if restarts and not self.cut[member] and all(rank in self.noted for rank in ranks):
                for rank in ranks:
                    self.noted.discard(rank)
                    self.job.add(rank)

    def _last_line(self, rank: int) -> str:
        status, lines = self.job.statuses[rank], [line for line in self.job.output(rank) if line.strip()]
        if status == 0:
            return "done"
        if status is not None and status < 0:
            return f"killed ({status})"
        begins = [place for place, line in enumerate(lines) if line.startswith("Traceback")]
        kind = "TRACEBACK: " if begins else "error: "
        self.where += ["\n".join(lines[max(0, begins[0] - 3) :])[:4000]] if begins else []
        ours = [line for line in lines if line.startswith("thinwire:")]  # torchft's log may come after it
        return kind + (ours or lines or ["nothing was said"])[-1][:300]


def steps_of(out: Path) -> int:
    """The highest step that any member has noted."""
    return max(last_step(out / f"host{member}") for member in range(1, MEMBERS + 1))


def measure(seed: int, seconds: float, grace: float, heal: str) -> dict[str, Any]:
    chance = random.Random(seed)
    happened: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(hosts=MEMBERS + 1, rate="50mbit", preload=PRELOAD, patience=60, end_dead=False) as net,
    ):
        out, path = Path(folder) / "out", Path(folder) / "run.toml"
        out.mkdir()
        path.write_text(RUN.format(out=out, seed=seed, heal=heal))
        addresses = [str(host.address) for host in net.hosts]
        job = net.start(_on_host, load(path), addresses, per_host=RANKS, echo=False, separate=True)
        hosts = Hosts(net, job, out)
        while steps_of(out) < 3 and job.seconds < 120:
            job.watch(0.1)
        began = job.seconds
        following = began + chance.expovariate(1 / QUIET)
        while job.seconds < began + seconds:
            job.watch(0.05)
            if job.seconds > following:
                kind, member = chance.choice(KINDS), chance.randint(1, MEMBERS)
                happened[kind] += 1
                hosts.happen(kind, member, chance, began + seconds)
                following = job.seconds + chance.expovariate(1 / QUIET)
            hosts.tick(restarts=True)
        disturbed = steps_of(out)
        deadline = job.seconds + grace
        while steps_of(out) < disturbed + MORE and job.seconds < deadline:
            job.watch(0.05)
            hosts.tick(restarts=True)
        steps, quiet = steps_of(out), job.seconds - began - seconds
        hangs = end(hosts, grace)
    return {
        "kind": "faults", "of": "pipelines", "seed": seed, "seconds": seconds, "heal": heal, "events": dict(happened),
        "steps_while_disturbed": disturbed, "steps": steps, "seconds_to_20_more_steps": quiet, "hangs": hangs,
        "stuck": int(steps < disturbed + MORE), "lives": len(hosts.ends), "ends": dict(Counter(hosts.ends)),
        "tracebacks": sum(one.startswith("TRACEBACK") for one in hosts.ends), "where": hosts.where,
    }  # fmt: skip


def end(hosts: Hosts, grace: float) -> int:
    """Ask all members to end: how many processes have not after so long."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        running = [rank for ranks in hosts.ranks.values() for rank in ranks if hosts.job.statuses[rank] is None]
        for rank in set(running) - asked:
            hosts.job.ask_to_end(rank)
        asked |= set(running)
        if not running:
            break
        hosts.job.watch(0.1)
        hosts.tick(restarts=False)
    hosts.tick(restarts=False)
    hangs = sum(hosts.job.statuses[rank] is None for ranks in hosts.ranks.values() for rank in ranks)
    (hosts.out / ENDED).touch()
    hosts.job.stop()
    return hangs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--grace", type=float, default=90)
    parser.add_argument("--heal", default="wait", choices=("wait", "later"))
    options = parser.parse_args()
    print(json.dumps(measure(options.seed, options.seconds, options.grace, options.heal)), flush=True)


if __name__ == "__main__":
    main()
