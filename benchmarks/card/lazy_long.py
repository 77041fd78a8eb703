"""Optimus-CC's lazy error over a whole pre-training: thousands of steps, micro-batches of 8,192 tokens, rank 16.

    python benchmarks/card/lazy_long.py [--steps 3000] [--parallel 9] [--budget 120] [--quick --device cpu]
    python benchmarks/card/lazy_long.py --out out/lazy --table

A byte-level GPT of 6.5 M parameters from scratch on Python's library, four stages, gradients of activations coded at
the three boundaries: not at all, alone, with lazy error; three paired seeds. Every 250 steps the authors' diagnostic at
the middle boundary: the means of the error that is carried over and of the difference of activations between two
micro-batches, over their roots of mean squares, and the cosine between the two. Rows are appended to OUT/long.jsonl as
runs end; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
from gpu_pipeline import shared_card
from gpu_quality import STAGES, Model, Size, held_out_loss, library, loss_of
from lazy_error import Boundary, links
from torch import Tensor

from thinwire.memory.deferred import fetch
from thinwire.quantities import half_interval

SIZE, QUICK = Size(8, 256, 8, 256), Size(4, 32, 2, 32)
KINDS = ("exact", "alone", "lazy")
SEEDS, MICROBATCHES, TOKENS, RATE = 3, 2, 8192, 6e-4
EVERY = 250  # steps between diagnostics
HELD_OUT = 512
Job = tuple[str, str, int]  # codec, kind, seed


class Watched(Boundary):
    """A boundary that compares what it carries over with how activations change between micro-batches."""

    watching = False

    def begin(self, step: int) -> None:
        self.last: Tensor | None = None
        super().begin(step)

    def send(self, a: Tensor, g: Tensor) -> Tensor:
        if self.watching:
            self.found = {} if self.last is None else self._compare(a)
            self.last = a
        return super().send(a, g)

    def _compare(self, a: Tensor) -> dict[str, float]:
        (channel,) = self.lanes[0].coded.values()
        e = channel.state.read("e", f"{self.lanes[0].name}/0")
        if e is None or self.last is None:
            return {}
        change, error = (a - self.last).float().flatten(), e.float().flatten()
        return {
            "error_mean": float(error.mean() / error.square().mean().sqrt()),
            "change_mean": float(change.mean() / change.square().mean().sqrt()),
            "cosine": float(torch.nn.functional.cosine_similarity(error, change, dim=0)),
        }


def train(job: Job, size: Size, steps: int, device: str, deadline: float) -> dict[str, Any] | None:
    """One run; None where it is too late to begin."""
    if time.time() > deadline:
        return None
    gpu_ranks.use_reference_without_numba()
    torch.set_num_threads(1)
    codec, kind, seed = job
    began = time.perf_counter()
    every = library(size).to(device)
    held_out, data = every[:HELD_OUT], every[HELD_OUT:]
    torch.manual_seed(seed)
    model = Model(size).to(device)
    made = [] if kind == "exact" else [Watched(links(codec)[kind], i) for i in range(STAGES - 1)]
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=device == "cuda")
    rows, g = max(1, TOKENS // size.length) if size == SIZE else 4, torch.Generator().manual_seed(100 + seed)
    losses, diagnostic = [], []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 100) * max(0.05, 1 - step / steps)
        noted = (step + 1) % EVERY == 0 or step + 1 == steps
        for boundary in made:
            boundary.watching = noted and kind == "lazy"
            boundary.begin(step)
        optimiser.zero_grad()
        for at in torch.randint(len(data), (MICROBATCHES * rows,), generator=g).to(device).split(rows):
            (loss_of(model, data[at], made) / MICROBATCHES).backward()  # type: ignore[arg-type]
        optimiser.step()
        fetch(channel.deferred for boundary in made for lane in boundary.lanes for _, channel in lane.channels())
        for boundary in made:
            boundary.end()
        if noted:
            losses.append((step + 1, held_out_loss(model, held_out)))
            diagnostic += [{"step": step + 1, **made[1].found}] if kind == "lazy" else []
    return {
        "codec": codec, "kind": kind, "seed": seed, "steps": steps, "tokens": rows * size.length, "held_out": losses,
        "diagnostic": diagnostic, "parameters": sum(map(Tensor.numel, model.parameters())),
        "bytes_of_data": data.numel(), "seconds": time.perf_counter() - began,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: held-out losses beside exact's, and the diagnostic of the lazy runs."""
    by = {(row["codec"], row["kind"], row["seed"]): row for row in rows}
    lines = [
        "| codec | kind | seeds | held-out loss, by step | over exact at the end, %, ± 95 % |",
        "|---|---|---|---|---|",
    ]
    exact = {seed: row for (_, kind, seed), row in by.items() if kind == "exact"}
    for codec, kind in dict.fromkeys(key[:2] for key in sorted(by)):
        own = {seed: row for (c, k, seed), row in by.items() if (c, k) == (codec, kind) and seed in exact}
        points = [at for at, _ in next(iter(own.values()))["held_out"]]
        shown = points[-1:] if len(points) < 4 else [points[1], points[len(points) // 2], points[-1]]
        means = [
            f"{at}: {statistics.fmean(dict(map(tuple, row['held_out']))[at] for row in own.values()):.4f}"
            for at in shown
        ]
        over = [100 * (row["held_out"][-1][1] / exact[seed]["held_out"][-1][1] - 1) for seed, row in own.items()]
        half = half_interval(over)
        said = (
            "" if kind == "exact" else f"{statistics.fmean(over):+.2f}" + (f" ± {half:.2f}" if half is not None else "")
        )
        lines.append(f"| {codec} | {kind} | {len(own)} | {', '.join(means)} | {said} |")
    notes = [one for row in rows for one in row["diagnostic"] if "cosine" in one]
    if notes:
        spans = {
            key: (min(n[key] for n in notes), max(n[key] for n in notes))
            for key in ("error_mean", "change_mean", "cosine")
        }
        lines += [
            "",
            f"Diagnostic over {len(notes)} readings: "
            + "; ".join(f"{key.replace('_', ' ')} {a:+.4f} to {b:+.4f}" for key, (a, b) in spans.items()),
        ]
    return "\n".join(lines)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/lazy")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--codecs", default="rank 16", help="such as rank 16,rank 4,3 bits")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parallel", type=int, default=9)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run begins")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args, began = parser.parse_args(), time.time()
    path = Path(args.out) / "long.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not args.table:
        size, steps, seeds = (QUICK, 4, 2) if args.quick else (SIZE, args.steps, args.seeds)
        done = {(row["codec"], row["kind"], row["seed"]) for row in read(path)}
        coded = [(codec, kind) for codec in args.codecs.split(",") for kind in KINDS[1:]]
        jobs = [(codec, kind, s) for s in range(seeds) for codec, kind in [("", "exact"), *coded]]
        context = multiprocessing.get_context("spawn")
        card = shared_card(args.device) if args.device == "cuda" else nullcontext()
        with card, ProcessPoolExecutor(args.parallel, mp_context=context) as pool:
            rest = [job for job in jobs if job not in done]
            made = [pool.submit(train, job, size, steps, args.device, began + args.budget) for job in rest]
            for future in as_completed(made):
                if future.exception() is not None:
                    print(f"a run failed: {future.exception()!r}", flush=True)
                elif (row := future.result()) is not None:
                    with path.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(
                        row["codec"],
                        row["kind"],
                        row["seed"],
                        row["held_out"][-1],
                        f"{row['seconds']:.1f} s",
                        flush=True,
                    )
        print(f"{time.time() - began:.0f} s")
    print(table(read(path)))


if __name__ == "__main__":
    main()
