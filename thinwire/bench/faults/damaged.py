"""Cells of the 3D trainer in which a file of the run's folder is damaged before the run is resumed, and the one in
which two launches want the same folder."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from thinwire.bench.faults.launch import RANKS, Launcher
from thinwire.bench.faults.trainer import DOCUMENT, Outcome, configured, outcome
from thinwire.bench.faults.verdict import GOES_ON, HANG, NO_WORD, ONE_LINE, ROLLED_BACK, TRACEBACK, WRONG, Verdict
from thinwire.errors import RunFailed, UsageError
from thinwire.lab import LabError
from thinwire.train.checkpoint import CHECKPOINTS, whole
from thinwire.train.folder_lock import NAME as LOCK
from thinwire.train.local import train_local
from thinwire.train.metrics import METRICS

LIMIT = 120.0  # seconds for a whole run
DAMAGED = "is damaged and is left out"  # of the line about a checkpoint that is passed over
SPLIT = "split.json"


def flip(file: Path, random: Random) -> None:
    """One bit of a file."""
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def _newest(out: Path) -> Path:
    return whole(out / CHECKPOINTS)[-1]


def _data(out: Path, random: Random) -> None:
    flip(random.choice(sorted(_newest(out).glob("__*"))), random)


def _metadata(out: Path, random: Random) -> None:
    flip(_newest(out) / ".metadata", random)


def _checksums(out: Path, random: Random) -> None:
    flip(random.choice(sorted(_newest(out).glob("checksums-*"))), random)


def _all_checkpoints(out: Path, random: Random) -> None:
    for folder in whole(out / CHECKPOINTS):
        flip(random.choice(sorted(folder.glob("__*"))), random)


def _garbled_metrics(out: Path, random: Random) -> None:
    _replace_line(out / METRICS, b'{"kind": "step", "st')


def _binary_metrics(out: Path, random: Random) -> None:
    _replace_line(out / METRICS, random.randbytes(90).replace(b"\n", b"\xff") + b"\xff")


def _replace_line(file: Path, line: bytes) -> None:
    """The second of the steps that the checkpoint has done."""
    lines = file.read_bytes().splitlines()
    steps = [place for place, one in enumerate(lines) if b'"kind": "step"' in one]
    lines[steps[1]] = line
    file.write_bytes(b"\n".join(lines) + b"\n")


def _split(out: Path, random: Random) -> None:
    (out / SPLIT).write_bytes(b"[0.1, 0.2, 0.\x00")


DAMAGES: dict[str, Callable[[Path, Random], None]] = {
    "checkpoint data": _data,
    "checkpoint .metadata": _metadata,
    "checksums of a checkpoint": _checksums,
    "every checkpoint": _all_checkpoints,
    "metrics.jsonl, a line cut": _garbled_metrics,
    "metrics.jsonl, a binary line": _binary_metrics,
    "split.json": _split,
}


def resumed_after(
    damage: str, launcher: Launcher, whole_run: Path, folder: Path, reference: Outcome, random: Random
) -> Verdict:
    """Resume a copy of a whole run, its last checkpoint removed, after this damage to one of its files."""
    out = folder / "out"
    shutil.copytree(whole_run, out)
    shutil.rmtree(_newest(out))
    shutil.rmtree(out / "model")
    DAMAGES[damage](out, random)
    wire: dict[str, Any] = {"preset": "max"}
    config = configured(out, wire, **({"split": "time"} if damage == SPLIT else {}))
    said, began = io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stderr(said):
            train_local(config, resume=True, network=launcher.net, timeout=LIMIT)
    except (UsageError, RunFailed) as error:
        word = HANG if "was stopped" in str(error) else ONE_LINE
        return Verdict(word, time.monotonic() - began, f"thinwire: {error}")
    except (LabError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines() or [""]
        return Verdict(TRACEBACK, time.monotonic() - began, f"{type(error).__name__}: {lines[0]} … {lines[-1].strip()}")
    return _after(out, reference, said.getvalue(), time.monotonic() - began)


def _after(out: Path, reference: Outcome, said: str, seconds: float) -> Verdict:
    """The verdict on a run that was resumed to its end."""
    losses, weights = outcome(out)
    passed_over = [line for line in said.splitlines() if DAMAGED in line]
    told = passed_over or [line for line in said.splitlines() if METRICS in line]
    if weights != reference[1]:
        return Verdict(WRONG, seconds, "the weights differ from the undisturbed run's, and nobody noticed")
    if losses != reference[0] and not told:
        missing = sorted({step for step, _ in reference[0]} - {step for step, _ in losses})
        return Verdict(WRONG, seconds, f"the weights are right, but of steps {missing} nothing is recorded, unsaid")
    return Verdict(ROLLED_BACK if passed_over else GOES_ON, seconds, told[0] if told else "")


def two_launches(folder: Path, reference: Outcome) -> Verdict:
    """A launch into a folder in which another one trains: the second is told, the first is not disturbed."""
    out, file = folder / "out", folder / "run.toml"
    file.write_text(as_toml(out))
    words = [sys.executable, "-m", "thinwire", "train", str(file), "--local", str(RANKS)]
    began = time.monotonic()
    first = subprocess.Popen(words, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        lock = out / LOCK
        while first.poll() is None and not (lock.exists() and lock.stat().st_size):
            time.sleep(0.02)
        second = subprocess.run(words, env=_environment(), capture_output=True, text=True, timeout=LIMIT)
        refused = time.monotonic() - began
        complaint = first.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        return Verdict(HANG, time.monotonic() - began, "a launch did not end")
    finally:
        first.kill()
        first.wait()
    if first.returncode or outcome(out) != reference:
        return Verdict(WRONG, refused, f"the first launch was disturbed: {complaint.strip()[-200:]}")
    return _told(second, refused)


def broken_configuration(folder: Path, random: Random) -> Verdict:
    """run.toml with some bytes of garbage in it."""
    file = folder / "run.toml"
    content = as_toml(folder / "out").encode()
    place = random.randrange(len(content))
    file.write_bytes(content[:place] + b"\x00\xfe[[" + content[place:])
    words = [sys.executable, "-m", "thinwire", "train", str(file), "--local", str(RANKS)]
    began = time.monotonic()
    try:
        done = subprocess.run(words, env=_environment(), capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Verdict(HANG, time.monotonic() - began, "the command did not end")
    return _told(done, time.monotonic() - began)


def _told(done: subprocess.CompletedProcess[str], seconds: float) -> Verdict:
    """The verdict on a command that had to refuse."""
    lines = done.stderr.strip().splitlines()
    if "Traceback" in done.stderr:
        return Verdict(TRACEBACK, seconds, lines[-1])
    if done.returncode == 0:
        return Verdict(WRONG, seconds, "it went on as if all were well")
    if len(lines) != 1:
        return Verdict(NO_WORD, seconds, f"status {done.returncode}, {len(lines)} lines: {done.stderr.strip()[:200]}")
    return Verdict(ONE_LINE, seconds, lines[0])


def as_toml(out: Path) -> str:
    """run.toml of the bench's run. out: its folder."""
    document = {**DOCUMENT, "run": {**DOCUMENT["run"], "out": str(out)}, "wire": {"preset": "max"}}
    sections = []
    for name, table in document.items():
        lines = [f"{key} = {_value(value)}" for key, value in table.items()]
        sections.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _environment() -> dict[str, str]:
    """Ours, in which a child finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
