"""Cases of the DDP tests: mistakes that are refused in one line on every rank."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from ddp_support import SPARSE, Net, backward, wrap
from rank_cases import check, refused
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.codecs import Transform
from thinwire.collectives import Dense, OkTopk, Quantized, TwoHop
from thinwire.data_parallel.reducer import Reducer
from thinwire.errors import UsageError
from thinwire.parallel import compress_ddp


def rank_configured_otherwise_is_named_with_the_field() -> None:
    odd = dist.get_rank() == 1
    for build, field in (
        (lambda: Reducer(Net().named_parameters(), OkTopk(0.1 if odd else 0.2)), "gradient.collective.density"),
        (lambda: Reducer(Net().named_parameters(), tw.Wire(gradient=tw.Reduction(Dense(), warmup=int(odd)))), "warmup"),
        (lambda: Reducer(list(Net().named_parameters())[odd:], Dense()), "parameter first.weight"),
        (lambda: Reducer(Net().named_parameters(), Dense(), seed=int(odd)), "seed"),
        (lambda: Reducer(Net().named_parameters(), SPARSE, nonfinite="zero" if odd else "nan"), "nonfinite"),
        (lambda: Reducer(Net().named_parameters(), SPARSE, nonfinite="none" if odd else "nan"), "nonfinite"),
        (lambda: Reducer([] if odd else Net().named_parameters(), SPARSE), "parameter first.weight"),
        (lambda: compress_ddp(wrap(), tw.Wire(gradient=SPARSE.gradient, auto=odd)), "auto"),
        (lambda: compress_ddp(wrap(), SPARSE, scaler=torch.amp.GradScaler("cpu") if odd else None), "scaler"),
        (lambda: Reducer(Net(torch.float64 if odd else torch.float32).named_parameters(), Dense()), "torch.float64"),
        (lambda: tw.all_reduce({"b" if odd else "a": torch.ones(3)}, SPARSE), "parameter a"),
        (lambda: tw.all_reduce({"a": torch.ones(3 + odd)}, "off"), "parameter a: (4,)"),
        (lambda: tw.all_reduce({"a": torch.ones(3)}, Quantized(4 + odd)), "collective.codec.bits"),
    ):
        try:
            build()
            check(False, f"{field}: not found")
        except UsageError as error:
            check("rank 1" in str(error) and field in str(error), f"{field}: {error}")


def codec_of_another_revision_is_named_with_both() -> None:
    with (
        mock.patch.object(Transform, "revision", 2 - dist.get_rank() % 2),
        refused("rank 1 differs from rank 0 in gradient.collective.codec: Transform, revision 1 against Transform,"),
    ):
        Reducer(Net().named_parameters(), TwoHop(Transform(2)))


def second_call_is_refused_before_it_changes_anything() -> None:
    """And so is one after another hook."""
    model, hooked = wrap(), wrap()
    handle = compress_ddp(model, SPARSE)
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    groups = len(_world.pg_map)
    for ddp, words in ((model, "is compressed already: call it once"), (hooked, "a communication hook already")):
        with refused(words):
            compress_ddp(ddp, "off")
    backward(model, 0)
    check(handle.compressing and handle.sent, "the first call's handle does not work any more")
    check(len(_world.pg_map) == groups, "the second call made a process group")


def no_parameter_to_reduce_is_refused() -> None:
    with refused("nothing to reduce"):
        Reducer([("frozen", nn.Parameter(torch.ones(2), requires_grad=False))], Dense())


def complex_parameters_are_refused() -> None:
    turning = nn.ParameterDict({"turn": torch.ones(2, 2, dtype=torch.complex64)})
    with refused("turn is of torch.complex64"):
        compress_ddp(DDP(turning), "off")
    with refused("turn is of torch.complex64"):
        tw.optim.FrozenAdam(turning.named_parameters())


def parameters_of_8_bits_are_refused() -> None:
    with refused("small is of torch.float8_e4m3fn: allowed are real floating types that torch can add"):
        Reducer([("small", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)))], Dense())


def sparse_gradients_are_refused() -> None:
    with refused("weight has a gradient of torch.sparse_coo"):
        table = nn.Embedding(10, 4, sparse=True)
        reducer = Reducer(table.named_parameters(), "off")
        table(torch.tensor([1, 2])).sum().backward()
        reducer.finish()
    with refused("weight has a gradient of torch.sparse_coo"):
        model = DDP(nn.Embedding(10, 4, sparse=True))
        compress_ddp(model, "off")
        model(torch.tensor([1, 2])).sum().backward()


def changed_shape_is_refused() -> None:
    net = Net()
    reducer = Reducer(net.named_parameters(), SPARSE)
    net.last = nn.Linear(16, 5)
    reducer.parameters["last.weight"] = net.last.weight
    net.last.weight.grad = torch.zeros_like(net.last.weight)
    with refused("last.weight"):
        reducer.finish()


def parameter_without_a_gradient_where_ranks_do_not_ask() -> None:
    """With agrees = False nobody knows whether others have one, and zeros in its place would be wrong."""
    used, unused = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40, 30))
    reducer = Reducer([("used", used), ("unused", unused)], Dense(), agrees=False)
    used.grad = torch.ones(40, 30)
    with refused("1 parameters got no gradient in this step: unused", RuntimeError):
        reducer.exchanged()
    reducer.close()


CASES = [
    parameter_without_a_gradient_where_ranks_do_not_ask,
    rank_configured_otherwise_is_named_with_the_field, codec_of_another_revision_is_named_with_both,
    second_call_is_refused_before_it_changes_anything,
    no_parameter_to_reduce_is_refused, complex_parameters_are_refused, parameters_of_8_bits_are_refused,
    sparse_gradients_are_refused,
    changed_shape_is_refused,
]  # fmt: skip
