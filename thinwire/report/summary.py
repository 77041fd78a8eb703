"""What runs come to beside each other: the table's numbers, and what makes them hard to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import UsageError
from thinwire.report.runs import Run, number, reached

DATA_KEYS = ("paths", "seq_len", "packing", "held_out", "seed", "corpus_bytes", "samples", "tokenizer")


@dataclass(frozen=True)
class Line:
    """A row of the table; None: not known, or never reached."""

    name: str
    steps: int
    seconds: float | None
    held_out: float | None
    to_loss: float | None  # seconds to `Summary.target`
    bytes_to_loss: float | None
    speedup: float | None  # the first run's time to that loss over this one's
    bytes: float
    channels: dict[str, float]
    raw: float | None
    accuracy: float | None = None  # of a classifier, as the next
    matthews: float | None = None
    memory: float | None = None  # of the rank that took most

    @property
    def saving(self) -> float | None:
        """fp32's bytes over these."""
        return self.raw / self.bytes if self.raw and self.bytes else None


@dataclass(frozen=True)
class Summary:
    """`target`: the worst of the final held-out losses, which all runs reach. `lines`: one per run. `notes`: what a
    reader should know before comparing."""

    target: float | None
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def classifies(self) -> bool:
        """Has any run scores of a classifier?"""
        return any(line.accuracy is not None for line in self.lines)


def summarise(runs: Sequence[Run]) -> Summary:
    """The numbers of `runs`, the first being what the others are compared with."""
    finals = [run.held_out for run in runs if run.held_out is not None]
    target = max(finals, default=None)
    first = None if target is None else reached(runs[0].curve("seconds"), target)
    lines = tuple(_line(run, target, first) for run in runs)
    notes = [f"{run.name}: {note}." for run in runs for note in run.notes]
    return Summary(target, lines, (*_different(runs), *notes))


def _line(run: Run, target: float | None, first: float | None) -> Line:
    time, sent = (None if target is None else reached(run.curve(x), target) for x in ("seconds", "bytes"))
    speedup = first / time if first and time else None
    return Line(
        run.name, run.last_step, run.seconds, run.held_out, time, sent, speedup, run.total, run.sent, run.raw,
        run.score("accuracy"), run.score("matthews"), run.memory,
    )  # fmt: skip


def _different(runs: Sequence[Run]) -> list[str]:
    """Runs of different models, data, meshes or networks are shown, but not silently."""
    notes = []
    sizes = {number(run.about, "parameters") for run in runs} - {None}
    if len(sizes) > 1:
        counts = ", ".join(f"{run.name} {run.about.get('parameters')}" for run in runs)
        notes.append(f"These are different models (parameters: {counts}): their losses do not compare.")
    elif len(_distinct(runs, "model")) > 1:
        notes.append("[model] differs between the runs: compare their losses with care.")
    if len({number(run.about, "samples") for run in runs} - {None}) > 1 or len(_distinct(runs, "data", DATA_KEYS)) > 1:
        notes.append("The runs do not train on the same data: their losses do not compare.")
    if len({_mesh(run) for run in runs if "mesh" in run.about}) > 1:
        notes.append("The mesh differs between the runs: their times do not compare.")
    if len({repr(run.about["rate"]) for run in runs if "rate" in run.about}) > 1:
        notes.append("The rate of the network differs between the runs: their times do not compare.")
    return notes


def _mesh(run: Run) -> str:
    """Sites count as replicas: two sites are compared with two replicas on the same machines."""
    mesh = run.about["mesh"]
    if not isinstance(mesh, Mapping) or "sites" not in mesh:
        return repr(mesh)
    replicas = (number(mesh, "sites") or 1) * (number(mesh, "dp") or 1)
    return repr({"dp": int(replicas)} | {key: mesh[key] for key in mesh if key not in ("sites", "dp")})


def _distinct(runs: Sequence[Run], section: str, keys: Sequence[str] = ()) -> set[str]:
    """The section's different contents, of the runs whose configuration can be read."""
    found = set()
    for run in runs:
        try:
            table = run.document.get(section, {})
        except UsageError:
            continue
        found.add(repr(sorted((k, v) for k, v in table.items() if not keys or k in keys)))
    return found


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Keys of the configuration that are not the same in all `runs`, with each run's value; of the wire, what the run
    says it used."""
    tables = [_flat(_document(run)) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table if key != "run.out")
    rows = [(key, [table.get(key, "–") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _document(run: Run) -> dict[str, Any]:
    """run.toml, and over it what was recorded: --wire and --rate may have changed it."""
    recorded = {key: run.about[key] for key in ("wire", "rate", "commit") if key in run.about}
    try:
        return run.document | recorded
    except UsageError as error:
        return {"run.toml": str(error)} | recorded


def _flat(table: dict[str, Any], before: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} as {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: _word(value)}
    return flat


def _word(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
