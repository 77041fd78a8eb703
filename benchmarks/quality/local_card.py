"""LocalSteps on a card over NCCL: the same bits after a kill, host memory, and seconds of a round. About a minute.

    python benchmarks/quality/local_card.py --out out             # two ranks that share the first card
    python benchmarks/quality/local_card.py --quick --out out     # CPU, Gloo

1. `straight`: two ranks, every preset, some rounds; also with anchors and outer state in host memory, over Gloo; and
   the seconds of one round (coding and exchange) on a model of 25 M parameters, median of five
2. `killed`: the same, --kills times: each rank saves after some step, the first time one between sending and applying,
   then a random one, and ends at once with SIGKILL
3. `resumed`: new processes load that, go on, and must have the bits of `straight`

NCCL refuses two ranks on one card unless they claim to be different hosts, which they do here; they then talk over
sockets on this machine, and share the card.
"""

from __future__ import annotations

import argparse
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
import torch.distributed as dist
import torch.multiprocessing as processes
from stacked_model import Size, losses
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinwire.parallel import LocalSteps

TABLES: dict[str, dict[str, Any]] = {
    "diloco": {"preset": "diloco", "every": 4, "delay": 1},
    "streaming-diloco": {"preset": "streaming-diloco", "every": 4, "fragments": 2},
    "sparseloco": {"preset": "sparseloco", "every": 4, "delay": 1},
    "local-max": {"preset": "local-max", "every": 4},
}
RANKS = 2
STEPS, STOP = 12, 8  # after step 8 a round of every table has been sent and not applied
SMALL = Size(width=128, layers=2, length=32)


def stop_after(kill: int, name: str) -> int:
    """The step after which a preset's state is saved, and its processes killed."""
    return STOP if kill == 0 else random.Random(f"{kill} {name}").randrange(1, STEPS)


class Site:
    """A rank: its weights on its device, and LocalSteps."""

    def __init__(self, size: Size, table: dict[str, Any], device: str, **how: Any) -> None:
        first = size.views(size.initial(0)[None])
        self.size, self.device = size, device
        self.parameters = {name: nn.Parameter(w[0].clone().to(device)) for name, w in first.items()}
        self.inner = torch.optim.AdamW(self.parameters.values(), lr=1e-3)
        self.local = LocalSteps(self.parameters.items(), self.inner, table, **how)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        rows = torch.randint(0, 256, (1, 2, self.size.length + 1), generator=generator).to(self.device)
        self.inner.zero_grad()
        losses({name: p[None] for name, p in self.parameters.items()}, rows, self.size).sum().backward()
        self.inner.step()
        self.local.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters.values()]).cpu()


def member(rank: int, part: str, folder: str, backend: str, device: str) -> None:
    """One process of one part."""
    same_bits = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    one_card = {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.update(same_bits | one_card)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet-{part}", rank=rank, world_size=RANKS)
    with sdpa_kernel(SDPBackend.MATH):
        for name, table in TABLES.items():
            _train(name, table, part, Path(folder), device)
            if part == "straight" and device == "cuda":
                _train(name, table, "host", Path(folder), device)
        if part == "straight":
            _seconds(Path(folder), device)
    dist.barrier()
    if part.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def _train(name: str, table: dict[str, Any], part: str, folder: Path, device: str) -> None:
    site = Site(SMALL, table, device, host=part == "host")
    kind, _, kill = part.partition("-")
    file = folder / f"{kill}-{name}-{dist.get_rank()}.pt"
    if kind == "resumed":
        site.local.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    for number in range(site.local.steps, stop_after(int(kill), name) if kind == "killed" else STEPS):
        site.step(number)
    if kind == "killed":
        torch.save(site.local.state_dict(), file)
        return
    site.local.finish()
    torch.save(site.weights(), folder / f"{part}-{name}-{dist.get_rank()}.pt")
    site.local.close()


def _seconds(folder: Path, device: str) -> None:
    """Of a round, from sending to having the mean."""
    size, found = Size() if device != "cpu" else SMALL, {}
    for name, table in TABLES.items():
        site = Site(size, {**table, "fragments": 1, "delay": 0, "every": 1, "mix": "carry"}, device)
        taken = []
        for _ in range(7):
            if device != "cpu":
                torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            site.local.step()
            if device != "cpu":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        found[name] = {"seconds": statistics.median(taken[2:]), "sent": site.local.summary().sent // 7}
        site.local.close()
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(found))


def start(parts: list[str], folder: str, backend: str, device: str) -> None:
    """Both ranks of every part, side by side, until all have ended."""
    contexts = {part: processes.spawn(member, (part, folder, backend, device), RANKS, join=False) for part in parts}
    for part, context in contexts.items():
        try:
            while not context.join():
                pass
        except processes.ProcessExitedException:
            if not part.startswith("killed"):
                raise


def compare(folder: str, part: str) -> dict[str, float]:
    """The largest difference of weights from those of `straight`, by preset; 0 is the same bits."""
    out = {}
    for name in TABLES:
        pairs = [
            [torch.load(Path(folder, f"{which}-{name}-{rank}.pt"), weights_only=True) for which in ("straight", part)]
            for rank in range(RANKS)
        ]
        same = all(torch.equal(a, b) for a, b in pairs)
        out[name] = 0.0 if same else max(float((a - b).abs().max()) for a, b in pairs)
    return out


def trial(backend: str, device: str, kills: int) -> dict[str, Any]:
    """The three parts, and what they came to."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("straight", "killed", "resumed"):
            began = time.perf_counter()
            start([kind] if kind == "straight" else [f"{kind}-{i}" for i in range(kills)], folder, backend, device)
            print(f"{backend}, {kind}: {time.perf_counter() - began:.1f} s", flush=True)
        found = [compare(folder, f"resumed-{i}") for i in range(kills)]
        stops = [{name: stop_after(i, name) for name in TABLES} for i in range(kills)]
        row = {"backend": backend, "device": device, "kills": stops, "resumed": found}
        if device == "cuda":
            row |= {"host": compare(folder, "host"), "card": torch.cuda.get_device_name()}
        return row | {"rounds": json.loads(Path(folder, "seconds.json").read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--quick", action="store_true", help="CPU, Gloo")
    parser.add_argument("--kills", type=int, default=5, help="of both ranks of every preset (default 5)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    backend = ("gloo", "cpu") if options.quick else ("cpu:gloo,cuda:nccl", "cuda")
    row = trial(*backend, options.kills)
    with (options.out / "local-card.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
