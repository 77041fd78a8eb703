"""The part of a `[wire]` table that costs time or bytes. config/wire.py defines what such a table may contain."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.config.presets import written_out
from thinwire.config.stages import Stages, check_stages
from thinwire.registry import plain_name


@dataclass(frozen=True)
class Setting:
    """A codec or a collective by name, with its arguments.

    when: which messages are compressed. delta: messages are coded against the sample's last visit, with one bit per
    block where `gate` is on. cold: the codec of a sample's first visit.
    """

    name: str
    args: Mapping[str, Any]
    when: str = "always"
    delta: bool = False
    gate: bool = True
    cold: Mapping[str, Any] | None = None
    stages: Stages = 1.0  # of gradients: on which stages


WHOLE = ("auto", "streams")  # keys of `[wire]` that are no section


@dataclass(frozen=True)
class Wire:
    """How each kind of traffic is compressed; None: sent as torch sends it, in fp32."""

    name: str
    forward: Setting | None = None
    backward: Setting | None = None
    gradient: Setting | None = None
    embedding: Setting | None = None
    fused: bool = False  # the tied embedding in one exchange
    by_rows: bool = False  # its rows travel, and its owners reduce it
    rows_codec: Mapping[str, Any] | None = None


def preset(name: str) -> Wire:
    """The preset of this name (config/presets.py)."""
    return read_wire({"preset": name}, name)


def read_wire(table: Mapping[str, Any], name: str = "run.toml") -> Wire:
    """A `[wire]` table, called `name` in results; with `auto` it is planned at the strongest level. How many
    `streams` it has changes no byte."""
    importlib.import_module("thinwire.config.wire").Wire.of(table)  # a mistake is a UsageError
    rest = {kind: dict(section) for kind, section in written_out(table).items() if kind not in WHOLE}
    embedding = rest.get("embedding", {})
    sync = embedding.pop("sync", "separate")
    rows_codec = embedding.pop("rows_codec", None)
    return Wire(
        name,
        _setting(rest.get("forward", {}), "codec"),
        _setting(rest.get("backward", {}), "codec"),
        _setting(rest.get("gradient", {}), "collective"),
        _setting(embedding, "collective"),
        sync == "fused",
        sync == "rows",
        rows_codec,
    )


def _setting(table: dict[str, Any], named: str) -> Setting | None:
    """None where the section names nothing: a tied embedding may have other keys than its collective."""
    if named not in table:
        return None
    memory, when = table.pop("memory", "plain"), table.pop("when", "always")
    for key in ("warmup", "tokens", "scale_gradient"):  # a step after the warm-up is planned; the others change no byte
        table.pop(key, None)
    stages = check_stages(table.pop("stages", 1.0))
    kept: Mapping[str, Any] = memory if isinstance(memory, Mapping) else {"memory": memory}
    delta = plain_name(kept["memory"]) == "delta"
    name = plain_name(table.pop(named))
    return Setting(name, table, when, delta, bool(kept.get("gate", True)), kept.get("cold"), stages)
