"""Section `pipeline` of gpu.py: a model of GPT2-XL's size in four stages, over links of several rates.

48 layers of width 1600, sequences of 1024, micro-batches of one, 32 a step; weights in bfloat16, what crosses a
boundary in float32. Four NCCL ranks share the card (through its multi-process service, where that is there), each on a
host of the lab with a shaped link of its own. So computing takes about four times as long as on four cards: rates of a
quarter stand beside the full ones. A step is forward, backward and AdamW on samples seen before (warm).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_ranks
import gpu_trace
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire.lab import Network
from thinwire.pipeline.overlap import Transport, run_ahead
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage
from thinwire.quantities import parse_rate

RANKS = 4
PRELOAD = ("torch", "torch.distributed.pipelining", "thinwire.pipeline.pipeline")
BF16 = torch.bfloat16
HEADERS = 66  # bytes before a segment's data: Ethernet 14, IP 20, TCP with time stamps 32


@dataclass(frozen=True)
class Size:
    layers: int = 48
    width: int = 1600
    heads: int = 25
    length: int = 1024
    vocabulary: int = 50257
    microbatches: int = 32


def quantize(bits: int, **more: Any) -> dict[str, Any]:
    return {"codec": "quantize", "bits": bits, **more}


def delta(bits: int, cold: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return quantize(bits, memory={"memory": "delta"} | ({} if cold is None else {"cold": cold}) | more)


WIRES: dict[str, Any] = {
    "fp32, torch": None,
    "fp32": "off",
    "bf16": {"forward": {"codec": "cast", "to": "bf16"}, "backward": {"codec": "cast", "to": "bf16"}},
    "AQ 4/8": {"forward": delta(4, None), "backward": quantize(8)},
    "AQ 3/6": {"forward": delta(3, None), "backward": quantize(6)},
    "ours 3/3": {"forward": delta(3, quantize(8)), "backward": quantize(3)},
    "ours 3/3, torch's order": {"forward": delta(3, quantize(8)), "backward": quantize(3)},
    "ours 3/3, depth 2": {"forward": delta(3, quantize(8)), "backward": quantize(3)},
    "ours 3/3, depth 4": {"forward": delta(3, quantize(8)), "backward": quantize(3)},
    "ours 3/3, codecs in turn": {"forward": delta(3, quantize(8)), "backward": quantize(3)},
    "ours 3/3, host store": {"forward": delta(3, quantize(8), host=True), "backward": quantize(3)},
}
DEPTH = 3  # micro-batches in flight at a stage beyond those at the next, if the name does not say,
SLOW_RATE, SLOW_DEPTH = 125e6, 2  # and at rates from this one down
IN_TURN = ("fp32, torch", "ours 3/3, torch's order")  # torch's own order of sending and computing
ALL, THIN = tuple(WIRES)[:7], ("AQ 4/8", "AQ 3/6", "ours 3/3")
OURS, HOST = THIN[2:], "ours 3/3, host store"
CELLS: list[tuple[str, tuple[str, ...]]] = [  # in order of worth: the last are left out where time is short
    ("unlimited", ALL), ("1gbit", ALL), ("300mbit", ALL[1:]), ("100mbit", (*THIN, "bf16")), ("500mbit", ALL[1:]),
    ("250mbit", ALL[2:6]), ("10gbit", ALL[1:]), ("250mbit", ALL[1:2]),
]  # fmt: skip
REST: list[tuple[str, tuple[str, ...]]] = [  # a second run: rates of a quarter, and what takes long
    ("unlimited", (*ALL[1:6], HOST)), ("300mbit", (HOST,)), ("100mbit", ALL[1:2]), ("25mbit", OURS),
    ("2500mbit", (*ALL[1:3], *OURS)), ("75mbit", THIN[::-1]), ("125mbit", THIN[::-1]),
]  # fmt: skip
DEPTHS = (*OURS, "ours 3/3, depth 2", "ours 3/3, depth 4")
CODECS: list[tuple[str, tuple[str, ...]]] = [
    (rate, (*OURS, "ours 3/3, codecs in turn")) for rate in (*("unlimited", "300mbit") * 2, "1gbit", "unlimited")
]
EACH: list[tuple[str, tuple[str, ...]]] = [  # ours at every rate, and others beside it where they do not take long
    ("unlimited", ALL[1:6]), *((rate, OURS) for rate in ("300mbit", "250mbit", "125mbit", "100mbit", "75mbit")),
    ("1gbit", ALL[1:6]), ("500mbit", THIN), ("25mbit", OURS), ("300mbit", ALL[2:5]), ("500mbit", ALL[2:3]),
    ("10gbit", OURS), ("2500mbit", OURS), ("300mbit", OURS), ("250mbit", OURS),
]  # fmt: skip
JUMBO: list[tuple[str, tuple[str, ...]]] = [
    (rate, OURS) for rate in ("unlimited", "500mbit", "300mbit", "250mbit", "125mbit", "100mbit", "75mbit", "25mbit")
]
FAST: list[tuple[str, tuple[str, ...]]] = [  # rates at which computing counts as much as the wire
    ("unlimited", ALL[1:6]), ("300mbit", OURS), ("1gbit", ALL[1:6]), ("500mbit", THIN), ("10gbit", OURS),
    ("300mbit", ("AQ 4/8", "AQ 3/6")),
]  # fmt: skip
AGAIN: list[tuple[str, tuple[str, ...]]] = [  # a minute: ours at the rates at which computing counts
    ("unlimited", ("bf16", *OURS)), ("300mbit", OURS), ("1gbit", OURS), ("500mbit", OURS), ("10gbit", OURS),
    ("unlimited", OURS), ("300mbit", OURS), ("1gbit", ("bf16",)),
]  # fmt: skip
AHEAD: list[tuple[str, tuple[str, ...]]] = [(rate, DEPTHS) for rate in ("unlimited", "300mbit", "250mbit", "100mbit")]


class Layer(nn.Module):
    """float32[rows, length, width] → the same; computed in bfloat16."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w, self.heads = size.width, size.heads
        self.first, self.second = nn.LayerNorm(w, dtype=BF16), nn.LayerNorm(w, dtype=BF16)
        self.attend, self.merge = nn.Linear(w, 3 * w, dtype=BF16), nn.Linear(w, w, dtype=BF16)
        self.wide, self.narrow = nn.Linear(w, 4 * w, dtype=BF16), nn.Linear(4 * w, w, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.attend(self.first(x.to(BF16))).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x.to(BF16))), approximate="tanh"))


class Embed(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, size.width, dtype=BF16) for n in (size.vocabulary, size.length))

    def forward(self, x: Tensor) -> Tensor:
        return (self.tokens(x) + self.places.weight[: x.shape[1]]).float()


class Head(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width, dtype=BF16)
        self.out = nn.Linear(size.width, size.vocabulary, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.to(BF16)))


def stage_of(size: Size, rank: int, ranks: int, device: torch.device) -> nn.Module:
    torch.manual_seed(rank)
    with device:
        parts: list[nn.Module] = [Embed(size)] if rank == 0 else []
        parts += [Layer(size) for _ in range(size.layers // ranks)]
        parts += [Head(size)] if rank == ranks - 1 else []
    return nn.Sequential(*parts)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class InTurn(Transport):
    """A transport whose codecs run on the computation's stream: only receives are posted beside it."""

    @contextmanager
    def beside(self, given: Sequence[Tensor] = ()) -> Iterator[None]:
        with nullcontext() if given else torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def arrived(self, chunk: int) -> Iterator[None]:
        frames, works = self.posted.pop(chunk)
        for work in works:
            work.wait()
        for frame in frames:
            frame.record_stream(torch.cuda.current_stream())
        yield


class Run:
    """One way of sending, around the stage that all of them share."""

    transports: Any = None  # shared by all runs that overlap: a group of NCCL's takes memory

    def __init__(self, name: str, module: nn.Module, size: Size, device: torch.device) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.first, self.last, self.size, self.pipe, self.name = rank == 0, rank == ranks - 1, size, None, name
        if WIRES[name] is None:
            self.stage: Any = PipelineStage(module, rank, ranks, device)
        else:
            self.stage = CompressedStage(module, rank, ranks, device, wire=WIRES[name])
            overlap = name not in IN_TURN
            self.pipe = Pipeline([self.stage], overlap=overlap and Run.transports is None)
            self.stage.transports = Run.transports if overlap and Run.transports else {}
            if "codecs in turn" in name:
                self.stage.transports = {way: InTurn(r.group, r.peer, r.stream) for way, r in Run.transports.items()}
        self.schedule = Schedule1F1B(self.stage, size.microbatches, loss_fn=loss_of)
        self.set_depth(None)
        g = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, size.vocabulary, (size.microbatches, size.length + 1), generator=g).to(device)
        self.x, self.y = tokens[:, :-1], tokens[:, 1:]

    def set_depth(self, rate: float | None) -> None:
        if self.name not in IN_TURN:
            usual = SLOW_DEPTH if rate and rate <= SLOW_RATE else DEPTH
            run_ahead(self.schedule, int(self.name.partition("depth ")[2] or usual))

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        given, target = (self.x,) if self.first else (), {"target": self.y} if self.last else {}
        if self.pipe is None:
            self.schedule.step(*given, **target)
        else:
            with self.pipe.step(ids=list(range(self.size.microbatches)) if self.first else None):
                self.schedule.step(*given, **target)
            assert not self.pipe.skipped
            Run.transports = Run.transports or self.stage.transports
        optimiser.step()

    def sent(self) -> int:
        """Payload bytes this rank has sent so far; torch's own stage sends float32 both ways."""
        return 0 if self.pipe is None else self.pipe.stats.forward_bytes + self.pipe.stats.backward_bytes


class Asker:
    """A rank's side of changing the links' rates: rank 0 asks the launcher by files, everybody waits."""

    def __init__(self, folder: str) -> None:
        self.folder, self.asked = Path(folder), 0

    def rate(self, rate: str) -> None:
        self.asked += 1
        if dist.get_rank() == 0:
            part = self.folder / "part"
            part.write_text(rate)
            part.rename(self.folder / f"ask-{self.asked}")
            while not (self.folder / f"done-{self.asked}").exists():
                time.sleep(0.005)
        meet()


def meet(value: float = 0.0) -> float:
    """All ranks, by Gloo; the largest value."""
    largest = torch.tensor([value])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def shaped_bytes() -> int:
    """Bytes that have left this host's link so far, as its token bucket counts them: TCP hands over many segments as
    one packet with one header, the interface counts that, the bucket one for every segment."""
    with open("/proc/self/net/dev") as lines:
        fields = next((line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")), ["0"] * 16)
    with open("/proc/self/net/snmp") as lines:
        names, counts = (line.split() for line in lines if line.startswith("Tcp:"))
    tcp = dict(zip(names[1:], map(int, counts[1:])))
    return int(fields[8]) + HEADERS * (tcp["OutSegs"] + tcp["RetransSegs"] - int(fields[9]))


def timed(run: Run, optimiser: torch.optim.Optimizer, steps: int, device: torch.device) -> tuple[float, float]:
    """(seconds, bytes that leave the busiest link) a step."""
    finish = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    finish()
    meet()
    began, before = time.perf_counter(), shaped_bytes()
    for _ in range(steps):
        run.step(optimiser)
    finish()
    took, left = time.perf_counter() - began, shaped_bytes() - before
    return meet(took) / steps, meet(left) / steps


def rank_main(
    device_name: str, folder: str, size: Size, cells: Any, traced: bool, seconds: float
) -> list[dict[str, Any]]:
    began = time.monotonic()
    device = gpu_ranks.join(device_name, seconds=45.0)
    asker, rank = Asker(folder), dist.get_rank()
    module = stage_of(size, rank, dist.get_world_size(), device)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-5, **fused)
    runs, sent, table = {}, {}, []
    for name in dict.fromkeys(name for _, names in cells for name in names):  # cold, then warm, on links without limit
        runs[name] = Run(name, module, size, device)
        took = [timed(runs[name], optimiser, 1, device)[0] for _ in range(2)]
        before = runs[name].sent()
        took.append(timed(runs[name], optimiser, 1, device)[0])
        sent[name] = int(meet(runs[name].sent() - before)) or int(meet(_plain_bytes(size, rank)))
        if rank == 0:
            print(f"warm-up of {name}: {[round(t, 2) for t in took]} s, {sent[name] / 1e6:.1f} MB", flush=True)
    unshaped = {}
    for rate, names in cells:
        asker.rate(rate)
        bits = parse_rate(rate)
        for name in names:
            floor = sent[name] * 8 / bits if bits else 0.0
            guess = max(unshaped.get(name, 1.0), floor) * (1.5 if name not in IN_TURN else 2.5)
            if meet(time.monotonic() - began) + guess > seconds:
                continue
            steps = 3 if guess < 3 else 1
            runs[name].set_depth(bits)
            took, left = timed(runs[name], optimiser, steps, device)
            if rate == "unlimited":
                unshaped[name] = took
            bound, link = (max(unshaped.get(name, 0.0), s) for s in (floor, left * 8 / bits if bits else 0.0))
            row = {
                "rate": rate, "method": name, "step_s": took, "sequences/s": size.microbatches / took,
                "bytes": sent[name], "link_bytes": left, "floor_s": floor, "steps": steps,
                "of_bound": took / bound if bound else None, "of_link_bound": took / link if link else None,
            }  # fmt: skip
            table.append(row)
            if rank == 0:
                print("row " + json.dumps(row), flush=True)
    if device.type == "cuda" and traced:
        ours = runs["ours 3/3"]
        for rate in gpu_trace.RATES:
            asker.rate(rate)
            seen = gpu_trace.record(lambda: ours.step(optimiser), ours.stage.transports, folder, rate)
            table.append({"trace": rate} | seen)
    asker.rate("unlimited")
    return table


def _plain_bytes(size: Size, rank: int) -> float:
    ways = 2 if 0 < rank < dist.get_world_size() - 1 else 1
    return float(ways * size.microbatches * size.length * size.width * 4)


@contextmanager
def shared_card(device: str) -> Iterator[bool]:
    """CUDA's multi-process service, where it is there: kernels of several ranks run at once, not in time slices."""
    control = shutil.which("nvidia-cuda-mps-control") if device == "cuda" else None
    on = control is not None and subprocess.run([control, "-d"]).returncode == 0  # 1: one is running already
    try:
        yield control is not None
    finally:
        if on:
            subprocess.run([control], input="quit\n", text=True)


def on_links(
    function: Callable[..., Any], ranks: int, device: str, seconds: float, *arguments: Any, mtu: int = 1500
) -> Any:
    """function(device, folder, *arguments, seconds) on hosts of the lab, whose links' rates it may ask to change."""
    folder, served = Path(tempfile.mkdtemp()), 0
    with Network(hosts=ranks, mtu=mtu, preload=PRELOAD) as net:
        extra = {
            "CUDA_DEVICE_MAX_CONNECTIONS": str(64 // ranks),  # queues of the card, which all ranks share
            "NCCL_NVLS_ENABLE": "0",
            "PYTHONPATH": os.pathsep.join(gpu_ranks.PATHS),
        }
        job = net.start(function, device, str(folder), *arguments, seconds, env=extra, echo=True)
        while not job.watch(0.02):
            ask = folder / f"ask-{served + 1}"
            if ask.exists():
                served += 1
                for host in net.hosts:
                    net.set_rate(host.name, ask.read_text())
                (folder / f"done-{served}").touch()
            if job.seconds > seconds + 60:
                job.stop()
                break
        return list(job.results())


def measure(
    device: str = "cuda", seconds: float = 300.0, size: Size | None = None, cells: Any = None, mtu: int = 1500
) -> dict[str, Any]:
    size = size or Size()
    with shared_card(device) as shared:
        tables = on_links(rank_main, RANKS, device, seconds, size, cells or CELLS, cells is None, mtu=mtu)
    rows = [row for row in tables[0] if "rate" in row]
    traces = [{"rank": rank} | row for rank, table in enumerate(tables) for row in table if "trace" in row]
    print(f"{'rate':>10} {'method':24}{'s a step':>9}{'seq/s':>8}{'MB':>8}{'× bound':>9}{'on link':>9}{'× bound':>9}")
    for row in rows:
        bound, link = (f"{row[name]:.3f}" if row[name] else "" for name in ("of_bound", "of_link_bound"))
        print(f"{row['rate']:>10} {row['method']:24}{row['step_s']:9.3f}{row['sequences/s']:8.1f}"
              f"{row['bytes'] / 1e6:8.1f}{bound:>9}{row['link_bytes'] / 1e6:9.1f}{link:>9}")  # fmt: skip
    gpu_trace.show(traces)
    return {"multi-process service": shared, "rows": rows, "traces": traces}


if __name__ == "__main__":  # a trial on the CPU
    small = Size(layers=4, width=128, heads=2, length=128, vocabulary=100, microbatches=16)
    measure("cpu", 60.0, small, [("unlimited", ALL), ("100mbit", ALL), ("20mbit", ALL[1:6])])
