"""A plan file: read, and checked key by key. planner/example.toml is a commented example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.config.toml import read_toml
from thinwire.errors import UsageError
from thinwire.planner.actions import Schedule, read_csv
from thinwire.planner.model import Model, work_from_flops
from thinwire.planner.network import LinkSpeed, Network
from thinwire.planner.schedule import generate
from thinwire.planner.settings import Wire, read_wire
from thinwire.planner.step import Machine, Work
from thinwire.quantities import parse_rate, parse_time

KEYS = {
    "model": ("layers", "hidden", "seq", "vocab", "tied", "parameters", "crossing"),
    "mesh": ("dp", "pp", "tp"),
    "schedule": ("name", "virtual", "csv"),
    "batch": ("microbatches", "size"),
    "compute": ("forward", "backward", "flops", "encode", "decode", "cores", "ranks_per_machine"),
    "network": (
        "rate", "latency", "inside_rate", "inside_latency", "ranks_per_site", "shared_uplink", "full_duplex",
    ),
    "wire": None,  # checked in settings.py
}  # fmt: skip


TRAINED = {"data", "optim", "run"}  # sections that only a run of `thinwire train` has


@dataclass(frozen=True)
class Run:
    """Everything that the planner needs to know about a training run."""

    model: Model
    dp: int
    pp: int
    tp: int  # slices of every layer, on consecutive ranks; one of them is simulated
    schedule: Schedule
    sequences: int  # of one micro-batch
    work: Work
    network: Network
    machine: Machine
    encode: float  # bytes of fp32 per second
    decode: float  # likewise
    wire: Wire | None

    def at(self, rate: float | None, latency: float | None = None) -> Run:
        """The same run on a slow network of another rate (bit/s) or latency (seconds, one way)."""
        across = self.network.across
        link = replace(across, rate=rate, latency=across.latency if latency is None else latency)
        return replace(self, network=replace(self.network, across=link))


def load(path: str | Path, rate: str | None = None, latency: str | None = None) -> Run:
    """Read a plan file; `rate` and `latency` from the command line override those of `[network]`."""
    document = read_toml(path)
    if TRAINED & document.keys():
        raise UsageError(
            f"{path} is a run of `thinwire train`, and does not say how fast it computes: train some steps, then plan "
            "its folder (thinwire plan out/train --rate 100mbit); or write a plan (thinwire plan --init plan.toml)"
        )
    for given, key in ((rate, "rate"), (latency, "latency")):
        if given is not None:
            document["network"] = {**document.get("network", {}), key: given}
    return read_run(document, Path(path).parent, Path(path).name)


def read_run(document: Mapping[str, Any], folder: Path = Path(), name: str = "run.toml") -> Run:
    """A parsed plan, checked. `folder`: where its files are; `name`: what its own `[wire]` is called in tables."""
    for section, table in document.items():
        _check_keys(section, table)
    get = {section: document.get(section, {}) for section in KEYS}
    model = _model(get["model"])
    dp = _count("mesh", get["mesh"], "dp", 1)
    pp = _count("mesh", get["mesh"], "pp", 1)
    tp = _count("mesh", get["mesh"], "tp", 1)
    if model.hidden % tp or model.vocab % tp:
        raise UsageError(f"[mesh] tp = {tp}: must divide hidden = {model.hidden} and vocab = {model.vocab}")
    schedule = _schedule(get["schedule"], pp, _count("batch", get["batch"], "microbatches"), folder)
    model.share(schedule.stages)
    sequences = _count("batch", get["batch"], "size", 1)
    cores = _count("compute", get["compute"], "cores", 0, least=0)
    share = _count("compute", get["compute"], "ranks_per_machine", 0, least=0)
    if cores and tp > 1:
        raise UsageError(f"[compute] cores = {cores}: with tp = {tp}, give forward as measured with all slices at work")
    return Run(
        model, dp, pp, tp, schedule, sequences,
        _work(get["compute"], model, schedule, sequences, tp),
        _network(get["network"]),
        Machine(cores, share, dp if cores else 1),
        _positive("compute", get["compute"], "encode", 5.6e9),
        _positive("compute", get["compute"], "decode", 15.9e9),
        read_wire(get["wire"], name) if get["wire"] else None,
    )  # fmt: skip


def _check_keys(section: str, table: Any) -> None:
    if section not in KEYS:
        raise UsageError(f"[{section}]: no such section; allowed are {', '.join(KEYS)}")
    if not isinstance(table, Mapping):
        raise UsageError(f"{section} = {table!r}: must be a table, [{section}]")
    allowed = KEYS[section]
    for key in table:
        if allowed is not None and key not in allowed:
            raise UsageError(f"[{section}] {key}: no such key; allowed are {', '.join(allowed)}")


def _count(section: str, table: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = table.get(key, default)
    if value is None:
        raise UsageError(f"[{section}] {key}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"[{section}] {key} = {value!r}: must be a whole number, {least} or more")
    return value


def _positive(section: str, table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"[{section}] {key} = {value!r}: must be a number above 0")
    return float(value)


def _flag(section: str, table: Mapping[str, Any], key: str, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"[{section}] {key} = {value!r}: must be true or false")
    return value


def _model(table: Mapping[str, Any]) -> Model:
    sizes = {key: _count("model", table, key) for key in ("layers", "hidden", "seq")}
    vocab = _count("model", table, "vocab", 0, least=0)
    parameters = _count("model", table, "parameters", 0, least=0)
    crossing = _count("model", table, "crossing", 0, least=0)
    if not vocab and not parameters:
        raise UsageError("[model]: give vocab, or parameters (of the layers)")
    tied = _flag("model", table, "tied", True)
    return Model(**sizes, vocab=vocab, tied=tied, parameters=parameters, crossing=crossing)


def _schedule(table: Mapping[str, Any], pp: int, microbatches: int, folder: Path) -> Schedule:
    if "csv" not in table:
        virtual = _count("schedule", table, "virtual") if "virtual" in table else None
        return generate(str(table.get("name", "1F1B")), pp, microbatches, virtual)
    schedule = read_csv(folder / str(table["csv"]))
    if (len(schedule.ranks), schedule.microbatches) != (pp, microbatches):
        raise UsageError(
            f"[schedule] csv = {table['csv']!r}: {len(schedule.ranks)} ranks and {schedule.microbatches} "
            f"micro-batches, but pp = {pp} and microbatches = {microbatches}"
        )
    return schedule


def _work(table: Mapping[str, Any], model: Model, schedule: Schedule, sequences: int, tp: int) -> Work:
    if "flops" in table:
        rate = tp * _positive("compute", table, "flops", 0.0)
        return work_from_flops(model, schedule.stages, sequences, rate)
    if "forward" not in table:
        raise UsageError("[compute]: give forward (and backward) seconds per stage, or flops per second")
    forward = _seconds(table, "forward", schedule)
    backward = _seconds(table, "backward", schedule) if "backward" in table else [2 * t for t in forward]
    half = tuple(t / 2 for t in backward)
    return Work(tuple(forward), half, half)


def _seconds(table: Mapping[str, Any], key: str, schedule: Schedule) -> list[float]:
    """Seconds per stage, from one time per rank (split over its stages) or a list with one time per stage."""
    value = table[key]
    if not isinstance(value, list):
        each = parse_time(value, f"[compute] {key}")
        return [each / schedule.rank_of.count(rank) for rank in schedule.rank_of]
    if len(value) != schedule.stages:
        raise UsageError(f"[compute] {key}: {len(value)} times for {schedule.stages} stages")
    return [parse_time(item, f"[compute] {key}") for item in value]


def _network(table: Mapping[str, Any]) -> Network:
    if "rate" not in table:
        raise UsageError("no rate: give --rate 100mbit, or rate under [network]")
    duplex = _flag("network", table, "full_duplex", True)
    sites = _count("network", table, "ranks_per_site", 0, least=0)
    shared = _flag("network", table, "shared_uplink", False)
    return Network(_link_speed(table, "", duplex), _link_speed(table, "inside_", duplex), sites, shared)


def _link_speed(table: Mapping[str, Any], prefix: str, duplex: bool) -> LinkSpeed:
    rate = parse_rate(table.get(f"{prefix}rate"), f"{prefix}rate")
    return LinkSpeed(rate, parse_time(table.get(f"{prefix}latency", 0.0)), duplex)
