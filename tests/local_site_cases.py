"""Cases of the LocalSteps tests: what is inside a site. Four ranks are two sites of two."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from local_support import loss_of
from rank_cases import check, check_equal, check_ranks_agree, refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.local_steps.trainers import _Lightning
from thinwire.parallel import LocalSteps, local_steps

HOW = {"every": 3, "fragments": 2, "delay": 1}
EIGHT_BITS = tw.Wire(gradient=tw.Reduction(tw.collectives.Quantized(8), exact_dims=0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def run(model: nn.Module, inner: torch.optim.Optimizer, local: LocalSteps, site: int, steps: range) -> None:
    for step in steps:
        inner.zero_grad()
        loss_of(model, step, site).backward()
        inner.step()
        local.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights, put together where they are sharded."""
    named = model.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def shards_average_with_their_twins() -> None:
    """FSDP2 inside a site is as one rank per site; NaN in one shard returns the site; resumed bit for bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    site = mesh["site"].get_local_rank()
    plain = net()
    plain_inner = inner_of(plain)
    apart = LocalSteps(plain.named_parameters(), plain_inner, "off", mesh["site"], **HOW)
    run(plain, plain_inner, apart, site, range(1, 9))

    def sharded(wire: str | tw.Wire) -> tuple[nn.Module, torch.optim.Optimizer, LocalSteps]:
        model = net()
        fully_shard(model, mesh=mesh["shard"])
        inner = inner_of(model)
        return model, inner, LocalSteps(model.named_parameters(), inner, wire, mesh["site"], **HOW)

    model, inner, local = sharded("off")
    run(model, inner, local, site, range(1, 9))
    check_equal("sharded", whole(model), whole(plain), tolerance=1e-5)
    first_model, first_inner, first = sharded(EIGHT_BITS)
    run(first_model, first_inner, first, site, range(1, 5))
    saved = first.state_dict()
    second_model, second_inner, second = sharded(EIGHT_BITS)
    second.load_state_dict(saved)
    run(first_model, first_inner, first, site, range(5, 9))
    run(second_model, second_inner, second, site, range(5, 9))
    check_equal("resumed", whole(second_model), whole(first_model))
    if dist.get_rank() == 3:
        second.fragments[0].weights()["0.weight"][0, 0] = torch.nan
    second.finish()
    check(second.returns == (site == 1), f"{second.returns} returns on site {site}")
    check_ranks_agree("at the end", whole(second_model))
    for one in (apart, local, first, second):
        one.close()


def one_of_several_copies_sends() -> None:
    """DDP inside a site: the same bits as one rank per site, and copies send nothing over the slow link."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "copy"))
    site, copy = mesh["site"].get_local_rank(), mesh["copy"].get_local_rank()
    results = []
    for copies in (None, mesh["copy"].get_group()):
        model = net()
        inner = inner_of(model)
        local = LocalSteps(model.named_parameters(), inner, EIGHT_BITS, mesh["site"], copies=copies, **HOW)
        run(model, inner, local, site, range(1, 9))
        results.append(whole(model))
        sends = copies is None or copy == 0
        check((local.summary().sent > 0) == sends, f"sent {local.summary().sent}")
        state = (
            local.state_dict()
        )  # copies' names are equal, and a checkpoint keeps one of them: only a sender has residuals
        check(any("/exchange/" in name for name in state) == sends, "whoever sends saves residuals")
        local.load_state_dict(state)
        local.close()
    check_equal("with copies", results[1], results[0])


def a_ddp_model_counts_its_optimisers_steps() -> None:
    """One call: gradients stay local, every step of the optimiser is an inner step; the bits of LocalSteps itself."""
    rank = dist.get_rank()
    plain, wrapped = net(), DistributedDataParallel(net())
    inner = inner_of(plain)
    local = LocalSteps(plain.named_parameters(), inner, EIGHT_BITS, **HOW)
    run(plain, inner, local, rank, range(1, 8))
    other = inner_of(wrapped)
    attached = local_steps(wrapped, EIGHT_BITS, inner=other, **HOW)
    for step in range(1, 8):
        other.zero_grad()
        loss_of(wrapped, step, rank).backward()
        other.step()
    check_equal("attached", whole(wrapped.module), whole(plain))
    check(attached.steps == 7 and attached.rounds == local.rounds > 2, f"{attached.rounds} rounds")
    with refused("a communication hook already"):
        local_steps(wrapped, EIGHT_BITS, inner=other)
    for one in (local, attached):
        one.close()


def lightnings_checkpoints_hold_all_sites() -> None:
    """Its hooks in its order: what rank 0 would write has every site's weights, and all go on with the same bits."""
    rank, checkpoint, results = dist.get_rank(), {}, []
    for resumes in (False, True):
        model = DistributedDataParallel(net())
        inner = inner_of(model)
        trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), optimizers=[inner], global_step=5 * resumes)
        attachment = _Lightning(EIGHT_BITS, dict(HOW))
        if resumes:
            with refused("no state of local steps"):
                attachment.on_train_start(trainer, None)
            attachment.on_load_checkpoint(trainer, None, dict(checkpoint))
        attachment.on_train_start(trainer, None)
        for step in range(6 if resumes else 1, 8):
            inner.zero_grad()
            loss_of(model, step, rank).backward()
            inner.step()
            if step == 5:
                attachment.on_save_checkpoint(trainer, None, checkpoint)
        results.append(whole(model.module))
        attachment.local.close()
    (state,) = checkpoint.values()
    check(len({name.partition("/")[0] for name in state}) == dist.get_world_size(), "the state of every site")
    check_ranks_agree("what rank 0 writes", {name: value.double() for name, value in state.items()})
    check_equal("resumed", results[1], results[0])


CASES = [
    shards_average_with_their_twins,
    one_of_several_copies_sends,
    a_ddp_model_counts_its_optimisers_steps,
    lightnings_checkpoints_hold_all_sites,
]
