"""A newcomer takes a state of weights and moments over a slow link: thinwire's transport beside torchft's own (HTTP).

    python benchmarks/data_parallel/elastic/heal.py [--width 2000] [--rate 50mbit]

The state is that of a model that has trained for `--steps` steps with Adam: what packing gains depends on it. Printed
as one line of JSON: seconds and the bytes that crossed the link, of each, and both computed for 135 million parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from member import NextByte, batch, text

from thinwire.elastic.healing import Healing
from thinwire.elastic.packing import nbytes
from thinwire.elastic.require import require_torchft
from thinwire.lab import Network

LARGE = 135e6  # parameters
PATIENCE = 600.0


def trained(width: int, steps: int) -> dict[str, Any]:
    """A state that is not random."""
    torch.manual_seed(0)
    model = NextByte(width)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data, g = text()[0], torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, y = batch(data, g, 64)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def transport(kind: str, host: str) -> Any:
    if kind == "thinwire":
        return Healing(host, PATIENCE, lambda: 1 << 40)
    require_torchft()
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(timeout=timedelta(seconds=PATIENCE), num_chunks=0)


def exchange(folder: str, kind: str, addresses: list[str], width: int, steps: int) -> dict[str, float]:
    """On the first host a member, on the second a newcomer."""
    torch.set_num_threads(1)
    host = addresses[int(os.environ["RANK"])]
    home, limit = Path(folder), timedelta(seconds=PATIENCE)
    place = home / f"{kind}.json"
    if os.environ["RANK"] == "0":
        state = trained(width, steps)
        one = transport(kind, host)
        began = time.monotonic()
        one.send_checkpoint([1], 7, state, limit)
        ready = time.monotonic() - began
        place.with_suffix(".part").write_text(json.dumps(one.metadata()))
        os.replace(place.with_suffix(".part"), place)
        while not (home / f"{kind}.done").exists():
            time.sleep(0.05)
        one.disallow_checkpoint()
        one.shutdown(wait=False)
        return {"packing_seconds": ready, "state_bytes": nbytes(state), "parameters": nbytes(state["model"]) // 4}
    one = transport(kind, host)
    while not place.exists():
        time.sleep(0.05)
    began = time.monotonic()
    one.recv_checkpoint(0, json.loads(place.read_text()), 7, limit)
    seconds = time.monotonic() - began
    (home / f"{kind}.done").touch()
    one.shutdown(wait=False)
    return {"seconds": seconds}


def measure(kind: str, width: int, steps: int, rate: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Network(hosts=2, rate=rate) as net:
        first, second = net.run(
            exchange, folder, kind, [str(host.address) for host in net.hosts], width, steps, echo=False
        )
        crossed = net.traffic()["host0"].sent
    scale = LARGE / first["parameters"]
    found = first | second | {"bytes": crossed}
    return found | {f"{key}_of_135M": found[key] * scale for key in ("seconds", "bytes", "packing_seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2000, help="of the model: 2000 is 4.6 million parameters")
    parser.add_argument("--steps", type=int, default=60, help="of training before")
    parser.add_argument("--rate", default="50mbit")
    options = parser.parse_args()
    given = (options.width, options.steps, options.rate)
    found = {kind: measure(kind, *given) for kind in ("thinwire", "torchft")}
    print(json.dumps({"kind": "heal", "rate": options.rate, **found}), flush=True)


if __name__ == "__main__":
    main()
