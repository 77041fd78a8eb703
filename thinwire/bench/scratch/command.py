"""What `thinwire bench scratch` does: dense first, then every row up to dense's loss; a table, JSON and a figure."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any

from thinwire.bench.scratch.options import Scratch, chosen, read_setup
from thinwire.bench.scratch.ranks import measure
from thinwire.bench.scratch.rows import DENSE, ROWS, Row, row_of
from thinwire.bench.scratch.seconds import PUBLISHED_RATIO, Yardstick, bytes_per_token, seconds_per_step
from thinwire.bench.scratch.training import steps_to, train
from thinwire.quantities import half_interval
from thinwire.terminal import progress, read_json, table, write_json

Run = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench scratch` as `args` says; the exit status."""
    if args.formulas:
        from thinwire.bench.scratch.lengths import run as run_formulas

        return run_formulas(args)
    began = time.monotonic()
    setup, rows = read_setup(args), chosen(args)
    seeds = range(args.seeds or (1 if args.quick else 3))
    document: dict[str, Any] = read_json(args.json) if args.resume else {"setup": asdict(setup), "runs": [], "lab": []}
    for batch in (rows[:1], rows[1:]):  # dense first: the others stop at its loss
        wanted = [(row, seed) for seed in seeds for row in batch if not _done(document["runs"], row, seed)]
        for one in trained(wanted, setup, document["runs"], args.parallel, args.budget - (time.monotonic() - began)):
            document["runs"].append(one)
            document["rows"] = summed(document["runs"])
            write_json(args.json, document)
    document["rows"] = summed(document["runs"])
    if args.lab:
        document["lab"] = [measure(row, setup, args.lab) for row in rows]
    write_json(args.json, document)
    show(document, setup)
    if args.figure:
        from thinwire.bench.scratch.figure import draw

        draw(document, args.figure)
    return 0


def trained(
    wanted: Sequence[tuple[Row, int]], setup: Scratch, done: Sequence[Run], parallel: int, budget: float
) -> Iterator[Run]:
    """Every wanted row and seed, as they come; `parallel` at a time, none begun after `budget` seconds.

    done: runs so far, dense's among them.
    """
    end = time.monotonic() + budget
    jobs = [(row, setup, seed, None if row.name == DENSE else _target(done, seed)) for row, seed in wanted]
    total = sum(int(setup.steps * (1 if row.name == DENSE else setup.most)) for row, _ in wanted)
    with progress("scratch", total) as advance:
        if parallel == 1:
            yield from (train(*job, advance) for job in jobs if time.monotonic() < end)
            return
        context = multiprocessing.get_context("spawn")  # a fork could not use a card
        with ProcessPoolExecutor(parallel, mp_context=context) as pool:
            for one in as_completed([pool.submit(_one, job, end) for job in jobs]):
                if (found := one.result()) is not None:
                    last = found["losses"][-1]
                    advance(f"{found['row']}, seed {found['seed']}, step {last[0]}: {last[1]:.4f}", last[0])
                    yield found


def _one(job: tuple[Row, Scratch, int, float | None], end: float) -> Run | None:
    """A run in a process of its own; None where time is up. end: on the monotonic clock, which processes share."""
    return train(*job, lambda note, steps: None) if time.monotonic() < end else None


def _done(runs: Sequence[Run], row: Row, seed: int) -> bool:
    return any(one["row"] == row.name and one["seed"] == seed for one in runs)


def _target(runs: Sequence[Run], seed: int) -> float:
    """Dense's last held-out loss with that seed."""
    dense = next(one for one in runs if one["row"] == DENSE and one["seed"] == seed)
    return float(dense["losses"][-1][1])


def summed(runs: Sequence[Run]) -> list[Run]:
    """Per row, over the seeds it shares with dense: steps beside dense's, seconds of the yardstick's step, T beside T
    of dense; losses at dense's last step. None: not reached."""
    size = Yardstick()
    dense = {one["seed"]: one for one in runs if one["row"] == DENSE}
    base = seconds_per_step(ROWS[DENSE], size)
    out = []
    for row in map(row_of, dict.fromkeys(one["row"] for one in runs)):
        mine = [one for one in runs if one["row"] == row.name]
        steps, losses = [], []
        for one in mine:
            last, target = dense[one["seed"]]["losses"][-1]
            reached = steps_to(one["losses"], target)
            steps.append(None if reached is None else reached / last)
            there = dict(map(tuple, one["losses"])).get(last)
            losses.append(None if there is None else 100 * (there / target - 1))
        seconds = seconds_per_step(row, size)
        found = [one for one in steps if one is not None]
        ratio = statistics.fmean(found) if len(found) == len(steps) else None
        out.append({
            "row": row.name, "seeds": len(mine), "bytes_per_token": bytes_per_token(row, size), "seconds": seconds,
            "steps": steps, "loss_percent": losses, "steps_ratio": ratio,
            "time_ratio": None if ratio is None else ratio * seconds / base,
            "most": max(one["losses"][-1][0] for one in mine),
        })  # fmt: skip
    return out


def show(document: dict[str, Any], setup: Scratch) -> None:
    """Print the tables."""
    lines = []
    for row in document["rows"]:
        losses = [one for one in row["loss_percent"] if one is not None]
        about = half_interval(losses)
        loss = f"{statistics.fmean(losses):+.2f}" + ("" if about is None else f" ± {about:.2f}") if losses else None
        steps = row["steps_ratio"]
        lines.append((
            row["row"], row["seeds"], round(row["bytes_per_token"]), f"{row['seconds']:.1f}", loss,
            f"> {row['most'] / setup.steps:.2f}" if steps is None else f"{steps:.2f}",
            f"> {row['most'] / setup.steps * row['seconds'] / 100.475:.2f}" if steps is None
            else f"{row['time_ratio']:.3f}",
        ))  # fmt: skip
    columns = ("row", "seeds", "B per token", "s per step", "loss at dense's steps, %", "steps / dense", "T / T dense")
    model = f"{setup.stages} stages of one layer, width {setup.width}, {setup.steps} steps of {setup.tokens} tokens"
    caption = (
        f"bytes and seconds of the yardstick's step (width 1024, 524,288 tokens, 200 Mb/s, 50 ms); steps and losses of "
        f"this model; >: dense's loss was not reached; published: a fixed subspace, T / T dense = {PUBLISHED_RATIO:.2f}"
    )
    table(f"From scratch: {model}", columns, lines, caption)
    opened = [one for one in document["runs"] if "opened" in one]
    if opened:
        rows = [(one["row"], one["seed"], one["losses"][-1][1], *(loss for _, loss in one["opened"])) for one in opened]
        heads = [f"opened, {step} steps" for step, _ in opened[0]["opened"]]
        table("Held-out loss without the boundaries", ("row", "seed", "with them", *heads), rows)
    if document["lab"]:
        shown = [(one["row"], one["sent"], one["seconds"]) for one in document["lab"]]
        table("On real links of 200 Mb/s and 50 ms, this size", ("row", "bytes sent per step", "s per step"), shown)
