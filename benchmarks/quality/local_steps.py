"""Held-out loss against bytes per token: per-step wires and local steps, methods × H × sites × seeds.

    python benchmarks/quality/local_steps.py --json out/local.jsonl --figure out/local.png      # the whole grid
    python benchmarks/quality/local_steps.py --quick --json out/quick.jsonl                      # tiny, in minutes
    python benchmarks/quality/local_steps.py --device cuda --width 384 --layers 8 --steps 5000   # on one card

Every site is a process; they exchange over Gloo on this machine, also where they share one card. All methods see equal
tokens and an equal global batch. A site's bytes are max(sent, received), which are the same in these exchanges. The
data are Python's own library, by bytes: whole files are held out. A run is one line of the JSON file, and one that is
there already is not made again. `--different-data` gives each site files of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

import thinwire as tw
from thinwire.parallel import LocalSteps, Reducer

PER_STEP = {"fp32 per step": "off", "4 bits per step": "max", "large batch": "off"}
LOCAL: dict[str, dict[str, Any]] = {
    "LocalSGD": {"wire": "off", "outer_lr": 1.0, "momentum": 0.0, "nesterov": False},
    "DiLoCo": {"preset": "diloco"},
    "Streaming DiLoCo": {"preset": "streaming-diloco"},
    "SparseLoCo": {"preset": "sparseloco"},
    "ours": {"preset": "local-max"},
}
METHODS = [*PER_STEP, *LOCAL]
GRID = [(4, 10), (4, 30), (4, 100), (2, 30), (8, 30)]  # (sites, H)
VOCABULARY = 256


@dataclass(frozen=True)
class Job:
    """One run. `every` is H; 0 for what is averaged after each step."""

    method: str
    sites: int
    every: int
    seed: int
    steps: int
    batch: int  # sequences per step, over all sites
    length: int
    width: int
    layers: int
    lr: float
    outer_lr: float | None
    different_data: bool


class Model(nn.Module):
    """A decoder on bytes."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, job.width), nn.Embedding(job.length, job.width)
        make = nn.TransformerEncoderLayer
        heads, wide = max(1, job.width // 64), 4 * job.width
        self.layers = nn.ModuleList(
            make(job.width, heads, wide, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(job.layers)
        )
        self.norm, self.head = nn.LayerNorm(job.width), nn.Linear(job.width, VOCABULARY, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(job.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(h))


def corpus(limit: int) -> tuple[list[Tensor], Tensor]:
    """(files to train on, held-out bytes): every twentieth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    read = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]
    read = [text for text in read if text.numel() > 2000]
    held = torch.cat(read[::20])[: limit // 10]
    return [text for i, text in enumerate(read) if i % 20], held


def sequences(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    starts = torch.randint(0, text.numel() - length - 1, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rate(job: Job, step: int) -> float:
    """Warm-up over a twentieth, then a cosine to a tenth."""
    warm = max(1, job.steps // 20)
    if step < warm:
        return job.lr * (step + 1) / warm
    return job.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, job.steps - warm)))


def site(rank: int, job: Job, folder: str, device: str) -> None:
    """One process; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=job.sites)
    files, held = corpus(2_000_000)
    texts = files[rank :: job.sites] if job.different_data else files
    text = torch.cat(texts)
    torch.manual_seed(job.seed)
    model = Model(job).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1)
    began = time.perf_counter()
    sent, trained = (_local if job.method in LOCAL else _per_step)(job, model, inner, text, rank, device)
    seconds = time.perf_counter() - began
    with torch.no_grad():
        rows = sequences(held, 64, job.length, 7).to(device)
        loss = torch.stack([loss_of(trained, part) for part in rows.split(8)]).mean()
    if rank == 0:
        tokens = job.steps * job.batch * job.length
        parameters = sum(p.numel() for p in model.parameters())
        found = {"held": float(loss), "bytes": sent, "tokens": tokens, "parameters": parameters, "seconds": seconds}
        per_token = {"bytes_per_token": sent / tokens, "fp32_bytes_per_token": _fp32(job, parameters)}
        row = asdict(job) | found | per_token
        Path(folder, "result.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def _fp32(job: Job, parameters: int) -> float:
    return 8 * parameters * (job.sites - 1) / job.sites / (job.batch * job.length)


def _batch(job: Job, text: Tensor, rank: int, step: int, device: str) -> Tensor:
    seed = (job.seed * 1_000_003 + step) * 64 + rank
    return sequences(text, job.batch // job.sites, job.length, seed).to(device)


def _local(
    job: Job, model: nn.Module, inner: torch.optim.Optimizer, text: Tensor, rank: int, device: str
) -> tuple[int, nn.Module]:
    """(bytes sent, the model at the anchor)."""
    settings = {**LOCAL[job.method], "every": job.every} | ({"outer_lr": job.outer_lr} if job.outer_lr else {})
    local = LocalSteps(model.named_parameters(), inner, settings, host=device != "cpu")
    for step in range(job.steps):
        _step(model, inner, rate(job, step), [_batch(job, text, rank, step, device)])
        inner.step()
        local.step()
    local.finish()
    sent = local.summary().sent
    local.close()
    return sent, model


def _per_step(
    job: Job, model: nn.Module, inner: torch.optim.Optimizer, text: Tensor, rank: int, device: str
) -> tuple[int, nn.Module]:
    """Gradients averaged after each step; "large batch": of `every` batches at once, so that rounds are equal."""
    held = {name: nn.Parameter(p.detach().cpu().clone()) for name, p in model.named_parameters()}
    reducer = Reducer(held.items(), tw.Wire(gradient=tw.Wire.of(PER_STEP[job.method]).gradient))
    together = job.every if job.method == "large batch" else 1
    for first in range(0, job.steps, together):
        steps = range(first, min(job.steps, first + together))
        _step(model, inner, rate(job, first), [_batch(job, text, rank, step, device) for step in steps])
        for name, p in model.named_parameters():
            held[name].grad = p.grad.cpu()
        reducer.finish()
        for name, p in model.named_parameters():
            p.grad.copy_(held[name].grad)
        inner.step()
    sent = reducer.summary().sent
    reducer.close()
    return sent, model


def _step(model: nn.Module, inner: torch.optim.Optimizer, lr: float, batches: list[Tensor]) -> None:
    """Gradients of the mean over the batches, clipped."""
    for group in inner.param_groups:
        group["lr"] = lr
    inner.zero_grad()
    for rows in batches:
        (loss_of(model, rows) / len(batches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def jobs(options: argparse.Namespace) -> list[Job]:
    out = []
    grid = [(2, 5)] if options.quick else GRID
    for seed in range(options.seeds):
        for sites, every in grid:
            for method in options.methods:
                often = 0 if method in ("fp32 per step", "4 bits per step") else every
                job = Job(
                    method, sites, often, seed, options.steps, options.batch, options.length, options.width,
                    options.layers, options.lr, options.outer_lr, options.different_data,
                )  # fmt: skip
                out += [job] if job not in out else []
    return out


def done(path: Path) -> list[dict[str, Any]]:
    """Finished runs; a line that was cut off is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def draw(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for method, mark in zip(METHODS, "sDo^vPX*"):
        mine = sorted((r["bytes_per_token"], r["held"]) for r in rows if r["method"] == method)
        if mine:
            axes.plot(*zip(*mine), marker=mark, label=method)
    axes.set_xscale("log")
    axes.set_xlabel("bytes per token and site")
    axes.set_ylabel("held-out loss")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="out/local-steps.jsonl", help="one line per finished run")
    parser.add_argument("--figure", help="loss against bytes per token")
    parser.add_argument("--quick", action="store_true", help="two sites, H = 5, a tiny model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=1)
    for name, value in (("steps", 5000), ("batch", 64), ("length", 256), ("width", 384), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--outer-lr", type=float, help="instead of each method's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--different-data", action="store_true", help="each site has files of its own")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.batch, options.length, options.width, options.layers = 60, 8, 64, 64, 2
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    for job in jobs(options):
        if any(all(row.get(key) == value for key, value in asdict(job).items()) for row in done(path)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(site, (job, folder, options.device), nprocs=job.sites)
            line = Path(folder, "result.json").read_text()
        with path.open("a") as out:
            out.write(line + "\n")
        row = json.loads(line)
        less = row["fp32_bytes_per_token"] / row["bytes_per_token"]
        print(f"{job.method}, {job.sites} sites, H {job.every}, seed {job.seed}: {row['held']:.4f}, {less:.0f}× fewer")
    if options.figure:
        draw(done(path), options.figure)


if __name__ == "__main__":
    main()
