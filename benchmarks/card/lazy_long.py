"""Optimus-CC's lazy error over a whole pre-training: thousands of steps, micro-batches of 8,192 tokens.

    python benchmarks/card/lazy_long.py [--steps 3000] [--only "alone,lazy"] [--budget 400] [--quick --device cpu]
    python benchmarks/card/lazy_long.py --out out/lazy --table --figure docs/figures/lazy-long.png

A byte-level GPT of 6.5 M parameters from scratch on Python's library, four stages, gradients of activations in low rank
at the three boundaries: not at all, alone, with lazy error (rank 16, three paired seeds; ranks 4 and 64, one); and in
the epilogue only, as published, with eight micro-batches of 2,048 tokens (one seed). Every 250 steps the authors'
diagnostic at the middle boundary: the means of the error that is carried over and of the difference of activations
between two micro-batches, over their roots of mean squares, and the cosine between the two. All runs with as many
micro-batches are trained at once (lazy_steps.py). Rows are appended to OUT/long.jsonl at their end; what is there is
not run again. OUT/part.jsonl has what a stack had found when it was ended from outside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import gpu_ranks
import torch
from gpu_quality import Size, library
from lazy_steps import Coding, Steps, Training, held_out_losses, stacked
from torch import Tensor

from thinwire.quantities import half_interval

SIZE, QUICK = Size(8, 256, 8, 256), Size(4, 32, 2, 32)
KINDS = ("exact", "alone", "lazy", "epilogue alone", "epilogue lazy")
SEEDS, TOKENS, RATE = 3, 16384, 6e-4  # tokens of a step
MICROBATCHES = {"alone": 2, "epilogue": 8}
EVERY = 250  # steps between diagnostics
HELD_OUT = 512


class Job(NamedTuple):
    codec: str  # such as rank 16; empty: exact
    kind: str
    seed: int

    @property
    def microbatches(self) -> int:
        return MICROBATCHES["epilogue" if self.kind.startswith("epilogue") else "alone"]

    @property
    def coding(self) -> Coding:
        rank = int(self.codec.removeprefix("rank ") or 0)
        return Coding(rank, self.kind.endswith("lazy"), self.kind.startswith("epilogue"))


def plan(codecs: Sequence[str], seeds: int) -> list[Job]:
    """The first codec with all seeds, then the others and the epilogue with one."""
    jobs = [Job(codec, kind, seed) for seed in range(seeds)
            for codec, kind in (("", "exact"), (codecs[0], "alone"), (codecs[0], "lazy"))]  # fmt: skip
    jobs += [Job(codecs[0], kind, 0) for kind in KINDS[3:]]
    return jobs + [Job(codec, kind, 0) for codec in codecs[1:] for kind in KINDS[1:3]]


class Stack:
    """Runs that are trained at once; their rows so far.

    jobs: with equally many micro-batches, those that are coded alike neighbours.
    """

    def __init__(self, jobs: Sequence[Job], size: Size, steps: int, device: str) -> None:
        self.jobs, self.size, self.planned, self.device = jobs, size, steps, device
        self.losses: list[list[tuple[int, float]]] = [[] for _ in jobs]
        self.diagnostics: list[list[dict[str, float]]] = [[] for _ in jobs]

    def train(self, part: Path, deadline: float) -> list[dict[str, Any]]:
        """All rows. part: where they are kept until then. deadline: of time.time(), at which it ends early."""
        began, size, steps = time.perf_counter(), self.size, self.planned
        every = library(size).to(self.device)
        held_out, data = every[:HELD_OUT], every[HELD_OUT:]
        w = stacked(size, [job.seed for job in self.jobs], data.device)
        rows = TOKENS // size.length if size == SIZE else 8
        order = torch.stack([self._order(job.seed, len(data), rows) for job in self.jobs], 1)
        rates = [RATE * min(1.0, (step + 1) / 100) * max(0.05, 1 - step / steps) for step in range(steps)]
        given = Steps(order.to(self.device), torch.tensor(rates))
        microbatches = self.jobs[0].microbatches
        training = Training(w, size, data, given, microbatches, [job.coding for job in self.jobs])
        told = {
            "planned": steps, "tokens": rows * size.length // microbatches, "bytes_of_data": data.numel(),
            "parameters": sum(map(Tensor.numel, w.values())) // len(self.jobs), "stack": len(self.jobs),
        }  # fmt: skip
        for step in range(steps):
            late = step % 50 == 0 and time.time() > deadline
            last = late or step + 1 == steps
            training.step(watched=last or (step + 1) % EVERY == 0)
            if last or (step + 1) % EVERY == 0:
                self._read(step + 1, held_out_losses(w, held_out, size), training)
                told |= {"how": training.how, "seconds": time.perf_counter() - began}
                part.write_text("".join(json.dumps(row) + "\n" for row in self.rows(told)))
            if late:
                break
        return self.rows(told)

    def rows(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {**job._asdict(), "steps": losses[-1][0], "held_out": losses, "diagnostic": diagnostic, **told}
            for job, losses, diagnostic in zip(self.jobs, self.losses, self.diagnostics)
        ]

    def _order(self, seed: int, samples: int, rows: int) -> Tensor:
        g = torch.Generator().manual_seed(100 + seed)
        return torch.stack([torch.randint(samples, (rows,), generator=g) for _ in range(self.planned)])

    def _read(self, step: int, found: list[float], training: Training) -> None:
        for run, loss in enumerate(found):
            self.losses[run].append((step, loss))
            if self.jobs[run].kind == "lazy":
                self.diagnostics[run].append({"step": step, **training.boundaries[1].diagnostic(run)})


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: held-out losses beside exact's, and the diagnostic of the lazy runs."""
    rows = [row for row in rows if row["steps"] == row.get("planned", row["steps"])]
    by = {Job(row["codec"], row["kind"], row["seed"]): row for row in rows}
    exact = {job.seed: row for job, row in by.items() if job.kind == "exact"}
    points = [at for at, _ in exact[0]["held_out"]] if 0 in exact else []
    shown = points if len(points) < 6 else [points[1], points[3], points[5], points[-1]]
    heads = ["codec", "kind", "seeds", *(f"loss at step {at:,}" for at in shown), "over exact at the end, %, ± 95 %"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    kinds = dict.fromkeys((job.codec, job.kind) for job in sorted(by, key=lambda j: (KINDS.index(j.kind), j.codec)))
    for codec, kind in kinds:
        own = {job.seed: row for job, row in by.items() if job[:2] == (codec, kind) and job.seed in exact}
        if not own:
            continue
        curves = [dict(map(tuple, row["held_out"])) for row in own.values()]
        means = [f"{statistics.fmean(curve[at] for curve in curves):.4f}" for at in shown]
        over = [100 * (row["held_out"][-1][1] / exact[seed]["held_out"][-1][1] - 1) for seed, row in own.items()]
        half = half_interval(over)
        price = f"{statistics.fmean(over):+.2f}" + (f" ± {half:.2f}" if half is not None else "")
        lines.append(f"| {codec} | {kind} | {len(own)} | {' | '.join(means)} | {'' if kind == 'exact' else price} |")
    return "\n".join([*lines, *diagnostics(rows)])


def diagnostics(rows: list[dict[str, Any]]) -> list[str]:
    """By codec: the least and the largest of each reading, over all steps and seeds."""
    out = []
    for codec in dict.fromkeys(row["codec"] for row in rows if row["kind"] == "lazy"):
        notes = [one for row in rows if (row["codec"], row["kind"]) == (codec, "lazy") for one in row["diagnostic"]]
        spans = {key: (min(n[key] for n in notes), max(n[key] for n in notes)) for key in notes[0] if key != "step"}
        said = "; ".join(f"{key.replace('_', ' ')} {a:+.4f} to {b:+.4f}" for key, (a, b) in spans.items())
        out.append(f"Diagnostic, {codec}, {len(notes)} readings: {said}")
    return ["", *out] if out else []


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """What a kind costs over exact against the step, mean of its seeds; and the diagnostic's cosine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (prices, cosines) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    longest = sorted(rows, key=lambda row: row["steps"])
    rows = [*{(row["codec"], row["kind"], row["seed"]): row for row in longest}.values()]
    exact = {row["seed"]: dict(map(tuple, row["held_out"])) for row in rows if row["kind"] == "exact"}
    for codec, kind in dict.fromkeys((row["codec"], row["kind"]) for row in rows if row["kind"] != "exact"):
        own = [row for row in rows if (row["codec"], row["kind"]) == (codec, kind) and row["seed"] in exact]
        steps = [at for at, _ in own[0]["held_out"] if at in exact[own[0]["seed"]]]  # a run that was cut off has others
        losses = [dict(map(tuple, row["held_out"])) for row in own]
        curves = [[100 * (at[n] / exact[row["seed"]][n] - 1) for n in steps] for row, at in zip(own, losses)]
        style = "--" if kind.endswith("lazy") else ":" if kind.startswith("epilogue") else "-"
        name = f"{codec}, {kind}" + (f" ({len(own)} seeds)" if len(own) > 1 else "")
        line = prices.plot(steps, [statistics.fmean(at) for at in zip(*curves)], style, label=name)[0]
        if own[0]["diagnostic"]:
            read_at = [[(one["step"], one["cosine"]) for one in row["diagnostic"]] for row in own]
            means = [statistics.fmean(value for _, value in at) for at in zip(*read_at)]
            cosines.plot([at for at, _ in read_at[0]], means, color=line.get_color(), label=codec)
    prices.set(xlabel="step", ylabel="held-out loss over exact, %", title="Gradients of activations in low rank")
    cosines.set(xlabel="step", ylabel="cosine", title="Error carried over, and change of activations")
    for axis in (prices, cosines):
        axis.axhline(0, color="black", linewidth=0.8)
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2)
    figure.savefig(path, dpi=110)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def run_all(args: argparse.Namespace, path: Path, began: float) -> None:
    size, steps, seeds = (QUICK, 4, 2) if args.quick else (SIZE, args.steps, args.seeds)
    done = {(row["codec"], row["kind"], row["seed"], row["steps"]) for row in read(path)}
    kinds = args.only.split(",") if args.only else KINDS
    rest = [job for job in plan(args.codecs.split(","), seeds) if (*job, steps) not in done and job.kind in kinds]
    rest.sort(key=lambda job: (job.microbatches, KINDS.index(job.kind), job.codec))
    gpu_ranks.use_reference_without_numba()
    torch.set_num_threads(1)
    for _, same in groupby(rest, key=lambda job: job.microbatches):
        if time.time() > began + args.budget:
            break
        stack, part = Stack(list(same), size, steps, args.device), path.with_name("part.jsonl")
        rows = stack.train(part, began + args.budget)
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        part.unlink()
        for row in rows:
            print(row["codec"], row["kind"], row["seed"], row["held_out"][-1], row["how"], f"{row['seconds']:.1f} s")
    print(f"{time.time() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/lazy")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--codecs", default="rank 16,rank 4,rank 64", help="the first has all seeds and the epilogue")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help=f"these kinds of {', '.join(KINDS)}")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which runs end early")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", metavar="PATH", help="draw what is there; runs nothing")
    parser.add_argument("--quick", action="store_true")
    args, began = parser.parse_args(), time.time()
    path = Path(args.out) / "long.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (args.table or args.figure):
        run_all(args, path, began)
    if args.figure:
        draw(read(path), args.figure)
    print(table(read(path)))


if __name__ == "__main__":
    main()
