"""`thinwire convex`: the theory of compressed training on problems whose solution is known."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.terminal import progress, table, write_json
from thinwire.theory import experiments, summary
from thinwire.theory.checks import Check, verify
from thinwire.theory.options import PROBLEMS, read_seeds


def run(args: argparse.Namespace) -> int:
    """Run the chosen problems, print their results and checks, draw the figures; 1 where a check failed, else 0."""
    seeds = list(range(read_seeds(args)))
    folder = _folder(args.out)
    write_json(args.json, {})  # so that a path that cannot be written is found before the long work
    tasks = experiments.plan(_chosen(args), seeds, args.quick)
    with progress("convex", len(tasks)) as advance:
        results = experiments.run(tasks, experiments.Results(seeds), advance)
    checks = verify(results)
    rows = summary.rows(results)
    _print(results, rows, checks)
    paths = _draw(results, folder)
    document = {
        "seeds": seeds, "quick": args.quick, "rows": rows, "two_stage": results.two_stage,
        "checks": [vars(check) for check in checks], "figures": paths,
    }  # fmt: skip
    write_json(args.json, document)
    print("\nfigures: " + ", ".join(paths))
    return 0 if all(check.passed for check in checks) else 1


def _chosen(args: argparse.Namespace) -> list[str]:
    """--quick leaves logistic regression out, unless it is chosen by name."""
    if args.problem != "all":
        return [args.problem]
    return [p for p in PROBLEMS if p != "logistic" or not args.quick]


def _folder(path: str) -> Path:
    """The folder of the figures, made before the long work starts."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make --out {folder}: {error.strerror}") from None
    return folder


def _print(results: experiments.Results, rows: list[dict[str, Any]], checks: list[Check]) -> None:
    for figure, traces in results.traces.items():
        cells = [summary.cells(row) for row in rows if row["figure"] == figure]
        runs = [len(trace.error[0]) for trace in traces.values()]
        said = f"{figure}, seeds {', '.join(map(str, results.seeds[: max(runs)]))}"
        said += "" if min(runs) == max(runs) else f"; the plotted step: {results.seeds[0]}"
        table(said, summary.COLUMNS, cells, summary.CAPTION)
    if results.two_stage:
        curves = results.two_stage
        horizons = sorted(next(iter(curves.values())))
        cells = [[name, *(sum(curve[t]) / len(curve[t]) for t in horizons)] for name, curve in curves.items()]
        table("two-stage: mean ‖∇f‖² over T steps", ("activations", *(f"T = {t}" for t in horizons)), cells)
    marks = [[c.claim, c.numbers, "PASS" if c.passed else "FAIL"] for c in checks]
    table("what is asserted", ("claim", "measured, one number per seed", ""), marks)
    if "randk" in results.traces:
        print("\n" + summary.differences(results))


def _draw(results: experiments.Results, folder: Path) -> list[str]:
    from thinwire.theory import figures

    paths = []
    for name, figure in figures.draw(results).items():
        path = folder / f"convex-{name}.png"
        figures.save(figure, path)
        paths.append(str(path))
    return paths
