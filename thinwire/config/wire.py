"""The user's configuration: how each kind of traffic is compressed.

    tw.Wire(forward=(codecs.Quantize(4), memory.Delta()), gradient=collectives.OkTopk(0.01))
    tw.Wire.of("safe")    tw.Wire.of({"gradient": {"collective": "ok_topk", "density": 0.01}})    # as TOML gives it

A kind of traffic without a section is sent as torch sends it. Gradients keep what a lossy collective leaves out (error
feedback) unless another memory is named; without any, training would converge to another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from thinwire import codecs
from thinwire.codecs.base import Codec
from thinwire.collectives import Collective, Dense
from thinwire.collectives.flows import MOST_STREAMS
from thinwire.config.named import build_named, hint, make_collective, make_memory, nested, read_table
from thinwire.config.presets import written_out
from thinwire.config.stages import Stages, check_stages
from thinwire.errors import UsageError
from thinwire.memory import ErrorFeedback, Memory, Plain

WHEN = ("always", "epilogue", "critical")
SYNCS = ("separate", "fused", "rows")
EPOCH = "epoch"  # as a warm-up: the first epoch, whose steps `Wire.with_epoch` tells


@dataclass(frozen=True)
class Link:
    """`[wire.forward]` and `[wire.backward]`: how messages over pipeline boundaries are compressed.

    codec: what encodes a message.
    memory: what both ends keep between messages; "auto" (backward): lazy error where it helps.
    when: which messages are compressed: always, epilogue (Optimus-CC's), critical (without slack in the simulator), or
        a predicate (stage, micro-batch) → bool that both peers evaluate.
    warmup: the first training steps of the pipeline, whose messages are exact: a number, or "epoch" (Wire.with_epoch).
        A memory of samples needs none: a sample's first message is exact unless `cold` says otherwise.
    tokens: messages are coded against means of tokens, which follow at this rate; 0: not (memory/fitted.py). Backward
        of the tokens that come next, and of a Transform only, whose codes have no bias.
    scale_gradient: forward: the sender's gradient passes through the code's scale (memory/scale_gradient.py).
    """

    codec: Codec
    memory: Memory | str = field(default_factory=Plain)
    when: str | Callable[[int, int], bool] = "always"
    warmup: int | str = 0
    tokens: float = 0.0
    scale_gradient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UsageError(f"a pipeline link takes a codec, not {self.codec!r}")
        if self.memory != "auto" and not isinstance(self.memory, Memory):
            raise UsageError(f"memory must be a memory or 'auto', not {self.memory!r}")
        if not callable(self.when) and self.when not in WHEN:
            raise UsageError(f"when = {self.when!r}: allowed are {', '.join(WHEN)}, or a function")
        if not isinstance(self.tokens, (int, float)) or not 0 <= self.tokens <= 1:
            raise UsageError(f"tokens = {self.tokens!r}: must be a rate, 0 (no token means) to 1")
        if not isinstance(self.scale_gradient, bool):
            raise UsageError(f"scale_gradient = {self.scale_gradient!r}: must be true or false")
        if self.fitted and (self.memory != Plain() or self.when != "always"):
            raise UsageError(
                "`tokens`, `scale_gradient`, and a codec that learns, are for all messages: leave out memory and when"
            )
        _check_warmup(self.warmup)
        if self.warmup and isinstance(self.memory, Memory) and self.remembers_samples:
            raise UsageError(
                f"warmup = {self.warmup!r}: memory {self.memory.name} would remember nothing of it; leave it out: a "
                "sample's first message is in full precision, unless `cold` is given"
            )

    @property
    def fitted(self) -> bool:
        """Does its channel take more than a codec and a memory (memory/fitted.py)?"""
        return bool(self.codec.learns or self.tokens or self.scale_gradient)

    @property
    def remembers_samples(self) -> bool:
        """Are messages coded against the same sample's last visit?"""
        return isinstance(self.memory, Memory) and self.memory.cold_start


@dataclass(frozen=True)
class Reduction:
    """`[wire.gradient]` and `[wire.embedding]`: how gradients are averaged.

    collective: what averages them.
    memory: what each rank keeps between steps; error feedback by default.
    stages: of a pipeline, whose gradients are compressed: a share (the earliest), a list, or "slack" (stages.py).
    warmup: the first steps, which are exact: a number, or "epoch" (Wire.with_epoch).
    exclude: patterns of names, as of files (`*.bias`), whose parameters are always exact.
    exact_dims: parameters of at most so many dimensions are always exact (1: biases and norms; 0: none).
    unit_mb: the size in MB of the units that are exchanged while backward still runs.
    sync: of a tied embedding: one exchange over both copies (fused), one each and one between them (separate), or no
        second copy: its owner sends the rows of a batch to the first stage, and gets their gradients back (rows).
    rows_codec: of these rows' changes and gradients; None: they are exact.
    """

    collective: Collective
    memory: Memory = field(default_factory=ErrorFeedback)
    stages: Stages = 1.0
    warmup: int | str = 0
    exclude: tuple[str, ...] = ()
    exact_dims: int = 1
    unit_mb: float = 25.0
    sync: str = "separate"
    rows_codec: Codec | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.collective, Collective):
            raise UsageError(f"gradients take a collective, not {self.collective!r}{hint(self.collective)}")
        if not isinstance(self.memory, Memory):
            raise UsageError(f"memory must be a memory, not {self.memory!r}")
        if self.memory.cold_start:
            raise UsageError(
                f"memory {self.memory.name}: is for samples; gradients take error_feedback, ef21, diana, …"
            )
        object.__setattr__(self, "stages", check_stages(self.stages))
        _check_warmup(self.warmup)
        if not _is_count(self.exact_dims):
            raise UsageError(f"exact_dims = {self.exact_dims!r}: must be an integer, 0 or more")
        if not isinstance(self.unit_mb, (int, float)) or not self.unit_mb > 0:
            raise UsageError(f"unit_mb = {self.unit_mb!r}: must be positive")
        if self.sync not in SYNCS:
            raise UsageError(f"sync = {self.sync!r}: allowed are {', '.join(SYNCS)}")
        if self.rows_codec is not None and (self.sync != "rows" or not isinstance(self.rows_codec, Codec)):
            raise UsageError(f"rows_codec = {self.rows_codec!r}: must be a codec, and needs sync = 'rows'")
        patterns = (self.exclude,) if isinstance(self.exclude, str) else self.exclude
        if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
            raise UsageError(f"exclude = {self.exclude!r}: must be patterns of names, such as '*.bias'")
        object.__setattr__(self, "exclude", tuple(patterns))

    @property
    def is_exact(self) -> bool:
        return isinstance(self.collective, Dense)


@dataclass(frozen=True)
class Wire:
    """How each kind of traffic is compressed; None: sent as torch sends it.

    forward, backward: activations and their gradients over pipeline boundaries: a Link, a codec, or (codec, memory).
    gradient: gradients between replicas: a Reduction, a collective, or (collective, memory).
    embedding: the gradient of a tied embedding between its two copies, likewise.
    auto: measure before the first step, and stay exact where that is as fast.
    streams: TCP connections that a message is cut over, 1 to 64, for links on which one cannot fill the rate; "auto":
        as many as the links turn out to need when ranks first meet, which takes seconds.
    """

    forward: Link | None = None
    backward: Link | None = None
    gradient: Reduction | None = None
    embedding: Reduction | None = None
    auto: bool = False
    streams: int | str = 1

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            object.__setattr__(self, name, _link(name, getattr(self, name)))
        for name in ("gradient", "embedding"):
            object.__setattr__(self, name, _reduction(name, getattr(self, name)))
        if self.backward is not None:
            unbiased = isinstance(self.backward.codec, codecs.Transform) and not self.backward.codec.every
            if self.backward.tokens and not unbiased:
                raise UsageError(
                    "[wire.backward] tokens: needs codec = 'transform' without `every`: another's bias would add up"
                )
            if self.backward.scale_gradient:
                raise UsageError("[wire.backward] scale_gradient: is for activations; give it under [wire.forward]")
        if not isinstance(self.auto, bool):
            raise UsageError(f"[wire] auto = {self.auto!r}: must be true or false")
        if self.streams != "auto" and not (_is_count(self.streams) and 1 <= int(self.streams) <= MOST_STREAMS):
            raise UsageError(f'[wire] streams = {self.streams!r}: allowed are 1 to {MOST_STREAMS}, and "auto"')

    @property
    def needs_tokens(self) -> bool:
        """Does every rank of a pipeline have to be told the tokens?"""
        return any(link is not None and link.tokens > 0 for link in (self.forward, self.backward))

    def with_epoch(self, steps: int, passes: int = 1) -> Wire:
        """The wire with every warm-up of "epoch" in steps.

        steps: of an epoch. passes: steps of the pipeline in each, where gradients are accumulated.
        """
        counts = {"forward": steps * passes, "backward": steps * passes, "gradient": steps, "embedding": steps}
        given = {name: getattr(self, name) for name in counts}
        waiting = {name: one for name, one in given.items() if one is not None and one.warmup == EPOCH}
        return replace(self, **{name: replace(one, warmup=counts[name]) for name, one in waiting.items()})

    @staticmethod
    def of(wire: WireLike) -> Wire:
        """A Wire from itself, a preset's name, "auto", a `[wire]` table, or a collective for the gradients alone."""
        if isinstance(wire, Wire):
            return wire
        if isinstance(wire, Collective):
            return Wire(gradient=wire)  # type: ignore[arg-type]
        if isinstance(wire, str):
            return _read({"preset": wire})
        if not isinstance(wire, Mapping):
            raise UsageError(f"wire = {wire!r}: must be a Wire, a preset's name, a table or a collective{hint(wire)}")
        return _read(wire)


WireLike = Wire | Collective | str | Mapping[str, Any]  # what Wire.of makes a Wire of


def warmup_steps(section: str, given: Link | Reduction | None) -> int:
    """How many steps of a section's traffic are exact; UsageError where an epoch is meant and its steps are unknown.

    section: its name, for the error. given: the section; None: nothing is compressed.
    """
    warmup = 0 if given is None else given.warmup
    if isinstance(warmup, str):
        raise UsageError(
            f"[wire.{section}] warmup = {warmup!r}: how many steps has an epoch? Give their number, or take "
            "tw.Wire.of(wire).with_epoch(steps)"
        )
    return warmup


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_warmup(value: object) -> None:
    if not _is_count(value) and value != EPOCH:
        raise UsageError(f"warmup = {value!r}: must be an integer, 0 or more, or {EPOCH!r}")


def _read(table: Mapping[str, Any]) -> Wire:
    """`[wire]`: sections over a `preset`, and `auto`."""
    return Wire(**written_out(table))


def _link(name: str, given: Any) -> Link | None:
    """A section as a Link: from None, a codec, (codec, memory), a table, or itself."""
    if given is None or isinstance(given, Link):
        return given
    if isinstance(given, Codec):
        return Link(given)
    if isinstance(given, tuple):
        return Link(*given)
    table = read_table(name, given, "codec")
    if not table:
        return None
    own = {key: table.pop(key) for key in ("when", "warmup", "tokens", "scale_gradient") if key in table}
    kept = table.pop("memory", "plain")
    return build_named(name, lambda: Link(codecs.make(**table), kept if kept == "auto" else make_memory(kept), **own))


def _reduction(name: str, given: Any) -> Reduction | None:
    """A section as a Reduction: from None, a collective, (collective, memory), a table, or itself."""
    if given is None or isinstance(given, Reduction):
        return given
    if isinstance(given, Collective):
        return Reduction(given)
    if isinstance(given, tuple):
        return Reduction(*given)
    table = read_table(name, given, "collective", needed=name == "gradient")
    if not table:
        return None
    table.setdefault("collective", "dense")
    own = {f.name: table.pop(f.name) for f in fields(Reduction)[2:] if f.name in table}
    kept = table.pop("memory", "error_feedback")

    def build() -> Reduction:
        if "rows_codec" in own:
            own["rows_codec"] = nested(own["rows_codec"])
        return Reduction(make_collective(**table), make_memory(kept), **own)

    return build_named(name, build)
