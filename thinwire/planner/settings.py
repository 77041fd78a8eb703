"""A `[wire]` table, checked: what each kind of traffic gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.errors import UsageError
from thinwire.naming import plain_name
from thinwire.presets import PRESETS
from thinwire.stages import Stages, check_stages

WHEN = {
    "forward": ("always", "critical"),
    "backward": ("always", "critical", "epilogue"),
    "gradient": ("always",),
    "embedding": ("always",),
}
WITHOUT_COST = ("warmup", "exclude", "exact_dims", "unit_mb", "tau", "tau_prime", "scope", "xi_every", "lazy")
MEMORIES = (
    "plain", "fixedshift", "starshift", "diana", "randdiana", "ef21", "errorfeedback", "econtrol", "delta",
)  # fmt: skip
SYNCS = ("fused", "separate")
COLLECTIVES = {  # name -> the arguments it needs
    "dense": (),
    "oktopk": ("density",),
    "topkallgather": ("density",),
    "topkdsa": ("density",),
    "gtopk": ("density",),
    "lowrank": ("rank",),
    "quantized": ("bits",),
    "gather": ("codec",),
    "twohop": ("codec",),
    "hierarchical": ("across",),
}

CODING = ("values", "indices")  # of the sparse ones' entries


@dataclass(frozen=True)
class Setting:
    """A codec or a collective by name, with its arguments.

    `delta`: against the last visit, with a bit a block where `gate` is on; `cold`: the first visit's codec.
    """

    name: str
    args: Mapping[str, Any]
    when: str = "always"
    delta: bool = False
    gate: bool = True
    cold: Mapping[str, Any] | None = None
    stages: Stages = 1.0  # of gradients: on which stages


@dataclass(frozen=True)
class Wire:
    """None: sent as torch sends it, in fp32."""

    name: str
    forward: Setting | None = None
    backward: Setting | None = None
    gradient: Setting | None = None
    embedding: Setting | None = None
    fused: bool = False  # the tied embedding in one exchange


def preset(name: str) -> Wire:
    if name not in PRESETS:
        raise UsageError(f"preset {name!r}: allowed are {', '.join(PRESETS)}")
    return read_wire(PRESETS[name], name)


def read_wire(table: Mapping[str, Any], name: str = "run.toml") -> Wire:
    """`[wire]` with forward, backward, gradient and embedding; `preset` fills in what is not named."""
    rest = dict(table)
    if "preset" in rest:
        wanted = rest.pop("preset")
        if wanted not in PRESETS:
            raise UsageError(f"[wire] preset = {wanted!r}: allowed are {', '.join(PRESETS)}")
        rest = {**PRESETS[wanted], **rest}
    allowed = ("forward", "backward", "gradient", "embedding")
    for key, value in rest.items():
        if key not in allowed:
            raise UsageError(f"[wire] {key}: no such key; allowed are preset, {', '.join(allowed)}")
        if not isinstance(value, Mapping):
            raise UsageError(f"[wire] {key} = {value!r}: must be a table, such as [wire.{key}]")
    embedding = dict(rest.pop("embedding", {}))
    sync = embedding.pop("sync", "separate")
    if sync not in SYNCS:
        raise UsageError(f"[wire.embedding] sync = {sync!r}: allowed are {', '.join(SYNCS)}")
    return Wire(
        name,
        _codec("forward", rest.get("forward", {})),
        _codec("backward", rest.get("backward", {})),
        _collective("gradient", rest.get("gradient", {})),
        _collective("embedding", embedding),
        sync == "fused",
    )


def _codec(kind: str, given: Mapping[str, Any]) -> Setting | None:
    table = dict(given)
    if not table:
        return None
    if not isinstance(table.get("codec"), str):
        raise UsageError(f'[wire.{kind}] codec: a codec\'s name is needed, such as "quantize"')
    return _setting(kind, table, plain_name(table.pop("codec")))


def _collective(kind: str, given: Mapping[str, Any]) -> Setting | None:
    table = {key: value for key, value in given.items() if key not in WITHOUT_COST}
    if not table:
        return None
    wanted = table.pop("collective", None)
    name = plain_name(str(wanted))
    if name not in COLLECTIVES:
        raise UsageError(f"[wire.{kind}] collective = {wanted!r}: allowed are {', '.join(COLLECTIVES)}")
    stages = _stages(kind, table.pop("stages", 1.0))
    setting = replace(_setting(kind, table, name), stages=stages)
    needed = COLLECTIVES[name]
    allowed = (*needed, *(CODING if "density" in needed else ()))
    for key in (*needed, *setting.args):
        if key not in allowed or (key in needed and key not in setting.args):
            raise UsageError(f"[wire.{kind}] {key}: {name} takes {', '.join(needed) or 'no argument'}")
    return setting


def _stages(kind: str, given: Any) -> Stages:
    try:
        return check_stages(given)
    except UsageError as error:
        raise UsageError(f"[wire.{kind}] {error}") from None


def _setting(kind: str, table: dict[str, Any], name: str) -> Setting:
    memory = table.pop("memory", None)
    inner: Mapping[str, Any] = memory if isinstance(memory, Mapping) else {"memory": memory or "plain"}
    when = table.pop("when", "always")
    if when not in WHEN[kind]:
        raise UsageError(f"[wire.{kind}] when = {when!r}: allowed are {', '.join(WHEN[kind])}")
    keeps = plain_name(str(inner.get("memory", "")))
    if keeps not in MEMORIES:
        raise UsageError(f"[wire.{kind}] memory = {memory!r}: allowed are {', '.join(MEMORIES)}")
    return Setting(name, table, when, keeps == "delta", bool(inner.get("gate", True)), inner.get("cold"))
