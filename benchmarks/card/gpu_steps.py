"""A training step of data parallelism on a card: torch's own ways and every preset, over links of several rates.

    python3 benchmarks/card/gpu_steps.py --out FOLDER [--budget SECONDS] [--ranks 4 ...] [--models gpt2 ...] [--quick]
    python3 benchmarks/card/gpu_steps.py --out FOLDER --table

Models of GPT-2-small's size (sequences of 512) and BERT-base's (128), at random, bfloat16 autocast, AdamW. Ranks share
the card, each on a host of the lab with a shaped link of its own; "computing" is the same step without communication,
all ranks at a time. HSDP is fully_shard with the ranks as replicas, shards of one rank. A cell whose bytes alone take
longer than LONGEST is not run: its row says how long they take. A line of FOLDER/steps.jsonl per cell, written at once;
methods whose cells are there are not run again. --quick: a small model, two ranks, on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_pipeline as links
import gpu_ranks
import gpu_steps_trace
import torch
import torch.distributed as dist
from gpu_steps_ways import MODELS, WAYS, Size, prepare
from torch import Tensor

from thinwire.quantities import parse_rate

RATES = ("unlimited", "1gbit", "100mbit", "10gbit")
LONGEST = 9.0  # seconds that the bytes of a cell may take
AUTO = {"auto, 10 Gbit/s": "10gbit", "auto, no limit": "unlimited"}  # chooses at this rate, and is timed at it
WARM_UP = 16, 4  # steps until it has chosen; others
BATCHES = 16  # different ones: residuals of one gradient again and again would grow as no training's do
TRACED = {  # where one more step is traced
    ("max", "1gbit"), ("max", "unlimited"), ("bf16", "unlimited"), ("torch DDP bf16 hook", "unlimited"),
    ("max, as before", "unlimited"), ("bf16, as before", "unlimited"), ("low rank 4, one unit", "1gbit"),
}  # fmt: skip
LINK = 32 << 20  # bytes of the all-reduce that says what a link carries


class Cell:
    """One way of training on every rank."""

    def __init__(self, way: str, size: Size, device: torch.device) -> None:
        self.device = device
        self.model, self.silent, self.handle = prepare(way, size, device)
        fused = {"fused": True} if device.type == "cuda" else {}
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **fused)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = BATCHES, 2, size.rows, size.length  # tokens, and labels that are no function of them
        self.batches = itertools.cycle(torch.randint(0, size.vocabulary, shape, generator=generator).to(device))

    def loss(self) -> Tensor:
        tokens, labels = next(self.batches)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(tokens)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def step(self, communicate: bool = True) -> None:
        with nullcontext() if communicate else self.silent():
            loss = self.loss()
            loss.backward()
        self.last_loss = loss.detach()
        self.optimiser.step()
        self.optimiser.zero_grad()


def check_loss(cell: Cell) -> None:
    """ValueError, on all ranks, where some rank's loss is NaN or so small that it has no gradient: sparse ways would
    send nothing then."""
    loss = float(cell.last_loss)
    if links.meet(0.0 if loss > 0.1 else 1.0):
        raise ValueError(f"the loss is {loss} here: on some rank it gives no gradient")


def timed(cell: Cell, steps: int, communicate: bool = True) -> tuple[list[float], float]:
    """(seconds of each step, bytes that leave the busiest link per step)."""
    finish = torch.cuda.synchronize if cell.device.type == "cuda" else (lambda: None)
    took, before = [], links.shaped_bytes()
    for _ in range(steps):
        finish()
        links.meet()
        began = time.perf_counter()
        cell.step(communicate)
        finish()
        took.append(links.meet(time.perf_counter() - began))
    return took, links.meet(links.shaped_bytes() - before) / steps


def trace_of(cell: Cell) -> dict[str, Any]:
    """Of rank 0; the others make the step with it."""
    links.meet()
    if dist.get_rank() == 0:
        return gpu_steps_trace.record(cell.step)
    cell.step()
    return {}


def link_row(rate: str, device: torch.device) -> dict[str, Any]:
    """What one link carries in an all-reduce of torch's."""
    x, size = torch.ones(LINK // 4, device=device), dist.get_world_size()
    took = []
    for _ in range(3):
        links.meet()
        began = time.perf_counter()
        dist.all_reduce(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(links.meet(time.perf_counter() - began))
    return {"kind": "link", "rate": rate, "Gbit/s": 2 * (size - 1) / size * LINK * 8 / min(took) / 1e9, "each_s": took}


def rank_main(
    device_name: str, folder: str, model: str, size: Size, out: str, asked: tuple[list[str], list[str], bool],
    seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """asked: the ways, the rates, and whether to measure the links."""
    began = time.monotonic()
    device = gpu_ranks.join(device_name, seconds=120.0)
    asker, rank, shared = links.Asker(folder), dist.get_rank(), {"model": model, "ranks": dist.get_world_size()}

    def write(row: dict[str, Any]) -> None:
        if rank == 0:
            with open(out, "a") as file:
                file.write(json.dumps(shared | row) + "\n")
            print("row " + json.dumps({k: v for k, v in (shared | row).items() if k != "each_s"}), flush=True)

    ways, rates, with_links = asked
    if with_links:
        for rate in ("10gbit", "1gbit"):
            asker.rate(rate)
            write(link_row(rate, device))
    for way in ways:
        if links.meet(time.monotonic() - began) > seconds:
            break
        measure_way(way, size, device, asker, write, rates, began + seconds)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return []


def measure_way(
    way: str, size: Size, device: torch.device, asker: Any, write: Callable[[dict], None], rates: list[str],
    until: float,
) -> None:  # fmt: skip
    start = time.monotonic()
    asker.rate(AUTO.get(way, "unlimited"))
    try:
        cell = Cell(way, size, device)
        timed(cell, WARM_UP[way not in AUTO])
        check_loss(cell)
    except Exception as error:  # the same on all ranks
        write({"kind": "failed", "method": way, "error": f"{type(error).__name__}: {error}"[:300]})
        return
    built, compute = time.monotonic() - start, statistics.median(timed(cell, 3, communicate=False)[0])
    left = 0.0
    for rate in rates:
        bits = parse_rate(rate)
        floor = left * 8 / bits if bits else 0.0
        row = {"kind": "step", "method": way, "rate": rate, "floor_s": floor, "compute_s": compute, "built_s": built}
        if way in AUTO:
            row["compresses"] = not cell.handle.reducer.exact
            if rate != AUTO[way]:
                continue
        if floor > LONGEST or links.meet(time.monotonic()) + 2 * floor + 1 > until:
            write(row | {"step_s": None, "bytes": left})
            continue
        asker.rate(rate)
        took, sent = timed(cell, 1 if floor > 3 else 3 if floor > 0.3 else 5)
        left = sent if rate == "unlimited" else left
        skips = 0 if cell.handle is None else cell.handle.skips
        write(row | {"step_s": statistics.median(took), "each_s": took, "bytes": sent, "skips": skips})
        if (way, rate) in TRACED and device.type == "cuda":
            write({"kind": "trace", "method": way, "rate": rate} | trace_of(cell))


def table(rows: list[dict]) -> str:
    """Markdown: a table per model and number of ranks; seconds, and × the best of torch's own."""
    lines = []
    for model, ranks in dict.fromkeys((r["model"], r["ranks"]) for r in rows if r["kind"] == "step"):
        of = [r for r in rows if (r["model"], r["ranks"], r["kind"]) == (model, ranks, "step")]
        cells = {(r["method"], r["rate"]): r for r in of}
        lines += [
            f"\n{model}, {ranks} ranks\n",
            "| method | MB | computing | none | 10 G | 1 G | 100 M |",
            "|---" * 7 + "|",
        ]
        for way in dict.fromkeys(r["method"] for r in of):
            first = next(r for r in of if r["method"] == way)
            texts = [_cell(cells, way, rate) for rate in ("unlimited", "10gbit", "1gbit", "100mbit")]
            lines.append(f"| {way} | {first['bytes'] / 1e6:.1f} | {first['compute_s']:.3f} | {' | '.join(texts)} |")
    for r in rows:
        if r["kind"] == "trace":
            lines.append(
                f"\ntrace of {r['method']} ({r['model']}, {r['ranks']} ranks, {r['rate']}): {r['step_s']:.3f} s, "
                f"computing {r['computing_s']:.3f}, exchange {r['exchange_s']:.3f}, both at once {r['both_s']:.3f}"
            )
    lines += [
        f"\nlink: {r['rate']} carries {r['Gbit/s']:.2f} Gbit/s ({r['ranks']} ranks)"
        for r in rows
        if r["kind"] == "link"
    ]
    lines += [
        f"failed: {r['method']} ({r['model']}, {r['ranks']}): {r['error']}" for r in rows if r["kind"] == "failed"
    ]
    return "\n".join(lines)


def _cell(cells: dict, way: str, rate: str) -> str:
    row = cells.get((way, rate))
    if row is None:
        return "–"
    if row["step_s"] is None:
        return f"> {row['floor_s']:.0f}" if row["floor_s"] else "–"
    own = [r["step_s"] or r["floor_s"] for (w, at), r in cells.items() if at == rate and w.startswith("torch")]
    own = [seconds for seconds in own if seconds]
    dropped = f", {row['skips']} steps rolled back" if row.get("skips") else ""  # then the seconds mean nothing
    return f"{row['step_s']:.3f}" + (f" ({min(own) / row['step_s']:.2f}×)" if own else "") + dropped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2, 8])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["gpt2", "bert"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = (options.out / "steps.jsonl").resolve()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not options.table:
        device, until = "cpu" if options.quick else "cuda", time.monotonic() + options.budget
        runs = [(ranks, model) for ranks in options.ranks for model in options.models]
        with links.shared_card(device):
            for ranks, model in [(2, "small")] if options.quick else runs:
                left = until - time.monotonic()
                of = [row for row in rows if (row["model"], row["ranks"]) == (model, ranks)]
                done = [row.get("method", row["kind"]) for row in of]
                asked = [way for way in options.ways if way not in done], options.rates, "link" not in done
                if left > 10:
                    links.on_links(rank_main, ranks, device, left, model, MODELS[model], str(path), asked)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
