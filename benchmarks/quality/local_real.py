"""Local steps on a real model: SmolLM2-135M goes on learning from Python source that comes once, on four stacked sites.

    python benchmarks/quality/local_real.py --pack FOLDER … --gguf SmolLM2.gguf --corpus real    # text → tokens
    python benchmarks/quality/local_real.py --gguf SmolLM2.gguf --corpus real                    # GGUF → weights
    python benchmarks/quality/local_real.py --corpus real --out out --grid first --parallel 2 --budget 200
    python benchmarks/quality/local_real.py --quick --device cpu --out out                       # tiny, at random

500 steps of 4 sites × 4 × 256 tokens, bf16 products, float32 weights: 50 rounds at H = 10. Rates of data parallel are
tried first; the other methods take the best one on seed 0, and have equal numbers of trials of their own. Rows go to
OUT/frontier.jsonl, what is there is not made again; local_real_report.py makes the tables.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frontier_jobs import OURS, before
from local_frontier import Row, Runner, done, is_done, parsed
from stacked_llama import TOKENS, WEIGHTS, Llama, keep, pack_tokens
from stacked_run import Job

from thinwire.config.presets import LOCAL_PRESETS

SIZE = Llama(pretrained=True)
HOW: Row = {"steps": 500, "batch": 16, "size": SIZE}
TINY = Llama(width=32, layers=8, heads=2, groups=1, inside=64, vocabulary=256, length=32)
RATES, MORE_RATES = (1e-4, 3e-4, 6e-4), 2
UNIT_MB = 128.0  # fewer launches; a tile and its values are the same in any unit
DENSE: dict[int, Row] = {
    1: {"codec": "scaled_sign", "block": 512}, 2: {"codec": "two_levels", "block": 512},
    4: {"codec": "quantize", "bits": 4, "block": 256, "scale": "mse"},
}  # fmt: skip
EXACT, FOUR, LOCO, STREAMING = "fp32 per step", "4 bits per step", "SparseLoCo", "Streaming DiLoCo"


def job(method: str, every: int, table: Row, lr: float, **rest: Any) -> Job:
    """A run of this benchmark's sizes."""
    given = {"sites": 4, "seed": 0, **HOW, **rest}
    return Job(method, every=every, table=roomy(table), lr=lr, **given)


def roomy(table: Row) -> Row:
    """With larger units."""
    out = deepcopy(table)
    wire = out.get("wire")
    if isinstance(wire, dict):
        wire["gradient"]["unit_mb"] = UNIT_MB
    return out


def exact(lr: float, **rest: Any) -> Job:
    return job(EXACT, 0, {}, lr, **rest)


def plain(every: int, lr: float, **rest: Any) -> Job:
    """LocalSGD."""
    return job("LocalSGD", every, {"wire": "off", "outer_lr": 1.0, "momentum": 0.0, "nesterov": False}, lr, **rest)


def rival(preset: str, every: int, lr: float, outer: float, **rest: Any) -> Job:
    """A published method with another outer rate."""
    names = {"sparseloco": LOCO, "streaming-diloco": STREAMING, "diloco": "DiLoCo"}
    return job(names[preset], every, {**LOCAL_PRESETS[preset], "outer_lr": outer}, lr, **rest)


def mine(every: int, lr: float, name: str = OURS, outer: float = 1.0, rest: Row | None = None, **changed: Any) -> Job:
    """Ours with some of it changed, without a delay; rest: of the job."""
    return job(name, every, before(**{"delay": 0, "lr": outer, **changed}), lr, **(rest or {}))


def best(runner: Runner, jobs: list[Job]) -> Job:
    """Of these the one with the least loss; the first where none was run."""
    rows = done(runner.path)
    found = [(row["held"], i) for i, one in enumerate(jobs) for row in rows if is_done(one, "jobs", [row])]
    return jobs[min(found)[1]] if found else jobs[0]


def two_hops(every: int, lr: float, bits: int = 2, outer: float = 1.0, rest: Row | None = None, **changed: Any) -> Job:
    """Every value in so many bits, in two hops, with error feedback: a fragment every ten steps."""
    wire = {"collective": "two_hop", "codec": DENSE[bits], "exact_dims": 0,
            "memory": {"memory": "error_feedback", "decay": changed.pop("decay", 1.0)}}  # fmt: skip
    momentum = changed.pop("momentum", 0.0)
    table = {"wire": {"gradient": wire}, "fragments": max(1, every // 10), "keep": changed.pop("keep", 1.0),
             "outer_lr": outer, "momentum": momentum, "nesterov": momentum > 0, **changed}  # fmt: skip
    return job(f"ours, {bits} bit{'s' if bits > 1 else ''}", every, table, lr, **(rest or {}))


def loco(lr: float) -> list[Job]:
    """Trials of SparseLoCo at 1,000 times."""
    return [rival("sparseloco", 10, rate, outer) for rate, outer in ((lr, 1.4), (lr, 2.0), (lr, 1.0), (2 * lr, 1.0))]


def dense(lr: float) -> list[Job]:
    """As many of two bits for all values, seldom."""
    return [two_hops(82, rate, outer=outer) for rate, outer in ((lr, 1.4), (lr, 2.0), (lr, 1.0), (2 * lr, 1.0))]


def others(lr: float) -> list[Job]:
    """Of ours, too: the preset, its pick without the outer momentum, and signs."""
    return [mine(10, lr), mine(10, lr, outer=1.4, momentum=0.0), two_hops(36, lr, bits=1, outer=1.4)]


def elsewhere(lr: float) -> list[Job]:
    """Other budgets and methods, one trial each."""
    return [
        rival("streaming-diloco", 30, lr, 0.7), two_hops(21, lr, outer=1.4), rival("sparseloco", 3, lr, 1.4),
        rival("sparseloco", 30, lr, 2.0), rival("streaming-diloco", 250, lr, 0.7), two_hops(7, lr, outer=1.0),
        rival("diloco", 30, lr, 0.7), job("large batch", 10, {}, 2 * lr), mine(30, lr), mine(3, lr),
        job(FOUR, 0, {}, lr),
    ]  # fmt: skip


def rate_of(runner: Runner) -> float:
    """The best rate of data parallel on seed 0; where it is the largest that was tried, its double is tried too."""
    trials = [exact(lr) for lr in RATES]
    runner.run(trials, "jobs")
    while best(runner, trials) == trials[-1] and len(trials) < len(RATES) + MORE_RATES:
        trials.append(exact(2 * trials[-1].lr))
        runner.run(trials[-1:], "jobs")
    return best(runner, trials).lr


def first(runner: Runner) -> None:
    """Seed 0: the rate, trials at 1,000 times; two more seeds of what is best; then other budgets and methods."""
    lr = rate_of(runner)
    print("rate:", lr, flush=True)
    rivals, ours = loco(lr), dense(lr)
    more = others(lr)
    runner.run([ours[0], rivals[0], more[0], plain(10, lr), ours[1], rivals[1]], "jobs")
    runner.run([*ours, *rivals, *more], "jobs")
    found = [exact(lr), best(runner, [*ours, *more]), best(runner, rivals)]
    runner.run([replace(one, seed=seed) for seed in (1, 2) for one in found], "jobs")
    runner.run(elsewhere(lr), "jobs")


def signs(lr: float, every: int = 34, outer: float = 1.0, momentum: float = 0.0, **rest: Any) -> Job:
    """One bit per value, the whole model at once."""
    return two_hops(every, lr, bits=1, outer=outer, rest=rest, fragments=1, momentum=momentum)


def second(runner: Runner) -> None:
    """Signs at 1,000 times and more trials of SparseLoCo; two more seeds of what is best; fifty rounds of signs where
    they come near 1 %; other budgets, methods and texts."""
    lr, loco_at = rate_of(runner), partial(rival, "sparseloco", 10)
    ours = [signs(lr), signs(lr / 2, outer=1.4), signs(lr / 2, momentum=0.5), signs(lr, beta2=0.999)]
    rivals = [loco_at(lr / 2, 2.0), loco_at(lr / 2, 1.4), loco_at(lr, 1.0, beta2=0.999), *loco(lr)]
    plain_ones = [exact(lr, beta2=0.999), exact(2e-4), exact(lr)]
    runner.run([
        ours[0], ours[1], rivals[0], plain_ones[0], ours[2], ours[3], rivals[1], rivals[2], plain_ones[1],
        rival("streaming-diloco", 30, lr, 0.7),
    ], "jobs")  # fmt: skip
    found = [best(runner, some) for some in (plain_ones, ours, rivals)]
    runner.run([replace(one, seed=seed) for seed in (1, 2) for one in found], "jobs")
    mine_, other = found[1], found[2]
    if over(runner, mine_, found[0]) < 1.2:
        longer = {"steps": 1650, "batch": 8}  # half of the tokens per step, and rates that suit it
        runner.run(
            [replace(one, lr=round(one.lr / 2**0.5, 5), **longer, every=min(one.every, 33)) for one in found[:2]],
            "jobs",
        )
    runner.run([
        replace(mine_, every=10), replace(other, every=3), rival("streaming-diloco", 30, lr / 2, 0.7),
        replace(plain(10, mine_.lr), table={**plain(10, lr).table, "outer_lr": 2.0}), replace(mine_, every=100),
        replace(other, every=30), two_hops(82, lr / 2, outer=1.4),
        *[replace(one, apart=True) for one in (mine_, other, found[0])],
        replace(mine_, every=3), replace(other, every=1),
    ], "jobs")  # fmt: skip


def over(runner: Runner, mine_: Job, exact_: Job) -> float:
    """How much worse a run is than another one, in percent; infinite where one is not there."""
    rows = done(runner.path)
    held = [row["held"] for one in (mine_, exact_) for row in rows if is_done(one, "jobs", [row])]
    return 100 * (held[0] / held[1] - 1) if len(held) == 2 else math.inf


GRIDS = {"first": first, "second": second}


def quick(options: argparse.Namespace) -> None:
    """A text of this machine's own library, whose bytes are the tokens."""
    import lzma

    options.corpus = options.out / "quick"
    options.corpus.mkdir(parents=True, exist_ok=True)
    files = [
        f for name in ("json", "email") for f in sorted((Path(sysconfig.get_paths()["stdlib"]) / name).glob("*.py"))
    ]
    body = b"".join(bytes((one, 0)) for f in files for one in f.read_bytes())
    held = 8192
    (options.corpus / TOKENS).write_bytes(lzma.compress(held.to_bytes(8, "little") + body))


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--grid", choices=GRIDS, default="first")
    own.add_argument("--gguf", type=Path)
    given, rest = own.parse_known_args()
    options = parsed(rest)
    if options.pack:
        print("tokens:", *pack_tokens(options.pack, given.gguf, options.corpus / TOKENS, options.limit))
        return
    if given.gguf:
        keep(given.gguf, options.corpus / WEIGHTS, SIZE)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.together = 1
    if options.quick:
        HOW.update(steps=80, size=TINY)
        quick(options)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    runner = Runner(options, options.out / "frontier.jsonl")
    GRIDS[given.grid](runner)
    if runner.failed:
        sys.exit(f"{runner.failed} runs failed")


if __name__ == "__main__":
    main()
