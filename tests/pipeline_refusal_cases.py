"""Cases of the pipeline tests: mistakes are one clear line, on every rank alike, and leave no trace."""

from __future__ import annotations

import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from pipeline_support import DELTA, EIGHT, IDENTITY, LENGTH, WIDTH, Run, batch
from rank_cases import check, refused

from thinwire.codecs import Quantize, Transform
from thinwire.config.wire import Link, Wire
from thinwire.memory import Delta, Plain

IDS = list(range(8))


def ids_and_shapes_that_do_not_fit_the_batch() -> None:
    x, y = batch(8)
    run = Run("1F1B", 4, DELTA)
    for ids, words in (
        (None, "give step(ids=…)"), ([0, 1, 2, 3, 4, 5, 6, 1], "sample id 1 stands twice"), ([0.5] * 8, "not 0.5"),
        (8, "ids = 8: must be a list or tensor"), ("abcdefgh", "ids = 'abcdefgh': must be a list or tensor"),
    ):  # fmt: skip
        with refused(words):
            run.step(x, y, ids)
    with refused("shape = 8: must be the batch's, x.shape"):
        run.step(x, y, IDS, shape=8)
    run.step(x, y, IDS)
    with refused("8 sample ids for a batch of shape (9, 8, 16)"):
        run.step(x, y, IDS, shape=(9, LENGTH, WIDTH))
    with refused("micro-batch 0 has 2 rows, but 1 were announced for it"):
        run.step(x, y, [0, 1, 2, 3])
    with refused("micro-batch 0 is (2, 8, 16), unlike (8, 9, 16) before: give step(shape=x.shape)"):
        run.step(x, y, IDS, shape=(8, LENGTH + 1, WIDTH))
    run.step(x, y, IDS)
    stats = run.pipe.stats
    check(not stats.skips and not stats.healed, f"after the mistakes: {stats.skips} skips, {stats.healed} healed")


def numbers_of_ids_in_a_first_step() -> None:
    x, y = batch(8)
    with refused("has 2 rows, but 3 were announced"):
        Run("1F1B", 4, DELTA).step(x, y, list(range(12)))
    with refused("micro-batch 0 has 2 rows, but 1 were announced"):
        Run("Interleaved1F1B", 4, DELTA).step(x, y, [0, 1, 2, 3])


def stages_that_differ() -> None:
    rank, (x, y) = dist.get_rank(), batch(8)
    other = Wire(forward=Link(Quantize(4, block=16), Delta()), backward=EIGHT)
    with refused("stage 0 and stage 1 differ in forward.memory.cold"):
        Run("1F1B", 4, DELTA if rank else other).step(x, y, IDS)
    odd = Wire(backward=Link(Quantize(8), Plain(), lambda stage, microbatch: microbatch > rank))
    with refused("stage 0 and stage 1 differ in backward.when"):
        Run("1F1B", 4, odd).step(x, y)
    with (
        mock.patch.object(Transform, "revision", 2 if rank else 1),  # the first stage's thinwire is older
        refused("stage 0 and stage 1 differ in forward.codec: Transform, revision 1 against Transform, revision 2"),
    ):
        Run("1F1B", 4, Wire(forward=Link(Transform(4)), backward=EIGHT)).step(x, y)
    example = torch.zeros(2, LENGTH, WIDTH, requires_grad=True)
    static = {"input_args": example[:, rank:], "output_args": example}
    with refused("stage 0 sends (2, 8, 16) torch.float32, but stage 1 expects (2, 7, 16)"):
        Run("1F1B", 4, IDENTITY, stage_options=static).step(x, y)


def folder_that_one_rank_cannot_write_to() -> None:
    """All ranks are told, instead of waiting for the one."""
    with tempfile.TemporaryDirectory() as own:
        path = "/proc/nowhere" if dist.get_rank() == 1 else own
        memory = Delta(cold=Quantize(8, block=16), path=path)
        with refused("cannot open the store /proc/nowhere"):
            Run("1F1B", 4, Wire(forward=Link(Quantize(4, block=16), memory), backward=EIGHT)).step(*batch(8), IDS)


def step_outside_its_bracket() -> None:
    run = Run("1F1B", 4, DELTA)
    x, y = batch(8)
    run.step(x, y, IDS)
    with refused("outside its bracket"):
        run.torch_step(x, y, [])


CASES = [
    ids_and_shapes_that_do_not_fit_the_batch, numbers_of_ids_in_a_first_step, stages_that_differ,
    folder_that_one_rank_cannot_write_to, step_outside_its_bracket,
]  # fmt: skip
