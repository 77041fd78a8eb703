"""When does lazy error propagation help? Both ends of the boundaries in one process, with the library's lanes.

gradient  at fixed weights, the gradients of everything below the middle boundary: exact, with messages compressed
          alone, with lazy error, with Centered; early and late in training, for several micro-batch sizes and counts.
          Beside it what memory="auto" finds out by itself, the share of the mean activation, and how much the error of
          a message (ν) and the residual (κ) grow
loss      held-out loss of a model of 25 M parameters (gpu_quality.py) after 128 steps: from its 31st step on, and
          fine-tuned; backward messages only, three boundaries, 8 micro-batches of 4 × 256 tokens, three paired seeds

    python benchmarks/card/lazy_error.py --rows out/lazy.jsonl --figure docs/figures/lazy-error.png

needs a card (about five minutes); `--device cpu --quick` tries the script. Rows are appended to the file; --part figure
draws what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.multiprocessing as mp
from gpu_pipeline import shared_card
from gpu_quality import STAGES, Ends, Model, Size, held_out_loss, library, loss_of, pretrain, sources
from lazy_error_figure import draw
from torch import Tensor, nn

from thinwire.codecs import Centered, LowRank, Quantize
from thinwire.config.wire import Link
from thinwire.memory import ErrorFeedback
from thinwire.pipeline.message_choice import Message

CODECS = {"3 bits": Quantize(3), "rank 16": LowRank(16)}
SIZES = {"0.8 M": Size(4, 128, 4, 64), "25 M": Size(8, 512, 8, 256)}
GRID = {  # rows of a micro-batch, micro-batches
    "0.8 M": ((1, 8), (4, 8), (16, 8), (64, 8), (256, 8), (16, 2), (16, 32)),
    "25 M": ((1, 8), (4, 8), (16, 8), (64, 8)),
}
TRAINED = (30, 300, 3000)  # steps before
STEPS, SKIPPED = 16, 4  # measured at fixed weights, of which the first are not counted: residuals grow
RATES = {"early": 6e-4, "fine-tuned": 1e-4}  # falling to zero
SEEDS, UPDATES, MICROBATCHES, ROWS = 3, 128, 8, 4


def links(codec: str) -> dict[str, Link]:
    """By kind. codec: of CODECS, or another rank."""
    inner = CODECS[codec] if codec in CODECS else LowRank(int(codec.removeprefix("rank ")))
    return {
        "alone": Link(inner), "lazy": Link(inner, ErrorFeedback()), "auto": Link(inner, "auto"),
        "centered": Link(Centered(inner)),
    }  # fmt: skip


class Boundary(Ends):
    """Both ends of a boundary's backward messages; activations pass as they are."""

    def __init__(self, link: Link, index: int) -> None:
        super().__init__((link, f"backward {index + 1}→{index}"))
        self.microbatch = 0

    def begin(self, step: int) -> None:
        self.microbatch = 0
        super().begin(step)

    def send(self, a: Tensor, g: Tensor) -> Tensor:
        """ĝ of one micro-batch."""
        part, trial = Message(self.microbatch, None, True), self.lanes[0].trial
        self.microbatch += 1
        if trial is not None:
            trial.note_activation(part.microbatch, 0, a)
        return self.carry(part, g)

    def residual(self) -> float:
        """Its energy."""
        (channel,) = self.lanes[0].coded.values()
        e = channel.state.read("e", f"{self.lanes[0].name}/0")
        return 0.0 if e is None else float(e.square().sum())

    def __call__(self, x: Tensor) -> Tensor:
        return _Backward.apply(x, self)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:  # type: ignore[override]
        ctx.boundary, ctx.x = boundary, x.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.boundary.send(ctx.x, g.contiguous()), None


# --- gradients at fixed weights


def halves(model: Model, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(a with its graph, a as a leaf, loss): cut in the middle."""
    middle = len(model.blocks) // 2
    a = model.bytes(rows[:, :-1]) + model.places.weight[: rows.shape[1] - 1]
    for block in model.blocks[:middle]:
        a = block(a)
    leaf = a.detach().requires_grad_()
    h: Tensor = leaf
    for block in model.blocks[middle:]:
        h = block(h)
    logits = model.out(model.norm(h))
    return a, leaf, nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def measure(model: Model, data: Tensor, rows: int, microbatches: int, codec: str) -> dict[str, Any]:
    boundaries = {name: Boundary(link, 0) for name, link in links(codec).items()}
    below = [*model.blocks[: len(model.blocks) // 2].parameters(), model.bytes.weight, model.places.weight]
    g, exact = torch.Generator().manual_seed(5), []
    errors: dict[str, list[Tensor]] = {name: [] for name in boundaries}
    squares, steps, last = [], [], None
    energy: dict[str, float] = dict.fromkeys(("alone", "lazy", "residual"), 0.0)
    for step in range(STEPS):
        for boundary in boundaries.values():
            boundary.begin(step)
        sums: dict[str, Any] = dict.fromkeys(("exact", *boundaries), 0.0)
        for _ in range(microbatches):
            at = torch.randint(len(data), (rows,), generator=g)
            a, leaf, loss = halves(model, data[at.to(data.device)].long())
            (gradient,) = torch.autograd.grad(loss / microbatches, leaf)
            for name in sums:
                sent = gradient if name == "exact" else boundaries[name].send(leaf.detach(), gradient)
                parts = torch.autograd.grad(a, below, sent, retain_graph=True)
                sums[name] = sums[name] + torch.cat([part.reshape(-1) for part in parts])
                if name in energy and step >= SKIPPED:
                    energy[name] += float((sent - gradient).square().sum())
            energy["residual"] += boundaries["lazy"].residual() if step >= SKIPPED else 0.0
            squares.append(float(leaf.detach().square().sum()))
            if last is not None:
                steps.append(float((leaf.detach() - last).square().sum()))
            last = leaf.detach()
        for boundary in boundaries.values():
            boundary.end()
        if step >= SKIPPED:
            exact.append(sums["exact"])
            for name in boundaries:
                errors[name].append(sums[name] - sums["exact"])
    trial = boundaries["auto"].lanes[0].trial
    assert trial is not None
    return {
        "share": 1 - statistics.fmean(steps) / (2 * statistics.fmean(squares)),
        "nu": energy["lazy"] / energy["alone"],
        "kappa": energy["residual"] / energy["alone"],
        "trial": trial.ratio,
        **{name: errors_of(torch.stack(errors[name]), torch.stack(exact)) for name in boundaries if name != "auto"},
    }


def errors_of(error: Tensor, exact: Tensor) -> dict[str, float]:
    """error, exact: float[steps, weights]. Relative error; its mean over steps, relative to that of the gradient and
    without the part that is noise (product of two halves); what of the gradient is missing; cosine."""

    def common(x: Tensor) -> float:
        return float(x[::2].mean(0) @ x[1::2].mean(0))

    size = float(exact.square().sum())
    return {
        "error": math.sqrt(float(error.square().sum()) / size),
        "bias": math.sqrt(max(common(error), 0.0) / max(common(exact), 1e-30)),
        "missing": -float((error * exact).sum()) / size,
        "cosine": float(nn.functional.cosine_similarity(error + exact, exact).mean()),
    }


def train(model: Model, data: Tensor, steps: range, optimiser: torch.optim.Optimizer) -> None:
    g = torch.Generator().manual_seed(steps.start)
    for step in steps:
        for group in optimiser.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 100)
        optimiser.zero_grad()
        loss_of(model, data[torch.randint(0, len(data), (64,), generator=g).to(data.device)]).backward()
        optimiser.step()


def gradients(device: torch.device, quick: bool, models: list[str]) -> Iterator[dict[str, Any]]:
    sizes = {"tiny": Size(4, 32, 2, 32)} if quick else {name: SIZES[name] for name in models}
    for name, size in sizes.items():
        data = library(size).to(device)
        torch.manual_seed(0)
        model, before = Model(size).to(device), 0
        optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
        for trained in (2,) if quick else TRAINED:
            train(model, data, range(before, trained), optimiser)
            before = trained
            for rows, microbatches in ((2, 2),) if quick else GRID[name]:
                for codec in CODECS:
                    where = {"model": name, "trained": trained, "tokens": rows * size.length}
                    found = measure(model, data, rows, microbatches, codec)
                    yield {"part": "gradient", **where, "microbatches": microbatches, "codec": codec, **found}


# --- losses


def fine_tune(job: tuple[str, str, str, int], size: Size, device: torch.device, folder: str) -> dict[str, Any]:
    when, codec, kind, seed = job
    lib = library(size)
    data, held_out = sources(size) if when == "fine-tuned" else (lib[512:], lib[:512])
    data, held_out, model = data.to(device), held_out.to(device), Model(size).to(device)
    model.load_state_dict(torch.load(f"{folder}/{when}.pt"))
    made = [] if kind == "exact" else [Boundary(links(codec)[kind], i) for i in range(STAGES - 1)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATES[when], betas=(0.9, 0.95))
    g, updates = torch.Generator().manual_seed(100 + seed), UPDATES if size.width > 32 else 2
    for step in range(updates):
        for group in optimiser.param_groups:
            group["lr"] = RATES[when] * (1 - step / updates)
        for boundary in made:
            boundary.begin(step)
        optimiser.zero_grad()
        for at in torch.randint(len(data), (MICROBATCHES * ROWS,), generator=g).to(device).split(ROWS):
            (loss_of(model, data[at], made) / MICROBATCHES).backward()  # type: ignore[arg-type]
        optimiser.step()
        for boundary in made:
            boundary.end()
    trials = [b.lanes[0].trial for b in made]
    return {"part": "loss", "when": when, "codec": codec, "kind": kind, "seed": seed,
            "held_out": held_out_loss(model, held_out), "lazy": [t.lazy for t in trials if t is not None]}  # fmt: skip


def worker(rank: int, ranks: int, jobs: list[Any], size: Size, device: str, folder: str, path: str) -> None:
    gpu_ranks.use_reference_without_numba()
    torch.set_num_threads(1)
    for job in jobs[rank::ranks]:
        keep(fine_tune(job, size, torch.device(device), folder), path)


def losses(device: str, workers: int, quick: bool, path: str) -> None:
    size = Size(4, 32, 2, 32, pretrain=1.0) if quick else SIZES["25 M"]
    kinds = [("", "exact"), *((codec, kind) for codec in CODECS for kind in links(codec))]
    jobs = [(when, codec, kind, seed) for when in RATES for seed in range(SEEDS) for codec, kind in kinds]
    with tempfile.TemporaryDirectory() as folder, shared_card(device):  # which this process must not use itself
        mp.spawn(starts, (size, device, folder), nprocs=1)
        mp.spawn(worker, (workers, jobs[:6] if quick else jobs, size, device, folder, path), nprocs=workers)


def starts(_: int, size: Size, device: str, folder: str) -> None:
    """The weights that the runs start from."""
    data = library(size)[512:].to(device)
    torch.manual_seed(0)
    model = Model(size).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    train(model, data, range(2 if size.width < 64 else TRAINED[0]), optimiser)
    torch.save(model.state_dict(), f"{folder}/early.pt")
    print(pretrain(size, torch.device(device), f"{folder}/fine-tuned.pt"), flush=True)


def keep(row: dict[str, Any], path: str) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    with open(path, "a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "gradient", "loss", "figure"), default="all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="losses at a time")
    parser.add_argument("--rows", default="out/lazy.jsonl", help="(%(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES), help="of part gradient")
    parser.add_argument("--figure", metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="tiny, to try the script")
    args, began = parser.parse_args(), time.monotonic()
    Path(args.rows).parent.mkdir(parents=True, exist_ok=True)
    gpu_ranks.use_reference_without_numba()
    if args.part in ("all", "loss"):
        losses(args.device, args.workers, args.quick, args.rows)
    if args.part in ("all", "gradient"):
        for row in gradients(torch.device(args.device), args.quick, args.models):
            keep(row, args.rows)
    if args.figure:
        draw([json.loads(line) for line in Path(args.rows).read_text().splitlines()], args.figure)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
