"""Members that come and go: three train, one is killed, another comes later. The lines marked `thinwire`.

pip install 'thinwire[elastic]'
python examples/elastic.py                             # a lighthouse, three members, a death and a newcomer
python examples/elastic.py --lighthouse http://…       # one member of a run, on any machine

A member is a process of its own, without torchrun: it may come and go at any time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

import thinwire as tw  # thinwire


def batch(g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, generator=g)
    return x, torch.sin(2 * x).roll(1, 1)


def train(lighthouse: str, name: str, steps: int, host: str, dies_at: int | None, waits: bool) -> None:
    torch.set_num_threads(1)
    if waits:
        input()  # Python and torch are loaded; now for the sign to join
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": optimizer}  # what a newcomer takes from a member
    quorum = tw.elastic.Quorum(state, lighthouse, host=host, name=name)  # thinwire
    reducer = tw.parallel.Reducer(model.named_parameters(), "max", quorum)  # thinwire
    data = torch.Generator().manual_seed(sum(name.encode()))  # every member has its own
    while quorum.steps < steps:
        quorum.begin()  # thinwire: who is there
        x, y = batch(data)
        nn.functional.mse_loss(model(x), y).backward()
        reducer.finish()  # thinwire: .grad is the mean over those who are there
        if quorum.commit():  # thinwire: does the step count?
            optimizer.step()
        optimizer.zero_grad()
        if quorum.steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)  # a larger model
        if quorum.steps % 20 == 0:
            with torch.no_grad():
                x, y = batch(torch.Generator().manual_seed(99))
                loss = nn.functional.mse_loss(model(x), y)
            print(f"{name}: step {quorum.steps}, {reducer.size} members, held-out {loss:.4f}; {reducer.summary()}")
    quorum.close()  # thinwire
    reducer.close()  # thinwire


def demonstrate(steps: int) -> None:
    """Three members, of which one is killed after a while; then a fourth."""
    with tw.elastic.Lighthouse() as lighthouse:
        command = [sys.executable, __file__, "--steps", str(steps), "--lighthouse", lighthouse.address, "--name"]
        members = [subprocess.Popen([*command, name]) for name in ("anna", "ben")]
        dora = subprocess.Popen([*command, "dora", "--waits"], stdin=subprocess.PIPE, text=True)
        subprocess.run([*command, "carl", "--dies-at", str(steps // 4)], timeout=120, check=False)
        print("carl was killed; dora comes", flush=True)
        dora.communicate("come\n", timeout=120)
        for member in members:
            member.wait(120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lighthouse", help="of a run to take part in; without it all of a run is started here")
    parser.add_argument("--host", default="127.0.0.1", help="this machine's address, by which other members reach it")
    parser.add_argument("--name", default="member", help="shown in logs")
    parser.add_argument("--dies-at", type=int, help="a step after which this member is killed")
    parser.add_argument("--waits", action="store_true", help="join when a line comes on standard input")
    parser.add_argument("--steps", type=int, default=200, help="that count")
    options = parser.parse_args()
    if options.lighthouse:
        train(options.lighthouse, options.name, options.steps, options.host, options.dies_at, options.waits)
    else:
        demonstrate(options.steps)


if __name__ == "__main__":
    main()
