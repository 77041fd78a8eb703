"""What `thinwire bench faults` does: the cells in turn, a table, counts, and the exit status."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire.bench.faults.cells import FAULTS, RUNS, Cell, chosen
from thinwire.bench.faults.launch import PRELOAD, RANKS, Launcher
from thinwire.bench.faults.verdict import BAD, GOOD, Verdict
from thinwire.errors import UsageError
from thinwire.lab import Network, check
from thinwire.terminal import progress, table, write_json

Row = tuple[Cell, Verdict]


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench faults` as `args` says; 1 where a cell ended badly."""
    cells = chosen(args.only, args.quick, args.repeat)
    if args.list:
        print("\n".join(cell.name for cell in cells if not cell.turn))
        return 0
    if not check()[0].ok:
        raise UsageError("this machine forbids network namespaces (thinwire doctor says more)")
    rows: list[Row] = []
    for row in judged(cells, args.patience, args.seed):
        rows.append(row)
        write_json(args.json, report(rows, args.patience, args.seed))
    _show(rows, args.patience)
    return int(any(not verdict.good for _, verdict in rows))


def judged(cells: Sequence[Cell], patience: float, seed: int) -> Iterator[Row]:
    """Every cell and its verdict, as they come. patience: seconds that ranks wait for each other. seed: of where faults
    strike.

    TCP in the hosts is more patient than any cell: it is the programs that must give up. And the lab ends no run
    because of a connection that TCP gave up, since it may be one of the cell before."""
    from thinwire.bench.faults.matrix import Matrix  # imports torch

    with (
        tempfile.TemporaryDirectory(prefix="thinwire-faults-") as folder,
        Network(hosts=RANKS, preload=PRELOAD, patience=900.0, end_dead=False) as net,
        progress("faults", len(cells)) as advance,
    ):
        matrix = Matrix(Launcher(net, patience), Path(folder), seed)
        for cell in cells:
            advance(cell.name, 0)
            verdict = matrix.judge(cell)
            advance(f"{cell.name}: {verdict.word}", 1)
            yield cell, verdict


def report(rows: Sequence[Row], patience: float, seed: int) -> dict[str, Any]:
    """Everything that was found, for --json. patience, seed: as the cells were run with."""
    cells = [
        {
            "fault": cell.fault.name,
            "run": cell.run,
            "turn": cell.turn,
            "verdict": verdict.word,
            "seconds": round(verdict.seconds, 2),
            "said": verdict.said,
        }
        for cell, verdict in rows
    ]
    return {"patience": patience, "seed": seed, "counts": counts(rows), "cells": cells}


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many cells ended in each way."""
    found = Counter(verdict.word for _, verdict in rows)
    return {word: found[word] for word in (*GOOD, *BAD) if found[word]}


def _show(rows: Sequence[Row], patience: float) -> None:
    names = [fault.name for fault in FAULTS if any(cell.fault is fault for cell, _ in rows)]
    lines = [(name, *(_cell(rows, name, run) for run in RUNS)) for name in names]
    summary = ", ".join(f"{count} {word}" for word, count in counts(rows).items())
    caption = "seconds from the fault to the end of the last rank; –: means nothing there, or was not asked for"
    number = f"{len(rows)} cell{'s' if len(rows) > 1 else ''}"
    table(f"{number}, patience {patience:g} s: {summary}", ("fault", *RUNS), lines, caption)
    for cell, verdict in rows:
        if not verdict.good:
            print(f"{verdict.word}: {cell.name}: {verdict.said}")


def _cell(rows: Sequence[Row], name: str, run: str) -> str | None:
    """The verdicts of a cell, over its repeats, with the longest time."""
    found = [verdict for cell, verdict in rows if cell.fault.name == name and cell.run == run]
    if not found:
        return None
    words = " or ".join(dict.fromkeys(verdict.word for verdict in found))
    return f"{words}, {max(verdict.seconds for verdict in found):.0f} s"
