"""Four members on slow links, each killed and added again at random: what it costs, beside a run that nobody disturbs.

    python benchmarks/data_parallel/elastic.py                       # 500 steps, ten deaths each, 50 Mb/s
    python benchmarks/data_parallel/elastic.py --steps 60 --deaths 1

A model of a million parameters predicts the next byte of this project's documentation. A run ends when as many batches
have counted as four members make in `--steps` steps. Printed, and written to --json: the longest time between two steps
that counted (from the first one with all four on), in how many steps weights differed between members (0 is right), the
held-out loss of both runs, deaths, steps that did not count, and the residuals that were lost with the dead (their norm
beside that of a survivor).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.elastic.require import require_torchft
from thinwire.lab import Network

MEMBERS = 4
PORT = 29610
CONTEXT, BATCH = 32, 64
DOCS = Path(__file__).parents[2] / "docs"


class NextByte(nn.Module):
    """About a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.body = nn.Sequential(nn.Linear(64 * CONTEXT, 400), nn.ReLU(), nn.Linear(400, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding(x).flatten(1))


def text() -> Tensor:
    joined = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")) if path.name != "log.md")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def batch(data: Tensor, g: torch.Generator, size: int = BATCH) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=g)
    windows = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()])
    return windows[:, :-1], windows[:, -1]


def train(folder: Path, options: dict[str, Any], host: str, lighthouse: str, name: str, life: int) -> None:
    """One life of a member."""
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    data = text()
    held_out, data = data[-len(data) // 10 :], data[: -len(data) // 10]
    model = NextByte()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    quorum = tw.elastic.Quorum(
        {"model": model, "optimizer": optimizer}, lighthouse, host=host, name=name, timeout=5, patience=60
    )
    reducer = tw.parallel.Reducer(model.named_parameters(), options["wire"], quorum)
    g = torch.Generator().manual_seed(hash((options["seed"], life, int(name[-1]))) % 2**40)
    notes = (folder / f"{name}.{life}").open("w", buffering=1)
    batches = 0
    while batches < MEMBERS * options["steps"]:
        quorum.begin()
        at = quorum.steps
        x, y = batch(data, g)
        nn.functional.cross_entropy(model(x), y).backward()
        reducer.finish()
        counts = quorum.commit()
        if counts:
            optimizer.step()
        optimizer.zero_grad()
        batches = quorum.manager.batches_committed()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        said = {
            "step": at, "at": time.monotonic(), "counts": counts, "size": reducer.size, "weights": digest[:16],
            "residual": reducer.exchange.residual_norm() if counts else None, "sent": reducer.exchange.sent,
            "healed": quorum.healing.received,
        }  # fmt: skip
        notes.write(json.dumps(said) + "\n")
    x, y = batch(held_out, torch.Generator().manual_seed(0), 4096)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(x), y))
    (folder / "finished").write_text(json.dumps({"loss": loss}))


def keep(folder: str, options: dict[str, Any], addresses: list[str]) -> int:
    """On every host. On the first: the lighthouse. On the others a member, killed and started again; how often."""
    rank, home = int(os.environ["RANK"]), Path(folder)
    require_torchft()
    import torchft  # noqa: F401  (before members are forked)

    if rank == 0:
        with tw.elastic.Lighthouse(addresses[0], PORT, min_members=2, lost_seconds=1.0):
            while not (home / "finished").exists():
                time.sleep(0.1)
            time.sleep(2)
        return 0
    chance = random.Random(1000 * options["seed"] + rank)
    last = options["steps"] - options["steps"] // 10
    deaths = sorted(chance.sample(range(options["steps"] // 10, last), options["deaths"]))
    life = 0
    while True:
        process = os.fork()
        if process == 0:
            train(home, options, addresses[rank], f"http://{addresses[0]}:{PORT}", f"member{rank}", life)
            os._exit(0)
        ended = _watch(home, f"member{rank}.{life}", process, deaths, chance)
        if ended:
            return life
        life += 1


def _watch(home: Path, notes: str, process: int, deaths: list[int], chance: random.Random) -> bool:
    """Until the run has ended (True), or the member was killed at the first of the `deaths`, which is then taken."""
    while True:
        if os.waitpid(process, os.WNOHANG)[0]:
            return True
        if (home / "finished").exists() and not deaths:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                if os.waitpid(process, os.WNOHANG)[0]:
                    return True
                time.sleep(0.05)
        lines = (home / notes).read_text().splitlines() if (home / notes).exists() else []
        done = json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else -1
        if (home / "finished").exists() or (deaths and done >= deaths[0]):
            time.sleep(chance.uniform(0, 0.3))  # anywhere in a step
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            if (home / "finished").exists():
                return True
            deaths.pop(0)
            time.sleep(chance.uniform(0, 2))
            return False
        time.sleep(0.02)


def measure(options: dict[str, Any], rate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Network(hosts=MEMBERS + 1, rate=rate, patience=60) as net:
        addresses = [str(host.address) for host in net.hosts]
        lives = net.run(keep, folder, options, addresses, timeout=3000, echo=False)
        loss = json.loads((Path(folder) / "finished").read_text())["loss"]
        found = {
            path.name: [json.loads(x) for x in path.read_text().splitlines()] for path in Path(folder).glob("m*.*")
        }
    return {"loss": loss, "deaths": sum(lives), **summarise(found)}


def summarise(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    weights: dict[int, set[str]] = {}
    first: dict[int, float] = {}
    lost, kept, failed = [], [], 0
    survivors = {
        max((n for n in found if n.startswith(f"member{i}.")), key=lambda n: int(n.split(".")[1]))
        for i in range(1, MEMBERS + 1)
    }
    for name, lines in found.items():
        failed += sum(not line["counts"] for line in lines)
        counted = [line for line in lines if line["counts"]]
        for line in counted:
            weights.setdefault(line["step"], set()).add(line["weights"])
            first[line["step"]] = min(line["at"], first.get(line["step"], line["at"]))
        norms = [line["residual"] for line in counted if line["residual"] is not None]
        (kept if name in survivors else lost).extend(norms[-1:])
    begun = min(line["step"] for lines in found.values() for line in lines if line["size"] == MEMBERS)
    times = [first[step] for step in sorted(first) if step >= begun]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return {
        "steps": len(first), "seconds": times[-1] - times[0], "longest_pause": max(gaps),
        "median_step": statistics.median(gaps),
        "steps_with_different_weights": sum(len(found) > 1 for found in weights.values()),
        "member_steps_not_counted": failed, "residuals_lost": len(lost),
        "norm_of_lost_residuals": statistics.fmean(lost) if lost else 0.0,
        "norm_of_survivors_residuals": statistics.fmean(kept) if kept else 0.0,
        "sent_by_members": sum(lines[-1]["sent"] for lines in found.values() if lines),
        "state_taken_by_newcomers": sum(lines[-1]["healed"] for lines in found.values() if lines),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--deaths", type=int, default=10, help="of each member")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--wire", default="max", help="a preset; off: without compression")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--undisturbed", action="store_true", help="only the run without deaths")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = {"steps": options.steps, "wire": options.wire, "seed": options.seed}
    results = {}
    for what, deaths in (("undisturbed", 0), ("disturbed", options.deaths))[: 1 if options.undisturbed else 2]:
        results[what] = measure(given | {"deaths": deaths}, options.rate)
        print(what, json.dumps(results[what], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": given, "rate": options.rate, **results}, indent=1))


if __name__ == "__main__":
    main()
