"""What the runs of oktopk.py say: tables with paired 95 % intervals, and the price against the length of a schedule."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oktopk_methods import METHODS
from oktopk_tasks import TASKS

from thinwire.quantities import half_interval

Row = dict[str, Any]
TITLES = {
    "vgg": "VGG-16, CIFAR-10, SGD", "llama": "Llama-class, Python source, AdamW", "an4": "two-layer LSTM, AN4, Adam",
    "an4-sgd": "two-layer LSTM, AN4, SGD", "an4-small": "two-layer LSTM of 256, AN4, Adam",
    "an4-small-sgd": "two-layer LSTM of 256, AN4, SGD",
}  # fmt: skip
SHOWN = {"error": "test error, %", "letters": "letter errors, %", "words": "word errors, %"}
BEGIN, END = "<!-- oktopk.py writes from here -->", "<!-- to here -->"
CLOSE = 0.5  # "similar to dense": percent of the loss, or points of the first error
QUARTERS = (0.05, 0.25, 0.5, 0.75, 0.95)  # of a run, at which counts are shown


def differences(rows: Sequence[Row], dense: Sequence[Row], name: str) -> list[float]:
    """To dense, of the seeds that both have: of the loss in percent, of errors in points."""
    exact = {row["seed"]: row[name] for row in dense if name in row}
    both = [(row[name], exact[row["seed"]]) for row in rows if name in row and row["seed"] in exact]
    return [100 * (a / b - 1) if name == "loss" else a - b for a, b in both]


def paired(values: Sequence[float]) -> str:
    """The mean ± half its 95 % interval."""
    if not values:
        return ""
    spread = half_interval(values)
    return f"{statistics.fmean(values):+.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def verdict(values: Sequence[float]) -> str:
    """Is it within CLOSE of dense: surely, on average, surely not, or not on average? Of one seed nothing is said."""
    spread = half_interval(values)
    if spread is None:
        return "?"
    mean = statistics.fmean(values)
    if mean <= CLOSE:
        return "yes" if mean + spread <= CLOSE else "on average"
    return "no" if mean - spread > CLOSE else "not on average"


def groups(rows: Iterable[Row]) -> dict[tuple[str, int, float, float], dict[str, list[Row]]]:
    """(task, workers, rate, epochs) → method → rows by seed, in the order of tasks and methods."""
    found: dict[tuple[str, int, float, float], dict[str, list[Row]]] = {}
    tasks, methods = list(TASKS), list(METHODS)
    order = sorted(rows, key=lambda r: (tasks.index(r["task"]), r["workers"], -r["rate"], -r["epochs"],
                                        methods.index(r["method"]), r["seed"]))  # fmt: skip
    for row in order:
        place = row["task"], row["workers"], row["rate"], row["epochs"]
        found.setdefault(place, {}).setdefault(row["method"], []).append(row)
    return found


def markdown(rows: Sequence[Row]) -> str:
    """One table per task, workers and rate, of the full schedule; then the price by length, and counts over the run."""
    out = []
    whole = {task for task, _, _, epochs in groups(rows) if epochs == TASKS[task].full}
    for (task, workers, rate, epochs), methods in groups(rows).items():
        if task in whole and epochs != TASKS[task].full:
            continue
        dense, steps = methods.get("dense", []), max(row["steps"] for found in methods.values() for row in found)
        names = [name for name in SHOWN if any(name in row for found in methods.values() for row in found)]
        scaled = "" if rate == 1 else f", rate × {rate:g}"
        out += ["", f"**{TITLES[task]}**: {workers} workers, {epochs:g} epochs, {steps:,} steps{scaled}", ""]
        heads = ["method", "seeds", "held-out loss", "against dense, %"]
        heads += [head for name in names for head in (SHOWN[name], "against dense, points")]
        heads += [f"within {CLOSE} " + ("points" if names else "%"), "MB per step", "× less", "busiest ÷ mean"]
        out += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for method, found in methods.items():
            others = [] if method == "dense" else dense
            cells = [method, str(len(found)), mean_of(found, "loss", 4), paired(differences(found, others, "loss"))]
            for name in names:
                cells += [mean_of(found, name, 2), paired(differences(found, others, name))]
            cells.append(verdict(differences(found, dense, names[0] if names else "loss")) if others else "")
            sent = statistics.fmean(row["bytes"] for row in found)
            less = f"{dense[0]['bytes'] / sent:.1f}" if dense else ""
            cells += [f"{sent / 1e6:.3f}", less, mean_of(found, "busiest", 3)]
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join([*out, *prices(rows), *counts(rows)])


def prices(rows: Sequence[Row]) -> list[str]:
    """What a method costs by the length of the schedule; in held-out loss as the figure draws it, and in errors."""
    out = ["", "**The price against the number of steps**, four workers", ""]
    out += ["| task, method | steps: held-out loss against dense, % | errors against dense, points |", "|---|---|---|"]
    for task in TASKS:
        for method in METHODS:
            found = points(rows, task, method) if method != "dense" else []
            if len(found) > 1:
                wrong = [point for name in SHOWN for point in points(rows, task, method, name)][: len(found)]
                shown = [" · ".join(f"{steps:,}: {paired(values)}" for steps, values in one) for one in (found, wrong)]
                out.append(f"| {task}, {method} | {shown[0]} | {shown[1]} |")
    return out if len(out) > 5 else []


def points(rows: Sequence[Row], task: str, method: str, name: str = "loss") -> list[tuple[int, list[float]]]:
    """(steps, paired differences) for every length of the schedule, at four workers and the usual rate."""
    found = []
    for (which, workers, rate, _), methods in groups(rows).items():
        if which == task and workers == 4 and rate == 1 and {"dense", method} <= methods.keys():
            values = differences(methods[method], methods["dense"], name)
            if values:
                found.append((methods[method][0]["steps"], values))
    return sorted(found)


def into_page(page: str, table: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"the page lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


def mean_of(rows: Sequence[Row], name: str, digits: int) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{statistics.fmean(values):.{digits}f}" if values else ""


def counts(rows: Sequence[Row]) -> list[str]:
    """Selected and passed entries in k, and both ξ, over the first seed's full runs with counts."""
    out = ["", "**Counts and ξ over the run** (seed 0; at 5, 25, 50, 75 and 95 % of the steps)", ""]
    out += [
        "| task, method, steps | selected per worker, in k | passed, in k | ξ by accumulated gradient | ξ by gradient |"
    ]
    out += ["|---|---|---|---|---|"]
    whole = {row["task"] for row in rows if row["epochs"] == TASKS[row["task"]].full}
    for row in rows:
        shown_length = row["task"] not in whole or row["epochs"] == TASKS[row["task"]].full
        if row["probes"] and (row["seed"], row["workers"], row["rate"]) == (0, 4, 1) and shown_length:
            share = METHODS[row["method"]].collective().density  # type: ignore[attr-defined]
            k = share * row["n"]
            at = [row["probes"][min(len(row["probes"]) - 1, int(q * len(row["probes"])))] for q in QUARTERS]
            shown = [" · ".join(f"{probe[name] / unit:.2f}" for probe in at)
                     for name, unit in (("local", k), ("passed", k), ("xi_acc", 1), ("xi", 1))]  # fmt: skip
            out.append(f"| {row['task']}, {row['method']}, {row['steps']:,} | " + " | ".join(shown) + " |")
    return out


def draw(rows: Sequence[Row], file: Path) -> None:
    """Per task: the price in held-out loss against the number of steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [task for task in TASKS if any(len(points(rows, task, method)) > 1 for method in METHODS)]
    tasks = tasks or [task for task in TASKS if any(row["task"] == task for row in rows)]
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 3.8), squeeze=False, layout="constrained")
    for axis, task in zip(axes[0], tasks):
        for method in METHODS:
            found = points(rows, task, method) if method != "dense" else []
            if found:
                steps, means = [at for at, _ in found], [statistics.fmean(values) for _, values in found]
                spreads = [half_interval(values) or 0.0 for _, values in found]
                axis.errorbar(steps, means, spreads, marker="o", capsize=3, label=method, linewidth=1.2)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("steps of the schedule")
        axis.set_ylabel("held-out loss against dense, %")
        axis.set_title(TITLES[task], fontsize=10)
    lines = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(list(lines.values()), list(lines), loc="outside right center", frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
