"""tw.Wire: presets build, TOML says the same as Python, the planner reads the same tables, mistakes are named."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

import thinwire as tw
from thinwire import codecs, collectives, memory
from thinwire.collectives import COLLECTIVES
from thinwire.config.named import MEMORIES
from thinwire.config.presets import PRESETS
from thinwire.config.wire import Link, Reduction, Wire
from thinwire.errors import UsageError
from thinwire.planner.settings import read_wire
from thinwire.planner.sizes import reduction
from thinwire.registry import construct, plain_name

QUANTIZE = {"codec": "quantize", "bits": 4}
SPARSE = {"collective": "ok_topk", "density": 0.1}


def as_toml(table: Mapping[str, Any]) -> str:
    """[wire.<section>] tables with inline tables inside."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    text = ["[wire]", *lines]
    for section, keys in table.items():
        if isinstance(keys, Mapping):
            text += [f"[wire.{section}]", *(f"{key} = {_value(value)}" for key, value in keys.items())]
    return "\n".join(text)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


# --- presets, TOML, Python


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_by_name_by_table_and_by_toml(name):
    table = tomllib.loads(as_toml(PRESETS[name]))["wire"]
    assert table == PRESETS[name]
    assert Wire.of(name) == Wire.of(table) == Wire.of({"preset": name}) == Wire.of(Wire.of(name))
    for section in ("forward", "backward", "gradient", "embedding"):
        built = getattr(Wire.of(name), section)
        assert (built is None) == (section not in PRESETS[name])
        assert built is None or isinstance(built, Link if section in ("forward", "backward") else Reduction)


@pytest.mark.parametrize("name", PRESETS)
def test_the_planner_reads_every_preset_the_same(name):
    planned, built = read_wire({**PRESETS[name], "streams": 8}, name), Wire.of(name)
    for section in ("forward", "backward"):
        setting, link = getattr(planned, section), getattr(built, section)
        assert (setting is None) == (link is None)
        if link is not None:
            assert codecs.make(setting.name, **setting.args) == link.codec
            assert setting.when == link.when
            assert setting.delta == (link.memory.name == "Delta")
    if built.gradient is not None:
        assert plain_name(planned.gradient.name) == plain_name(PRESETS[name]["gradient"]["collective"])
        assert planned.gradient.stages == built.gradient.stages
    assert planned.fused == (built.embedding is not None and built.embedding.sync == "fused")


def test_the_planner_prices_every_collective_that_a_wire_can_name():
    """And by their own rules: no two of them send the same."""
    arguments = {
        "dense": {}, "quantized": {"bits": 4}, "gather": {"codec": QUANTIZE},
        "twohop": {"codec": QUANTIZE | {"bits": 3}},
        "lowrank": {"rank": 2}, "alternatinglowrank": {"rank": 3},
        "oktopk": {"density": 0.1}, "gtopk": {"density": 0.1}, "topkdsa": {"density": 0.1},
        "topkallgather": {"density": 0.1}, "hierarchical": {"across": {"collective": "quantized", "bits": 4}},
    }  # fmt: skip
    assert set(arguments) == set(COLLECTIVES)
    sent = []
    for name, some in arguments.items():
        wire = read_wire({"gradient": {"collective": name, **some}})
        sent.append(sum(cost.nbytes for cost in reduction(wire.gradient, [(64, 32)], 4, 2)))
    assert min(sent) > 0 and len({round(s) for s in sent}) == len(sent), dict(zip(arguments, sent))


def test_sections_over_a_preset():
    wire = Wire.of({"preset": "safe", "gradient": SPARSE | {"warmup": 7, "exclude": ["*.bias"]}})
    assert wire.forward == Wire.of("safe").forward
    assert wire.gradient == Reduction(collectives.OkTopk(0.1), warmup=7, exclude=("*.bias",))


def test_python_and_table_are_equal():
    forward = {"codec": "quantize", "bits": 4, "memory": {"memory": "delta", "cold": {"codec": "quantize", "bits": 8}}}
    backward = {"codec": "rotated", "inner": QUANTIZE, "when": "critical"}
    gradient = {"collective": "two_hop", "codec": {"codec": "scaled_sign"}, "memory": "ef21"}
    assert Wire.of({"forward": forward, "backward": backward, "gradient": gradient}) == Wire(
        forward=(codecs.Quantize(4), memory.Delta(cold=codecs.Quantize(8))),
        backward=Link(codecs.Rotated(codecs.Quantize(4)), when="critical"),
        gradient=(collectives.TwoHop(codecs.ScaledSign()), memory.EF21()),
    )


def test_what_is_not_said():
    """Nothing: as torch sends it. A lossy gradient: error feedback. A tied embedding may only say how it is synced."""
    assert Wire.of({}) == Wire.of("off") == Wire() == Wire.of({"forward": {}, "gradient": {}})
    assert Wire.of({"gradient": SPARSE}).gradient.memory == memory.ErrorFeedback()
    assert Wire.of(collectives.OkTopk(0.1)) == Wire.of({"gradient": SPARSE})
    assert Wire.of({"embedding": {"sync": "fused"}}).embedding == Reduction(collectives.Dense(), sync="fused")
    assert Wire.of({"gradient": SPARSE | {"exclude": "*.bias"}}).gradient.exclude == ("*.bias",)
    assert Wire.of("auto") == dataclasses.replace(Wire.of("max"), auto=True)


def test_a_wire_cannot_be_changed():
    wire = Wire.of("max")
    for owner, name in ((wire, "forward"), (wire.gradient, "warmup"), (wire.forward, "codec")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(owner, name, None)


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_has_a_name(name):
    needed = {"randdiana": {"p": 0.1}, "econtrol": {"eta": 0.5}}
    if name in ("fixedshift", "starshift"):
        pytest.skip("its shift is a tensor, which a file cannot hold")
    section, base = ("forward", QUANTIZE) if name == "delta" else ("gradient", SPARSE)
    table = base | {"memory": {"memory": name, **needed.get(name, {})}}
    assert getattr(Wire.of({section: table}), section).memory == MEMORIES[name](**needed.get(name, {}))


# --- mistakes: the section, the key, the value, and what is allowed


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"preset": "maxx"}, "preset 'maxx' allowed off, safe, max"),
        ({"forwrd": {}}, "[wire] forwrd allowed preset, forward, backward, gradient, embedding, auto"),
        ({"forward": 3}, "[wire] forward = 3 codec table"),
        ({"forward": {"bits": 4}}, "[wire.forward] codec name"),
        ({"forward": {"codec": "quantise", "bits": 4}}, "[wire.forward] codec 'quantise' quantize scaledsign topk"),
        ({"forward": {"codec": "quantize"}}, "[wire.forward] quantize needs bits"),
        ({"forward": {"codec": "quantize", "bit": 4}}, "[wire.forward] 'bit' bits block rounding scale"),
        ({"forward": {"codec": "quantize", "bits": 9}}, "[wire.forward] bits 2 8 9"),
        ({"forward": {"codec": "quantize", "bits": "4"}}, "[wire.forward] bits 2 8 '4'"),
        ({"forward": QUANTIZE | {"memory": "delt"}}, "[wire.forward] memory 'delt' plain delta diana"),
        ({"forward": QUANTIZE | {"memory": {"memory": "delta", "sore": 1}}}, "[wire.forward] 'sore' store cold gate"),
        ({"forward": QUANTIZE | {"memory": {"memory": "delta", "store": "fp7"}}}, "[wire.forward] store bf16 'fp7'"),
        ({"forward": QUANTIZE | {"when": "never"}}, "[wire.forward] when 'never' always epilogue critical"),
        ({"backward": {"codec": "low_rank", "rank": 0}}, "[wire.backward] rank positive 0"),
        ({"gradient": {"density": 0.1}}, "[wire.gradient] collective name"),
        ({"gradient": {"collective": "okk"}}, "[wire.gradient] collective 'okk' dense oktopk quantized twohop"),
        ({"gradient": {"collective": "oktopk"}}, "[wire.gradient] oktopk needs density"),
        ({"gradient": SPARSE | {"density": 0}}, "[wire.gradient] density (0, 1] 0"),
        ({"gradient": SPARSE | {"density": float("nan")}}, "[wire.gradient] density (0, 1] nan"),
        ({"gradient": SPARSE | {"values": "fp8"}}, "[wire.gradient] values fp32 bf16 int8 'fp8'"),
        ({"gradient": SPARSE | {"warmup": -1}}, "[wire.gradient] warmup -1 0 or more"),
        ({"gradient": SPARSE | {"warmup": 1.5}}, "[wire.gradient] warmup 1.5 integer"),
        ({"gradient": SPARSE | {"exact_dims": True}}, "[wire.gradient] exact_dims True integer"),
        ({"gradient": SPARSE | {"unit_mb": 0}}, "[wire.gradient] unit_mb 0 positive"),
        ({"gradient": SPARSE | {"stages": "some"}}, "[wire.gradient] stages 'some' share list slack"),
        ({"gradient": SPARSE | {"stages": 1.5}}, "[wire.gradient] stages 1.5 share list slack"),
        ({"gradient": SPARSE | {"stages": [0, -1]}}, "[wire.gradient] stages [0, -1] share list slack"),
        ({"gradient": SPARSE | {"when": "epilogue"}}, "[wire.gradient] 'when' density"),
        ({"gradient": SPARSE | {"memory": "delta"}}, "[wire.gradient] memory Delta samples error_feedback"),
        ({"gradient": SPARSE | {"memory": "auto"}}, "[wire.gradient] memory 'auto' plain errorfeedback"),
        ({"gradient": {"collective": "two_hop", "codec": "quantize"}}, "[wire.gradient] codec 'quantize'"),
        ({"gradient": {"collective": "two_hop", "codec": QUANTIZE | {"bits": 1}}}, "[wire.gradient] bits 2 8 1"),
        ({"embedding": {"sync": "both"}}, "[wire.embedding] sync 'both' separate fused"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(table, words):
    with pytest.raises(UsageError) as error:
        Wire.of(table)
    for word in words.split():
        assert word.rstrip(",") in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wire",
    [
        {"gradient": SPARSE | {"unit_mb": "big"}}, {"gradient": SPARSE | {"exclude": 3}}, {"auto": "yes"},
        {"forward": QUANTIZE | {"memory": 3}}, 3, None,
    ],
    ids=repr,
)  # fmt: skip
def test_a_wrong_type_is_a_mistake_too(wire):
    with pytest.raises(UsageError):
        Wire.of(wire)


@pytest.mark.parametrize("section", [{"forward": collectives.Dense()}, {"gradient": codecs.Identity()}])
def test_codecs_and_collectives_in_the_wrong_place(section):
    with pytest.raises(UsageError, match=re.escape(f"[wire] {next(iter(section))} = ")):
        Wire(**section)
    with pytest.raises(UsageError, match=r"a pipeline link takes a codec|gradients take a collective"):
        (Link if "forward" in section else Reduction)(next(iter(section.values())))


def test_a_codec_for_gradients_is_told_where_to_go():
    codec = codecs.Quantize(4)
    for attempt in (lambda: Wire.of(codec), lambda: Wire(gradient=codec), lambda: Reduction(codec)):
        with pytest.raises(UsageError, match=r"TwoHop\(codec\) makes a collective of a codec"):
            attempt()


# --- naming


@pytest.mark.parametrize(
    ("given", "plain"), [("OkTopk", "oktopk"), ("ok_topk", "oktopk"), ("two-hop", "twohop"), ("EF21", "ef21")]
)
def test_plain_names(given, plain):
    assert plain_name(given) == plain


def test_construct():
    registry = {"pair": lambda first, second=2: (first, second), "empty": lambda: ()}
    assert construct("thing", registry, "Pair", {"first": 1}) == (1, 2)
    for name, arguments, words in (
        ("triple", {}, "thing 'triple' is unknown: one of pair, empty"),
        ("pair", {"first": 1, "third": 3}, "pair has no setting 'third': it takes first, second"),
        ("pair", {}, "pair needs first"),
        ("empty", {"x": 1}, "empty has no setting 'x': it takes none"),
        (None, {}, "thing None is unknown"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            construct("thing", registry, name, arguments)


def test_names_on_the_package():
    assert tw.Wire is Wire and tw.Link is Link and tw.Reduction is Reduction


def test_theory_codecs_and_rivals_are_imported_when_named():
    code = """if True:
        import sys, thinwire as tw
        tw.Wire.of("max")
        late = ("thinwire.codecs.theory", "thinwire.collectives.rivals")
        assert not [name for name in late if name in sys.modules]
        assert tw.codecs.make("natural_dither", levels=3) == tw.codecs.NaturalDither(3)
        assert tw.Wire.of({"gradient": {"collective": "gtopk", "density": 0.1}}).gradient.collective
        assert all(name in sys.modules for name in late)
        """
    subprocess.run([sys.executable, "-c", code], check=True)
