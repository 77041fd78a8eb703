"""The tables of docs/papers.md's AQ-SGD section, from the rows that aqsgd.py wrote."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from aqsgd_tasks import TASKS, WIRES

from thinwire.planner.schedule import generate
from thinwire.planner.simulate import simulate
from thinwire.planner.step import Hop, Send, Step, Work
from thinwire.quantities import half_interval

Rows = list[dict[str, Any]]
RATES = {"100 Mb/s": 1e8, "500 Mb/s": 5e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10}
STAGES, MICROBATCHES = 4, 4
FORWARD, BACKWARD = 0.008, 0.016  # seconds of a stage and micro-batch: four ranks that share a card, SmolLM2-135M
HEADERS = 1514 / 1448  # of a full packet's bytes to its data's


def tables(rows: Rows) -> str:
    """Markdown: per task the rates that were tried, and every wire beside fp32."""
    by_task: dict[str, Rows] = defaultdict(list)
    for row in rows:
        by_task[row["task"]].append(row)
    return "\n\n".join(
        part
        for task, own in by_task.items()
        for part in (f"### {task}", _rates(own), _wires(own), _times(own), _to_same_loss(own))
        if part
    )


def _rates(rows: Rows) -> str:
    tried = {row["rate"]: row["held_out"][-1] for row in rows if row["wire"] == "fp32" and row["seed"] == 0}
    found = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(tried.items()))
    some = rows[0]
    return (
        f"{some['samples']} samples, {some['held_out_samples']} held out, {some['steps']} steps, "
        f"{some['epoch']} per epoch. fp32, seed 0, by rate: {found}. Start {some['held_out'][0]:.4f}."
    )


def _wires(rows: Rows) -> str:
    best = best_rate(rows)
    runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row["rate"] == best:
            runs[row["wire"]][row["seed"]] = row
    plain = runs["fp32"]
    epochs = range(1, len(rows[0]["held_out"]))
    scored, measured = "accuracy" in rows[0], all(row.get("peak") for row in rows)
    head = ["wire", "seeds", *(f"epoch {n}" for n in epochs), "over fp32, %, ± 95 %", "within 0.5 %",
            *(["accuracy, %", "Matthews"] if scored else []), "MB per step, first epoch", "after it",
            *(["peak memory, GB"] if measured else [])]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for wire in [name for name in WIRES if name in runs]:
        seeds = runs[wire]
        paired = [seed for seed in seeds if seed in plain]
        over = [100 * (seeds[s]["held_out"][-1] / plain[s]["held_out"][-1] - 1) for s in paired]
        means = [f"{statistics.fmean(seeds[s]['held_out'][n] for s in paired):.4f}" for n in epochs]
        scores = [f"{100 * _mean(seeds, paired, 'accuracy'):.2f}", f"{_mean(seeds, paired, 'matthews'):.3f}"]
        verdict = ["", ""] if wire == "fp32" else [interval(over), within(over)]
        cells = [*(scores if scored else []), *_bytes(seeds[paired[0]])]
        cells += [f"{seeds[paired[0]]['peak'] / 1e9:.2f}"] if measured else []
        lines.append([wire, str(len(paired)), *means, *verdict, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best_rate(rows: Rows) -> float:
    """fp32's of seed 0."""
    tried = [row for row in rows if row["wire"] == "fp32" and row["seed"] == 0] or rows
    return float(min(tried, key=lambda row: row["held_out"][-1])["rate"])


def _mean(seeds: dict[int, dict[str, Any]], paired: Sequence[int], key: str) -> float:
    return statistics.fmean(seeds[s].get(key, [0.0])[-1] for s in paired)


def _bytes(row: dict[str, Any]) -> list[str]:
    """MB per step over all boundaries, and between copies of a tied embedding: in the first epoch, and later."""
    return [f"{sum(per_step(row, later).values()) / 1e6:.2f}" for later in (False, True)]


def per_step(row: dict[str, Any], later: bool) -> dict[str, float]:
    """Bytes of a step by kind of traffic: in the first epoch, or after it."""
    before, after = (row["bytes"][1], row["bytes"][-1]) if later else row["bytes"][:2]
    steps = row["steps"] - row["epoch"] if later else row["epoch"]
    return {kind: (after[kind] - before[kind]) / max(1, steps) for kind in after}


def seconds(sent: dict[str, float], rate: float, dp: int = 1) -> float:
    """A simulated 1F1B step on links of `rate` bit/s without latency. sent: bytes per step, over all boundaries of all
    replicas. Gradients between replicas leave after the step, all stages' at the same time."""
    per_message = 8 * HEADERS / (rate * (STAGES - 1) * MICROBATCHES * dp)
    between = sent.get("gradient", 0) / (STAGES * dp) * 8 * HEADERS / rate

    def hop(send: Send) -> Hop:
        return Hop(wire=sent[str(send.traffic)] * per_message)

    copies = Hop(wire=sent["embedding"] / 2 / dp * 8 * HEADERS / rate)  # all send at the same time
    work = Work.even(STAGES, FORWARD, BACKWARD)
    step = Step(generate("1F1B", STAGES, MICROBATCHES, None), work, hop, embedding=copies, embedding_fused=True)
    return simulate(step).makespan + between


def _times(rows: Rows) -> str:
    """Of a language model: seconds to the end of training, by rate."""
    if not rows[0]["task"].startswith("wikitext"):
        return ""
    dp = TASKS[rows[0]["task"]].dp
    best = best_rate(rows)
    first = {row["wire"]: row for row in rows if row["seed"] == 0 and row["rate"] == best}
    lines = [["wire", *(f"{name}: s per step, later" for name in RATES), *(f"{name}: whole run" for name in RATES)]]
    lines.append(["---"] * len(lines[0]))
    for wire in [name for name in WIRES if name in first]:
        row = first[wire]
        steps = row["epoch"], row["steps"] - row["epoch"]
        each = {
            name: [seconds(per_step(row, later), rate, dp) for later in (False, True)] for name, rate in RATES.items()
        }
        whole = [sum(count * one for count, one in zip(steps, pair)) for pair in each.values()]
        lines.append([wire, *(f"{pair[1]:.2f}" for pair in each.values()), *(f"{total:.0f}" for total in whole)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _to_same_loss(rows: Rows) -> str:
    """Where losses were taken often enough: steps and simulated seconds to fp32's least loss and 0.5 % more, and to the
    loss that fp32 ends with, by rate; means of the seeds that fp32 and the wire share. "never": not in every seed."""
    best = best_rate(rows)
    rows = [row for row in rows if "curve" in row and row["rate"] == best]
    plain = {row["seed"]: row for row in rows if row["wire"] == "fp32"}
    lines = [["wire", "seeds", "goal", "steps", *RATES]]
    lines.append(["---"] * len(lines[0]))
    goals = {
        "fp32's least + 0.5 %": lambda row: 1.005 * min(loss for _, loss in row["curve"]),
        "fp32's last": lambda row: row["curve"][-1][1],
    }
    for wire in WIRES:
        own = [row for row in rows if row["wire"] == wire and row["seed"] in plain]
        for goal, of in goals.items() if own else ():
            steps = [step for row in own if (step := _first(row, of(plain[row["seed"]]))) is not None]
            cells = ["never"] * (1 + len(RATES))
            if len(steps) == len(own):
                took = [[until(row, step, rate) for row, step in zip(own, steps)] for rate in RATES.values()]
                cells = [f"{statistics.fmean(each):.0f}" for each in (steps, *took)]
            lines.append([wire, str(len(own)), goal, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if plain else ""


def _first(row: dict[str, Any], goal: float) -> int | None:
    """The first evaluation with at most that loss."""
    return next((int(step) for step, loss in row["curve"] if loss <= goal), None)


def until(row: dict[str, Any], step: int, rate: float) -> float:
    """Simulated seconds to that step."""
    first, later = (seconds(per_step(row, one), rate, TASKS[row["task"]].dp) for one in (False, True))
    return min(step, row["epoch"]) * first + max(0, step - row["epoch"]) * later


def interval(values: Sequence[float]) -> str:
    """Mean ± half of the 95 % interval."""
    half = half_interval(values)
    return f"{statistics.fmean(values):+.2f}" + ("" if half is None else f" ± {half:.2f}")


def within(values: Sequence[float], limit: float = 0.5) -> str:
    """Is the mean, or the whole interval, at most `limit` above fp32's? Of one seed nothing is said."""
    mean, half = statistics.fmean(values), half_interval(values)
    if half is None:
        return "?"
    if mean + half <= limit:
        return "yes"
    if mean - half > limit:
        return "no"
    return "on average" if mean <= limit else "not on average"
