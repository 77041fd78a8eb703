"""`thinwire bench scratch --formulas`: runs of several lengths each, whose rate falls to 0 at their own end.

A run whose rate falls must know its end before. So steps are compared at the same loss: dense is trained at several
lengths, and a row's run stands beside the length at which dense ends at the same loss, found in proportion between its
runs (losses against logarithms of lengths).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from typing import Any

from thinwire.bench.scratch.corpus import text
from thinwire.bench.scratch.options import Scratch, planned, read_setup
from thinwire.bench.scratch.rows import DENSE, ROWS, Row, row_of
from thinwire.bench.scratch.seconds import PUBLISHED_RATIO, Yardstick, bytes_per_token, seconds_per_step
from thinwire.quantities import half_interval
from thinwire.terminal import progress, read_json, table, write_json

Job = tuple[Row, Scratch, int, float]
Losses = dict[tuple[float, int], float]  # by length and seed


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench scratch --formulas` as `args` says; the exit status."""
    end = time.monotonic() + args.budget
    setup = read_setup(args)
    document: dict[str, Any] = read_json(args.json) if args.resume else {"setup": asdict(setup), "runs": []}
    for one in document["runs"]:
        one.setdefault("rate", document["setup"]["rate"])  # files of before rows had rates of their own
    done = {_key(one) for one in document["runs"]}
    jobs = [
        (row, replace(setup, rate=rate), seed, length)
        for row, rate, seed, length in planned(args)
        if (row.name, rate, seed, length) not in done
    ]
    if setup.cache and jobs:
        text(setup, 0)  # once, and not in every process
    failed: list[str] = []
    with progress("scratch", sum(round(setup.steps * job[3]) for job in jobs)) as advance:
        context = get_context("spawn")  # a fork could not use a card
        with ProcessPoolExecutor(min(args.parallel, max(len(jobs), 1)), mp_context=context) as pool:
            for future in as_completed([pool.submit(train_one, job, end, args.eager, args.uncompiled) for job in jobs]):
                found = future.result()
                if found is None or "error" in found:
                    failed += [] if found is None else [found["error"]]
                    continue
                advance(f"{found['row']}, seed {found['seed']}: {found['losses'][-1][1]:.4f}", found["done"])
                document["runs"].append(found)
                document["rows"] = summed(document["runs"])
                write_json(args.json, document)
    document["rows"] = summed(document["runs"])
    show(document, setup)
    if args.figure:
        from thinwire.bench.scratch.figure import draw_lengths

        draw_lengths(document, args.figure)
    for error in failed:
        print(error, file=sys.stderr)
    return 1 if failed else 0


def train_one(job: Job, end: float, eager: bool, uncompiled: bool) -> dict[str, Any] | None:
    """A run in a process of its own; None where time is up, `error` where it failed: the others go on.

    end: on the monotonic clock, which processes share. eager, uncompiled: as of Run.
    """
    if time.monotonic() > end:
        return None
    from thinwire.bench.scratch.graph import Run

    row, setup, seed, length = job
    try:
        found = Run(row, setup, seed, length, eager, uncompiled).train(lambda note, steps: None, end)
    except Exception:
        return {"error": f"{row.name}, seed {seed}: {traceback.format_exc()}"}
    finally:
        gc.collect()  # graphs keep their memory until then
    return {"row": row.name, "rate": setup.rate, "seed": seed, "length": length, **found}


def _key(one: dict[str, Any]) -> tuple[str, float, int, float]:
    return one["row"], one["rate"], one["seed"], one["length"]


def at_their_rate(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole runs, of every row those at the rate that is best for it: with the least loss at the shortest length of
    seed 0, and so not chosen by the seeds that are averaged besides."""
    whole = [one for one in runs if one["done"] == one["steps"]]
    best = {}
    for name in {one["row"] for one in whole}:
        mine = [one for one in whole if one["row"] == name and one["seed"] == 0]
        least = min((one["length"] for one in mine), default=None)
        tried = {one["rate"]: one["losses"][-1][1] for one in mine if one["length"] == least}
        best[name] = min(tried, key=lambda rate: tried[rate]) if tried else None
    return [one for one in whole if one["rate"] == best[one["row"]]]


def summed(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per row and length the last loss over dense's in %, by seed; per row steps and T beside dense's at the same loss
    (None: dense was not trained so shortly). Runs that were cut short, and seeds without dense, are left out."""
    whole = at_their_rate(runs)
    dense = {(one["length"], one["seed"]): one["losses"][-1][1] for one in whole if one["row"] == DENSE}
    seeds = [seed for length, seed in dense if length == 1]
    size = Yardstick()
    out = []
    for row in map(row_of, dict.fromkeys(one["row"] for one in whole)):
        mine = [one for one in whole if one["row"] == row.name and one["seed"] in seeds]
        if not mine:
            continue
        last = {(one["length"], one["seed"]): one["losses"][-1][1] for one in mine}
        percent = {
            str(length): {str(of): 100 * (loss / dense[1, of] - 1) for (at, of), loss in last.items() if at == length}
            for length in sorted({length for length, _ in last})
        }
        steps = {str(seed): _steps(last, dense, seed) for _, seed in last}
        found = [one for one in steps.values() if one is not None]
        ratio = statistics.fmean(found) if len(found) == len(steps) else None
        seconds = seconds_per_step(row, size)
        share = seconds / seconds_per_step(ROWS[DENSE], size)
        out.append({
            "row": row.name, "rate": mine[0]["rate"], "bytes_per_token": bytes_per_token(row, size), "seconds": seconds,
            "percent": percent, "steps": steps, "steps_ratio": ratio,
            "time_ratio": None if ratio is None else ratio * share, "share": share,
        })  # fmt: skip
    return sorted(out, key=lambda row: -row["bytes_per_token"])


def _steps(last: Losses, dense: Losses, seed: int) -> float | None:
    """A row's steps over those with which dense ends at the same loss; None: dense was not trained so shortly.

    Of the row's runs that one counts which ends nearest to dense's own loss.

    last, dense: losses by length and seed. What lengths dense was not trained for with this seed are seed 0's, by as
    much more as they are at dense's own length.
    """
    length, loss = min(
        ((at, loss) for (at, of), loss in last.items() if of == seed), key=lambda run: abs(run[1] - dense[1, seed])
    )
    shift = dense[1, seed] - dense[1, 0] if (1, 0) in dense else 0.0
    curve = {at: loss + shift for (at, of), loss in dense.items() if of == 0}
    curve |= {at: loss for (at, of), loss in dense.items() if of == seed}
    points = sorted(curve.items())
    if loss <= points[-1][1]:
        return length / points[-1][0]
    for (a, above), (b, below) in itertools.pairwise(points):
        if below < loss <= above:
            return length / (a * (b / a) ** ((above - loss) / (above - below)))
    return None


def shown(percent: Sequence[float]) -> str:
    """A mean, with its 95 % interval where there are seeds enough."""
    about = half_interval(percent)
    return f"{statistics.fmean(percent):+.2f}" + ("" if about is None else f" ± {about:.2f}")


def show(document: dict[str, Any], setup: Scratch) -> None:
    """Print the table."""
    lines = []
    for row in document["rows"]:
        losses = ", ".join(f"×{length}: {shown(list(by.values()))}" for length, by in row["percent"].items())
        seeds = max(len(percent) for percent in row["percent"].values())
        missed = row["steps_ratio"] is None
        lines.append((
            row["row"], f"{row['rate']:g}", seeds, round(row["bytes_per_token"]), f"{row['seconds']:.1f}", losses,
            "" if missed else f"{row['steps_ratio']:.2f}", "" if missed else f"{row['time_ratio']:.3f}",
        ))  # fmt: skip
    sizes = ("row", "rate", "seeds", "B per token", "s per step")
    columns = (*sizes, "last loss over dense's, %", "steps / dense, same loss", "T / T dense")
    model = f"{setup.stages} stages of one layer, width {setup.width}, {setup.steps} steps of {setup.tokens} tokens"
    caption = (
        "bytes and seconds of the yardstick's step (width 1024, 524,288 tokens, 200 Mb/s, 50 ms); ×: times dense's "
        f"steps; steps / dense: beside a dense run that ends at the same loss; published: T / T dense = "
        f"{PUBLISHED_RATIO:.2f}"
    )
    table(f"From scratch, without messages: {model}", columns, lines, caption)
