"""Cells of the 3D trainer: dp 2 × pp 2, six steps, a checkpoint every second one.

A run that ends in one line is resumed without a fault, and must then come to the losses and weights of the undisturbed
run, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.bench.faults.injury import Injury
from thinwire.bench.faults.launch import RANKS, Launcher
from thinwire.bench.faults.verdict import GOES_ON, NO_WORD, ONE_LINE, ROLLED_BACK, WRONG, Verdict, bad_ending
from thinwire.errors import RunFailed
from thinwire.train.config.sections import TrainConfig, read_config
from thinwire.train.metrics import METRICS, read_events

STEPS, CHECKPOINT_EVERY = 6, 2
DOCUMENT: dict[str, dict[str, Any]] = {
    "model": {"hidden": 32, "layers": 4, "heads": 4},
    "data": {"seq_len": 32, "corpus_bytes": 6000, "samples": 24, "held_out": 0.0, "tokenizer": "bytes"},
    "mesh": {"dp": 2, "pp": RANKS // 2, "microbatches": 2},
    "optim": {"batch": 8, "steps": STEPS, "warmup": 2, "lr": 3e-3},
    "run": {"eval_every": 0, "checkpoint_every": CHECKPOINT_EVERY, "keep": STEPS},
}
Outcome = tuple[list[tuple[int, float]], str]  # (step, loss) of every step, and a digest of the published weights


def configured(out: Path, wire: dict[str, Any], **changed: Any) -> TrainConfig:
    """The run's configuration. out: its folder. wire: its `[wire]`. changed: keys of `[mesh]` that are otherwise."""
    document = {**DOCUMENT, "run": {**DOCUMENT["run"], "out": str(out)}, "mesh": {**DOCUMENT["mesh"], **changed}}
    return read_config({**document, "wire": wire})


def outcome(out: Path) -> Outcome:
    """What a run came to, read from the files it wrote."""
    losses = [(event["step"], event["loss"]) for event in read_events(out / METRICS) if event["kind"] == "step"]
    found = hashlib.blake2b(digest_size=8)
    for file in sorted((out / "model").glob("*.safetensors")):
        found.update(file.read_bytes())
    return losses, found.hexdigest()


def whole_run(launcher: Launcher, folder: Path, wire: dict[str, Any]) -> Outcome:
    """An undisturbed run in a new folder. RunFailed where even that does not end well."""
    from thinwire.bench.faults.loops import train

    config = configured(folder / "out", wire)
    launched = launcher.launch(train, None, folder, config, False)
    wrong = bad_ending(launched.ended, None, launched.seconds)
    if wrong is not None:
        raise RunFailed(f"the undisturbed training failed: {wrong.word}, {wrong.said}")
    return outcome(folder / "out")


def injured_run(
    launcher: Launcher, folder: Path, wire: dict[str, Any], reference: Outcome, injury: Injury, cable: float
) -> Verdict:
    """A run with an injury, resumed where it ended in one line."""
    from thinwire.bench.faults.loops import train

    config = configured(folder / "out", wire)
    launched = launcher.launch(train, injury, folder, config, False, cable=cable)
    killed = injury.rank if injury.kind == "kill" else None
    verdict = bad_ending(launched.ended, killed, launched.seconds)
    if not launched.struck:
        return Verdict(NO_WORD, launched.seconds, "the fault never struck")
    if verdict is None:
        return beside(folder / "out", reference, launched.seconds)
    if verdict.word != ONE_LINE:
        return verdict
    again = launcher.launch(train, None, folder / "again", config, True)
    wrong = bad_ending(again.ended, None, again.seconds)
    if wrong is not None:
        return replace(wrong, said=f"resumed after «{verdict.said}»: {wrong.said}", word=_bad(wrong.word))
    if outcome(folder / "out") != reference:
        return Verdict(WRONG, verdict.seconds, f"resumed after «{verdict.said}», it comes to another result")
    return replace(verdict, said=f"{verdict.said} (resumed: the same bits)")


def beside(out: Path, reference: Outcome, seconds: float) -> Verdict:
    """The verdict on a run that came to its end. One that dropped a step must have counted that."""
    found = outcome(out)
    if found == reference:
        return Verdict(GOES_ON, seconds)
    skips = [event["skips"] for event in read_events(out / METRICS) if event["kind"] == "step"]
    if skips and skips[-1] > 0 and _equal_until_skip(found, reference, skips):
        return Verdict(ROLLED_BACK, seconds, f"step {1 + skips.index(1)} dropped on all ranks")
    return Verdict(WRONG, seconds, "losses or weights differ from the undisturbed run's, and nobody noticed")


def _equal_until_skip(found: Outcome, reference: Outcome, skips: Sequence[int]) -> bool:
    before = skips.index(next(count for count in skips if count))
    return found[0][:before] == reference[0][:before]


def _bad(word: str) -> str:
    """An undisturbed run that ends in one line is no good ending."""
    return NO_WORD if word == ONE_LINE else word
