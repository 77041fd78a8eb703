"""What people give by mistake, to the library and to the benches: one line that names it and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.cli import main
from thinwire.config.wire import Wire
from thinwire.data_parallel.trainers import compress_trainer
from thinwire.errors import UsageError
from thinwire.parallel import Pipeline, Reducer, compress_ddp, compress_fsdp, read_state

LINEAR = nn.Linear(2, 2)


def frozen(**settings: object) -> tw.optim.FrozenAdam:
    return tw.optim.FrozenAdam(LINEAR.named_parameters(), **settings)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a preset's name": (lambda: Wire.of("saef"), "preset = 'saef': allowed are auto, off, bf16, safe"),
    "no wire": (lambda: Wire.of(None), "wire = None: must be a Wire, a preset's name"),
    "negative bits": (lambda: tw.codecs.Quantize(-4), "2, 3, … 8, not -4"),
    "a flag as rank": (lambda: tw.collectives.LowRank(True), "a positive integer, not True"),
    "per cent": (lambda: tw.collectives.OkTopk("1%"), "(0, 1], not '1%'"),
    "a misspelt key": (lambda: Wire.of({"gradients": {}}), "[wire] gradients: no such key; allowed are preset"),
    "a misspelt setting": (lambda: Wire.of({"gradient": {"collective": "ok_topk", "densty": 1}}), "it takes density"),
    "a codec for gradients": (lambda: tw.Wire(gradient=tw.codecs.Quantize(4)), "must be a collective"),
    "decay as text": (lambda: tw.memory.ErrorFeedback("0.9"), "decay must lie in (0, 1], not '0.9'"),
    "eta as text": (lambda: tw.memory.EControl("0.9"), "eta must lie in (0, 1), not '0.9'"),
    "capacity": (lambda: tw.memory.Delta(capacity="2 gigs"), "a size such as \"2GB\", not '2 gigs'"),
    "cold": (lambda: tw.memory.Delta(cold="quantize"), "cold must be a codec, or none for full precision"),
    "a plain module": (lambda: compress_ddp(LINEAR, "max"), "wants a DistributedDataParallel model, not Linear"),
    "not sharded": (
        lambda: compress_fsdp(LINEAR, "max", replicas=None),
        "a model after fully_shard(model, mesh=…)",
    ),
    "no trainer": (lambda: compress_trainer(LINEAR, "max"), "a Hugging Face or Lightning trainer, not Linear"),
    "no names": (lambda: Reducer(LINEAR.parameters(), "max"), "pairs of a name and a parameter are wanted"),
    "a name twice": (lambda: Reducer([*LINEAR.named_parameters()] * 2, "max"), "two parameters are called 'weight'"),
    "nonfinite": (lambda: Reducer(LINEAR.named_parameters(), "max", nonfinite="skip"), "allowed are nan, zero"),
    "rate as text": (lambda: frozen(lr="1e-3"), "lr = '1e-3': must be a number, 0 or more"),
    "one beta": (lambda: frozen(betas=0.9), "betas = 0.9: must be two numbers in [0, 1)"),
    "freezing": (lambda: frozen(freeze_after="soon"), "freeze_after = 'soon': allowed are a number of steps"),
    "AdamW's state": (
        lambda: frozen().load_state_dict(torch.optim.AdamW(LINEAR.parameters()).state_dict()),
        "of another optimizer than FrozenAdam: it has state, param_groups only",
    ),
    "no mapping": (lambda: tw.all_reduce([torch.ones(2)], "max"), "takes tensors by name, {name: tensor}"),
    "averaged how": (lambda: tw.all_reduce({"a": torch.ones(2)}), "the wire is missing: give a collective such as"),
    "a bare tensor": (lambda: tw.all_reduce(torch.ones(2)), "takes tensors by name, {name: tensor}, not Tensor"),
    "whole numbers": (lambda: tw.all_reduce({"n": torch.arange(3)}, "max"), "n is of torch.int64: allowed are real"),
    "no stage": (lambda: Pipeline([LINEAR]), "takes the CompressedStages of this rank, at least one, not [Linear"),
    "no checkpoint": (lambda: read_state(Path(__file__).parent, "wire"), "holds no checkpoint"),
    "another model's state": (
        lambda: Reducer(LINEAR.named_parameters(), "max").load_state_dict(
            {"rank0of1/step": torch.tensor(1), "rank0of1/e/weight": torch.ones(5, 5)}
        ),
        "weight: the state is of shape (5, 5), the parameter of (2, 2)",
    ),
    "a model's own state": (
        lambda: Reducer(LINEAR.named_parameters(), "max").load_state_dict(LINEAR.state_dict()),
        "'weight' is no name of compression state",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_library(mistake: str) -> None:
    act, words = MISTAKES[mistake]
    with pytest.raises(UsageError) as found:
        act()
    assert words in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(("words", "said"), [
    (["bench", "train", "--wires", "mx"], "--wires mx: allowed are off, bf16, safe"),
    (["bench", "train", "--shares", "many"], "--shares many: write numbers between 0 and 1"),
    (["bench", "train", "--shares", "2"], "--shares 2: write numbers between 0 and 1"),
    (["bench", "train", "--seeds", "0"], "--seeds 0: must be 1 or more"),
    (["bench", "optimus", "--rungs", "no"], "--rungs no: allowed are baseline"),
    (["bench", "optimus", "--epochs", "-1"], "--epochs -1: must be 1 or more"),
    (["demo", "--out", "/proc/nowhere"], "--out /proc/nowhere: cannot make that folder"),
])  # fmt: skip
def test_command(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], lines
