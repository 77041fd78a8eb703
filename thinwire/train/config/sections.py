"""run.toml of `thinwire train`: its sections, read and checked before torch is imported or a rank is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.config.presets import LOCAL_PRESETS, PRESETS
from thinwire.config.toml import read_toml
from thinwire.errors import UsageError
from thinwire.train.config.boundary import BoundaryConfig
from thinwire.train.config.families import FAMILIES
from thinwire.train.config.fields import (
    column,
    flag,
    key,
    list_of,
    number,
    one_of,
    read,
    table,
    template,
    text,
    whole,
)  # fmt: skip
from thinwire.train.config.mesh import MeshConfig, check_sites
from thinwire.train.config.task import FORMATS, TaskConfig, check_columns, check_task

INFINITY = float("inf")
LOGGERS = list_of(one_of("tensorboard", "wandb", "mlflow"))
FREEZE = ("'epoch', or a whole number, 1 or more", lambda v: v == "epoch" or (type(v) is int and v >= 1))


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank on a frozen model (arXiv 2106.09685); only they are trained, reduced and saved."""

    r: int = key(8, whole(1), "rank")
    alpha: float = key(16.0, number(0, INFINITY, open_low=True), "the adapter is scaled by alpha / r")
    dropout: float = key(0.0, number(0, 0.99), "before the adapter; above 0 it spoils deltas of activations")
    from_layer: int = key(0, whole(0), "adapters from this layer on; stages before it need no backward")
    targets: tuple[str, ...] | None = key(
        None, list_of(text()), "modules by last name; default: all in attention and MLP", ("q_proj", "v_proj")
    )


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint (`path`), a configuration file (`config`), or sizes; the last two are initialised at random."""

    path: str | None = key(None, text(), "a folder with safetensors, or a GGUF file; sizes are then its own", "DIR")
    config: str | None = key(None, text(), "or a config.json, initialised at random", "config.json")
    type: str = key("llama", one_of(*FAMILIES), "or sizes: " + ", ".join(FAMILIES))
    vocab: int = key(0, whole(0), "0: the tokenizer's")
    hidden: int = key(256, whole(1), "width")
    layers: int = key(8, whole(1), "of decoder or encoder")
    heads: int = key(8, whole(1), "attention heads")
    kv_heads: int = key(0, whole(0), "0: as many as heads")
    ffn: int = key(0, whole(0), "width of the MLP; 0: 4 hidden (gpt2), or 8/3 hidden rounded up to 64")
    positions: int = key(0, whole(0), "longest sequence; 0: seq_len")
    tied: bool = key(True, flag(), "input and output embedding are one parameter")
    dtype: str = key("float32", one_of("float32", "bfloat16"), "of the weights")
    dropout: float = key(0.0, number(0, 0.99), "of gpt2 and encoders; above 0 it spoils deltas of activations")
    attention: str = key("sdpa", one_of("sdpa", "eager"), "sdpa or eager")
    split_times: tuple[float, ...] | None = key(
        None,
        list_of(number(0, INFINITY)),
        "split by time: embedding, each layer, head; default: by parameters",
        (0.0, 1.0, 1.0, 0.5),
    )
    base_bits: int | None = key(None, one_of(8, 4), "store the frozen base in 8 or 4 bits (needs bitsandbytes)", 8)
    lora: LoraConfig | None = dataclasses.field(default=None, metadata=table(LoraConfig, "train adapters only"))

    def __post_init__(self) -> None:
        if self.path is not None and self.config is not None:
            raise UsageError(f"[model] config = {self.config!r}: give path or config, not both")
        for name in ("heads", "kv_heads"):
            whole_by = {"heads": self.hidden, "kv_heads": self.heads}[name]
            count = getattr(self, name)
            if count and whole_by % count:
                raise UsageError(f"[model] {name} = {count}: must divide {whole_by}")
        if self.base_bits is not None and self.lora is None:
            raise UsageError(f"[model] base_bits = {self.base_bits}: needs [model.lora]; a quantised base is frozen")


@dataclass(frozen=True)
class DataConfig:
    """What is trained on. Anything here but `samples` that changes also changes the samples' ids."""

    paths: tuple[str, ...] = key((), list_of(text()), "files or folders; none: the source of Python's library")
    format: str = key("auto", one_of("auto", *FORMATS), "auto: by suffix; " + ", ".join(FORMATS))
    field: str = key("text", text(), "of a JSONL record or data set: the text")
    columns: tuple[str | int, ...] | None = key(
        None,
        list_of(column()),
        "of classify: the text, or two; numbers from 0 without a header; default: field",
        ("a", "b"),
    )
    label: str | int = key("label", column(), "of classify: the column with the label")
    chat_field: str = key("messages", text(), "or the chat turns; loss on the assistant's only")
    tokenizer: str = key("auto", text(), "auto: the checkpoint's, or bytes; bytes; or a directory")
    seq_len: int = key(256, whole(2), "tokens of a sample")
    packing: bool = key(True, flag(), "documents one after another; false: one per sample, padded")
    held_out: float = key(0.02, number(0, 0.9), "share of samples that is evaluated and never trained on")
    seed: int = key(0, whole(0), "of the shuffling")
    corpus_bytes: int = key(4_000_000, whole(1000), "at most so much of Python's library")
    samples: int = key(0, whole(0), "stop after so many samples; 0: all")

    def __post_init__(self) -> None:
        check_columns(self.columns, self.label)


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, its rate, and how long."""

    name: str = key("adamw", one_of("adamw", "frozen_adam"), "adamw, or frozen_adam: variance fixed after a warm-up")
    freeze_after: int | str = key("epoch", FREEZE, "of frozen_adam: epoch (the first), or a number of steps")
    lr: float = key(3e-4, number(0, INFINITY, open_low=True), "highest rate")
    betas: tuple[float, float] = key((0.9, 0.95), list_of(number(0, 0.999999), 2), "of the two moments")
    eps: float = key(1e-8, number(0, 1, open_low=True), "added to the root of the second")
    weight_decay: float = key(0.1, number(0, INFINITY), "of matrices; vectors have none")
    warmup: int = key(20, whole(0), "steps from zero to lr")
    schedule: str = key("cosine", one_of("cosine", "constant"), "cosine or constant")
    final: float = key(0.1, number(0, 1), "share of lr at the end of the cosine")
    clip: float = key(1.0, number(0, INFINITY), "norm of the whole gradient; 0: not clipped")
    epochs: int = key(4, whole(1), "passes over the data")
    steps: int | None = key(None, whole(1), "instead of epochs", 200)
    batch: int = key(16, whole(1), "sequences per step, over all replicas of all sites")
    accumulate: int = key(1, whole(1), "pipeline passes per step")


@dataclass(frozen=True)
class RunConfig:
    """Where results go and how often."""

    seed: int = key(0, whole(0), "of the weights and of dropout")
    device: str = key("cpu", one_of("cpu", "cuda"), "cpu (Gloo), or cuda: one GPU per rank of a machine (NCCL)")
    out: str = key("out/train", text(), "folder of the run, relative to where the command is started")
    checkpoint_every: int = key(100, whole(0), "steps; 0: at the end only")
    keep: int = key(2, whole(1), "checkpoints")
    loggers: tuple[str, ...] | None = key(None, LOGGERS, "beside metrics.jsonl; default: tensorboard", ["wandb"])
    eval_every: int = key(50, whole(0), "steps; 0: at the end only")
    autocast: str = key("off", one_of("off", "bf16"), "off or bf16")
    recompute: bool = key(False, flag(), "compute a layer's activations again in backward instead of keeping them")
    elastic: bool = key(False, flag(), "replicas come and go: docs/elastic.md; [mesh] dp is how many there are usually")
    min_replicas: int = key(1, whole(1), "of an elastic run: with fewer nothing counts")
    lighthouse: str | None = key(None, text(), "of an elastic run: where members meet", "http://10.0.0.1:29510")
    heal: str = key(
        "auto", one_of("auto", "wait", "later"),
        "of an elastic run: others wait for a newcomer's state, or train on; auto: later, above 64 MB",
    )  # fmt: skip
    slow: float = key(
        2.0, number(1, INFINITY), "of an elastic run: report a member so many times slower than the others"
    )


@dataclass(frozen=True)
class TrainConfig:
    """Everything in run.toml. `wire` and `local` are the tables as they were given; thinwire/config/ reads them."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    boundary: BoundaryConfig = dataclasses.field(default_factory=BoundaryConfig)
    wire: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    local: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.mesh.replicas * self.mesh.microbatches * self.optim.accumulate
        if self.optim.batch % parts:
            factors = f"{'sites × ' if self.mesh.sites > 1 else ''}dp × microbatches × accumulate"
            raise UsageError(f"[optim] batch = {self.optim.batch}: must be a multiple of {factors} = {parts}")
        self.boundary.check_path(self.model.path)
        check_sites(self.mesh, self.local, self.optim.name, self.boundary.rank)
        check_task(
            self.task, None if self.model.path or self.model.config else self.model.type, self.data.paths,
            self.data.format, self.data.columns,
        )  # fmt: skip
        if self.mesh.split == "time" and self.model.split_times is not None:
            raise UsageError("[mesh] split = 'time': measures; leave [model] split_times out")
        positions = self.model.positions
        if positions and positions < self.data.seq_len:
            raise UsageError(f"[model] positions = {positions}: must be at least [data] seq_len = {self.data.seq_len}")

    @property
    def microbatch(self) -> int:
        """Sequences in a micro-batch."""
        return self.optim.batch // (self.mesh.replicas * self.mesh.microbatches * self.optim.accumulate)


SECTIONS: dict[str, type] = {
    "task": TaskConfig, "model": ModelConfig, "data": DataConfig, "mesh": MeshConfig, "optim": OptimConfig,
    "run": RunConfig, "boundary": BoundaryConfig,
}  # fmt: skip
GIVEN = ("wire", "local")  # tables that other rooms read

START: dict[str, dict[str, Any]] = {"mesh": {"dp": 2, "pp": 2}, "data": {"samples": 800}}  # a first run, in minutes
WIRE = f"""\
[wire]                       # what crosses the slow network; a preset, or a table for each kind of traffic
preset = "max"               # auto, {", ".join(PRESETS)}
# auto = true                # measure before the first step, and compress at most as the rest says; exact if as fast
# streams = "auto"           # cut messages over several TCP connections, for long or lossy links; or a number
"""
LOCAL = f"""\
# [local]                    # between sites: they train by themselves, and average every so many steps
# preset = "local-max"       # {", ".join(LOCAL_PRESETS)}; then keys that it is changed by
# every = 30                 # steps between two averagings
"""


def init_text() -> str:
    """What `thinwire train --init` writes: every key and what it means.

    Values are the defaults except for a mesh of four ranks, a number of samples so small that they recur, and a wire
    (the defaults are one rank, all samples, and nothing compressed).
    """
    head = "# A training run, as `thinwire train` reads it. Files are looked for beside this one.\n"
    sections = (template(cls, name, START.get(name, {})) for name, cls in SECTIONS.items())
    return "\n".join([head, *sections, WIRE, LOCAL])


def load(path: str | Path) -> TrainConfig:
    """Read run.toml. File names in it are relative to its own folder; the files must exist."""
    return _with_files(read_config(read_toml(path)), Path(path).parent)


def read_config(document: Mapping[str, Any]) -> TrainConfig:
    """A parsed run.toml, checked key by key."""
    for section, content in document.items():
        if section not in (*SECTIONS, *GIVEN):
            raise UsageError(f"[{section}]: no such section; allowed are {', '.join((*SECTIONS, *GIVEN))}")
        if not isinstance(content, Mapping):
            raise UsageError(f"{section} = {content!r}: must be a table, [{section}]")
    sections: dict[str, Any] = {
        name: read(cls, name, document[name]) for name, cls in SECTIONS.items() if name in document
    }
    sections |= {name: dict(document.get(name, {})) for name in GIVEN}
    return TrainConfig(**sections)


def _with_files(config: TrainConfig, folder: Path) -> TrainConfig:
    model, data = config.model, config.data
    if model.path is not None:
        model = replace(model, path=_found(folder, "model", "path", model.path))
    if model.config is not None:
        model = replace(model, config=_found(folder, "model", "config", model.config))
    if data.tokenizer not in ("auto", "bytes"):
        data = replace(data, tokenizer=_found(folder, "data", "tokenizer", data.tokenizer))
    data = replace(data, paths=tuple(_found(folder, "data", "paths", name) for name in data.paths))
    return replace(config, model=model, data=data)


def _found(folder: Path, section: str, name: str, value: str) -> str:
    path = folder / value
    if not path.exists():
        raise UsageError(f"[{section}] {name} = {value!r}: no such file or folder: {path}")
    return str(path)
