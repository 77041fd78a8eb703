"""Three members for a minute, killed, frozen and cut off at random: does every process end, and with a clear line?

    python benchmarks/data_parallel/elastic/faults.py --seed 3 [--seconds 45] [--method max|local]

For `--seconds` things happen to members, about every three seconds to one of them: kill -9 (and a new life after up to
two seconds), SIGSTOP for up to ten seconds, its link cut for up to ten seconds. Then nothing more happens, and the
members train until they have made 20 more steps. A member that ends by itself with an error is started again, as
whoever runs it would do, unless the others are through. Printed as one line of JSON: what happened, steps, how members
ended (each of them with its last line), and hangs: members that had not ended `--grace` seconds after the last event
and had made no step for half a minute, with where they were. 0 is right, as are 0 tracebacks.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from member import PRELOAD, Life, train, warm_up

import thinwire as tw
from thinwire.errors import RunFailed, UsageError
from thinwire.lab import Network

PORT, MEMBERS, MORE = 29610, 3, 20
OPTIONS = {"members": MEMBERS, "steps": 500, "width": 16, "min_members": 2, "timeout": 5, "patience": 20, "rest": 0.05}
LONGEST = 10.0  # seconds of a freeze or a cut
STILL = 30.0  # seconds without a step: on a busy machine a member may be slow, which is no hang
QUIET = 3.0  # seconds between two events, on the average


def plan(seed: int, seconds: float) -> list[dict[str, Any]]:
    """What happens when, to which host."""
    chance, at, out = random.Random(seed), 5.0, []
    while (at := at + chance.expovariate(1 / QUIET)) < seconds:
        kind = chance.choice(("kill", "freeze", "cut"))
        lasts = chance.uniform(0, 2) if kind == "kill" else min(chance.uniform(0.2, LONGEST), seconds - at)
        out.append({"at": at, "kind": kind, "rank": chance.randint(1, MEMBERS), "lasts": lasts})
    return out


def keep(folder: str, options: dict[str, Any], addresses: list[str], events: list[dict[str, Any]]) -> dict[str, Any]:
    """On every host. On the first: the lighthouse, until all members have ended. On the others a member."""
    rank, home = int(os.environ["RANK"]), Path(folder)
    warm_up()
    (home / f"ready.{rank}").touch()
    if rank == 0:
        with tw.elastic.Lighthouse(addresses[0], PORT, min_members=2, lost_seconds=1.0, join_seconds=5):
            while len(list(home.glob("ended.*"))) < MEMBERS:
                time.sleep(0.1)
        return {}
    mine = [event for event in events if event["rank"] == rank and event["kind"] != "cut"]
    found = Keeper(home, options, rank, addresses, mine).run()
    (home / f"ended.{rank}").touch()
    return found


class Keeper:
    """Starts a member, does to it what its events say, and starts it again where it has ended before the end."""

    def __init__(
        self, home: Path, options: dict[str, Any], rank: int, addresses: list[str], events: list[dict[str, Any]]
    ) -> None:
        self.home, self.options, self.rank, self.addresses = home, options, rank, addresses
        self.events = events
        self.ends: list[str] = []
        self.life = -1
        self.process = 0

    def run(self) -> dict[str, Any]:
        """Until the member has ended after the target was set: its ends, and where it hung."""
        began = time.monotonic()
        self._start()
        while True:
            now = time.monotonic() - began
            if self.events and now >= self.events[0]["at"]:
                self._happen(self.events.pop(0))
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.ends.append(self._last_line(status))
                if status == 0 or list(self.home.glob("ended.*")):
                    return {"lives": self.life + 1, "ends": self.ends, "hang": None}
                self._start()
            if now > self.options["until"] and self._still() > STILL:
                return {"lives": self.life + 1, "ends": self.ends, "hang": self._kill()}
            time.sleep(0.05)

    def _happen(self, event: dict[str, Any]) -> None:
        if event["kind"] == "kill":
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            time.sleep(event["lasts"])
            self._start()
        else:
            os.kill(self.process, signal.SIGSTOP)
            time.sleep(event["lasts"])
            os.kill(self.process, signal.SIGCONT)

    def _start(self) -> None:
        self.life += 1
        self.process = os.fork()
        if self.process == 0:
            os._exit(self._live())

    def _live(self) -> int:
        """In the member: 0 at the end, 2 after an error in one line, 1 after any other."""
        name = f"member{self.rank}"
        error = (self.home / f"{name}.{self.life}.err").open("w")
        os.dup2(error.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, file=error)
        address = f"http://{self.addresses[0]}:{PORT}"
        try:
            notes = self.home / f"{name}.{self.life}"
            train(notes, self.options, self.addresses[self.rank], address, name, until(self.home))
        except (RunFailed, UsageError) as problem:
            print(f"thinwire: {problem}", file=error, flush=True)
            return 2
        except BaseException:
            traceback.print_exc(file=error)
            error.flush()
            return 1
        return 0

    def _still(self) -> float:
        """Seconds since this member has noted a step, or begun."""
        files = [self.home / f"member{self.rank}.{self.life}{kind}" for kind in ("", ".err")]
        return time.time() - max(file.stat().st_mtime for file in files if file.exists())

    def _last_line(self, status: int) -> str:
        if status == 0:
            return "done"
        lines = (self.home / f"member{self.rank}.{self.life}.err").read_text().splitlines()
        kind = "error: " if os.waitstatus_to_exitcode(status) == 2 else f"TRACEBACK ({status}): "
        ours = [line for line in lines if line.startswith("thinwire:")]  # torchft's log may come after it
        return kind + (ours or lines or ["nothing was said"])[-1][:300]

    def _kill(self) -> str:
        """Of a member that hangs: where it was."""
        os.kill(self.process, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        return (self.home / f"member{self.rank}.{self.life}.err").read_text()[-4000:]


def until(home: Path) -> Callable[[Life], bool]:
    """Has the member made as many steps as the file says, once there is one?"""

    def ended(one: Life) -> bool:
        target = home / "target"
        return target.exists() and one.steps >= int(target.read_text())

    return ended


def reached(home: Path) -> int:
    """The highest step that any member has noted."""
    last = [path.read_text().splitlines()[-2:] for path in home.glob("member*.*") if path.suffix != ".err"]
    return max((json.loads(line)["step"] for lines in last for line in lines if line.endswith("}")), default=0)


def measure(seed: int, seconds: float, grace: float, method: str) -> dict[str, Any]:
    events = plan(seed, seconds)
    options = OPTIONS | {"seed": seed, "method": method, "until": seconds + grace}
    with tempfile.TemporaryDirectory() as folder, Network(
        hosts=MEMBERS + 1, rate="50mbit", preload=PRELOAD, patience=60, end_dead=False
    ) as net:  # fmt: skip
        home = Path(folder)
        addresses = [str(host.address) for host in net.hosts]
        job = net.start(keep, folder, options, addresses, events, echo=False)
        while len(list(home.glob("ready.*"))) <= MEMBERS and not job.watch(0.1):
            pass
        _cut(net, job, [event for event in events if event["kind"] == "cut"], seconds)
        disturbed = reached(home)
        part = home / "target.part"
        part.write_text(str(disturbed + MORE))
        os.replace(part, home / "target")
        results = list(job.wait(grace + 300))[1:]
        steps = reached(home)
    ends = [end for one in results for end in one["ends"]]
    return {
        "kind": "faults", "seed": seed, "seconds": seconds, "method": method,
        "events": {kind: sum(event["kind"] == kind for event in events) for kind in ("kill", "freeze", "cut")},
        "steps_while_disturbed": disturbed, "steps": steps, "lives": sum(one["lives"] for one in results),
        "hangs": sum(one["hang"] is not None for one in results), "ends": ends,
        "tracebacks": sum(end.startswith("TRACEBACK") for end in ends),
        "where": [one["hang"] for one in results if one["hang"]],
    }  # fmt: skip


def _cut(net: Network, job: Any, events: list[dict[str, Any]], seconds: float) -> None:
    """Cut and restore links at their times, until `seconds` have passed; a link may be cut twice at once."""
    began = time.monotonic()
    turns = [(event["at"], event["rank"], 1) for event in events]
    turns += [(event["at"] + event["lasts"], event["rank"], -1) for event in events]
    cut = [0] * (MEMBERS + 1)
    for at, rank, change in sorted(turns):
        job.watch(max(0.0, began + at - time.monotonic()))
        cut[rank] += change
        (net.link_down if cut[rank] else net.link_up)(rank)
    job.watch(max(0.0, began + seconds - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--grace", type=float, default=60)
    parser.add_argument("--method", default="max", help="a preset, or local")
    options = parser.parse_args()
    print(json.dumps(measure(options.seed, options.seconds, options.grace, options.method)), flush=True)


if __name__ == "__main__":
    main()
