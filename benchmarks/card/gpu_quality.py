"""Section `quality` of gpu.py: does fine-tuning over compressed boundaries reach the loss of float32?

A byte-level GPT of 25 M parameters is pre-trained on the card on Python's standard library, then fine-tuned on torch's
own sources, in four stages whose three boundaries carry activations and gradients through the library's lanes (both
ends in one process: the loss does not depend on the wire). Forward bits b are sent directly, or as AQ-SGD's change of
the sample; backward 2b bits, as in the paper. Three seeds (order of samples), the same start for all.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
from torch import Tensor, nn

from thinwire.config.wire import Link, Wire
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message

STAGES, SEEDS = 4, 3
WAY = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int = 8
    width: int = 512
    heads: int = 8
    length: int = 256
    rows: int = 32  # of a fine-tuning step
    samples: int = 4096
    held_out: int = 512
    epochs: int = 3
    pretrain: float = 45.0  # seconds
    rate: float = 5e-5  # falls to zero
    every: int = 32  # steps between evaluations


QUICK = Size(samples=1024, epochs=1, pretrain=10.0)


def quantize(bits: int, **more: Any) -> dict[str, Any]:
    return {"codec": "quantize", "bits": bits, **more}


def wires() -> dict[str, Any]:
    cast, cold = {"codec": "cast", "to": "bf16"}, {"memory": "delta", "cold": quantize(8)}
    out: dict[str, Any] = {"fp32": None, "bf16": {"forward": cast, "backward": cast}}
    for bits in (2, 3, 4):
        out[f"direct {bits}/{2 * bits}"] = {"forward": quantize(bits), "backward": quantize(2 * bits)}
        out[f"AQ {bits}/{2 * bits}"] = {"forward": quantize(bits, memory=cold), "backward": quantize(2 * bits)}
    out["ours 3/3"] = {"forward": quantize(3, memory=cold), "backward": quantize(3)}
    return out


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        w, self.heads = size.width, size.heads
        self.first, self.second = nn.LayerNorm(w), nn.LayerNorm(w)
        self.attend, self.merge = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.wide, self.narrow = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.attend(self.first(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.out = nn.LayerNorm(size.width), nn.Linear(size.width, 256, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor, crossings: list[WAY] | None = None) -> Tensor:
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        per = len(self.blocks) // STAGES
        for i, block in enumerate(self.blocks):
            if crossings and i and i % per == 0:
                h = crossings[i // per - 1](h.float())
            h = block(h)
        return self.out(self.norm(h))


class Ends:
    """Lanes whose two ends, send and recv in turn, are in this process."""

    def __init__(self, *ways: tuple[Link | None, str]) -> None:
        self.lanes = [Lane(link, name, end, 0) for link, name in ways for end in ("send", "recv")]

    def begin(self, step: int) -> None:
        for lane in self.lanes:
            lane.begin(step)

    def end(self) -> None:
        for lane in self.lanes:
            lane.resolve_checks()
            assert not lane.faults, lane.faults
            lane.end_step(True)

    def carry(self, part: Message, x: Tensor, way: int = 0) -> Tensor:
        """x as it arrives at the other end."""
        send, recv = self.lanes[2 * way : 2 * way + 2]
        return recv.recv(part, 0, send.send(part, 0, x), tuple(x.shape), x.dtype)


class Crossing(Ends):
    """One boundary, both ends: x to the next stage, its gradient back, through frames."""

    def __init__(self, wire: Wire, index: int) -> None:
        there, back = f"forward {index}→{index + 1}", f"backward {index + 1}→{index}"
        super().__init__((wire.forward, there), (wire.backward, back))
        self.part = Message(0, None, True)  # of the step, set by whoever begins it

    def __call__(self, x: Tensor) -> Tensor:
        return _Cross.apply(x, self)

    @property
    def sent(self) -> int:
        return sum(c.stats.wire_bytes for lane in self.lanes[::2] for _, c in lane.channels())


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing) -> Tensor:  # type: ignore[override]
        ctx.crossing = crossing
        return crossing.carry(crossing.part, x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.crossing.carry(ctx.crossing.part, gradient.contiguous(), 1), None


def text(files: Iterable[Path], size: Size, seed: int) -> Tensor:
    """uint8[windows, length + 1], shuffled."""
    raw = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sorted(files))), dtype=torch.uint8)
    windows = raw[: len(raw) // (size.length + 1) * (size.length + 1)].view(-1, size.length + 1)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]


def library(size: Size) -> Tensor:
    """To pre-train on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return text((f for f in folder.rglob("*.py") if "site-packages" not in str(f)), size, 0)


def sources(size: Size) -> tuple[Tensor, Tensor]:
    """(to fine-tune on, held out)."""
    engine = Path(torch.__file__).parent
    parts = [f for name in ("nn/modules", "optim", "distributions", "fx", "ao") for f in (engine / name).rglob("*.py")]
    after = text(parts, size, 1)
    return after[: size.samples], after[size.samples : size.samples + size.held_out]


def loss_of(model: Model, rows: Tensor, crossings: list[WAY] | None = None) -> Tensor:
    rows = rows.long()
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        logits = model(rows[:, :-1], crossings)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Model, rows: Tensor) -> float:
    return float(torch.stack([loss_of(model, part) for part in rows.split(128)]).mean())


def pretrain(size: Size, device: torch.device, path: str) -> dict[str, float]:
    before, held_out = library(size).to(device), sources(size)[1].to(device)
    torch.manual_seed(0)
    model = Model(size).to(device)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), **fused)
    began, step, g = time.monotonic(), 0, torch.Generator().manual_seed(0)
    while (spent := (time.monotonic() - began) / size.pretrain) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 6e-4 * min(1.0, step / 100) * max(0.05, 1 - spent)
        rows = before[torch.randint(0, len(before), (64,), generator=g).to(device)]
        optimiser.zero_grad()
        loss_of(model, rows).backward()
        optimiser.step()
        step += 1
        if step % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # or the clock runs ahead of the card
    torch.save(model.state_dict(), path)
    return {
        "steps": step,
        "bytes": before.numel(),
        "held_out": held_out_loss(model, held_out),
        "parameters": sum(map(Tensor.numel, model.parameters())),
    }


def finetune(name: str, wire: Any, seed: int, size: Size, device: torch.device, path: str) -> dict[str, Any]:
    """Held-out loss every few steps, and the bytes that one boundary has carried by then."""
    train, held_out = (part.to(device) for part in sources(size))
    model = Model(size).to(device)
    model.load_state_dict(torch.load(path))
    crossings = [] if wire is None else [Crossing(Wire.of(wire), i) for i in range(STAGES - 1)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=size.rate)
    g, step, began = torch.Generator().manual_seed(seed), 0, time.monotonic()
    steps = size.epochs * (len(train) // size.rows)
    losses, sent = [held_out_loss(model, held_out)], [0]
    for _ in range(size.epochs):
        for at in torch.randperm(len(train), generator=g).split(size.rows):
            if len(at) < size.rows:
                continue
            for group in optimiser.param_groups:
                group["lr"] = size.rate * (1 - step / steps)
            step += 1
            for crossing in crossings:
                crossing.begin(step)
                crossing.part = Message(0, tuple(at.tolist()), True)
            optimiser.zero_grad()
            loss_of(model, train[at.to(device)], crossings).backward()  # type: ignore[arg-type]
            optimiser.step()
            for crossing in crossings:
                crossing.end()
            if step % size.every == 0 or step == steps:
                losses.append(held_out_loss(model, held_out))
                sent.append(crossings[0].sent if crossings else 2 * 4 * step * size.rows * size.length * size.width)
    return {
        "method": name,
        "seed": seed,
        "held_out": losses,
        "bytes": sent,
        "steps": step,
        "s": time.monotonic() - began,
    }


def worker(tell: Callable[[Any], None], device_name: str, size: Size, path: str, ranks: int, rank_of: str) -> None:
    import os

    gpu_ranks.use_reference_without_numba()
    device = torch.device(device_name)
    jobs = [(name, wire, seed) for seed in range(SEEDS) for name, wire in wires().items()]
    for name, wire, seed in jobs[int(os.environ[rank_of]) :: ranks]:
        tell(finetune(name, wire, seed, size, device, path))


def measure(device: str = "cuda", seconds: float = 240.0, size: Size | None = None, workers: int = 9) -> dict[str, Any]:
    """Pre-train, then all fine-tunings, `workers` at a time."""
    import tempfile

    from gpu_pipeline import shared_card

    size, path = size or Size(), tempfile.mkdtemp() + "/model.pt"
    began = time.monotonic()
    with shared_card(device):
        start = next(what for _, what in gpu_ranks.launch(_pretrain, 1, device, size, path, seconds=size.pretrain + 60))
        print("pre-trained:", start, flush=True)
        rows = []
        left = seconds - (time.monotonic() - began)
        for _, what in gpu_ranks.launch(worker, workers, device, size, path, workers, "RANK", seconds=left):
            if isinstance(what, gpu_ranks.Failure):
                print("failed:", what[-600:], flush=True)
                continue
            rows.append(what)
            print("row " + json.dumps(what), flush=True)
    for name in wires():
        last = [row["held_out"][-1] for row in rows if row["method"] == name]
        if last:
            print(f"{name:12} {sum(last) / len(last):.4f}  ({', '.join(f'{x:.4f}' for x in last)})")
    return {"pretrained": start, "rows": rows}


def _pretrain(tell: Callable[[Any], None], device: str, size: Size, path: str) -> None:
    tell(pretrain(size, torch.device(device), path))


if __name__ == "__main__":  # a trial on the CPU
    measure("cpu", 110.0, Size(4, 32, 2, 32, 8, 32, 32, 2, 3.0, every=4), workers=2)
