"""Cases of the LocalSteps tests: formulas, weights, NaN, resume at any step, another number of sites, mistakes."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local_support import Net, Sites, inner_of, train, trained
from rank_cases import check, check_equal, check_ranks_agree, refused
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives.groups import subgroup
from thinwire.collectives.messages import gather
from thinwire.local_steps.fragment import Fragment
from thinwire.parallel import LocalSteps

FOUR_BITS = tw.Wire(gradient=tw.Reduction(tw.collectives.Quantized(4), exact_dims=0))
FEW = {"every": 4, "fragments": 2, "delay": 1}


def make(wire: Any = FOUR_BITS, **how: Any) -> tuple[Net, torch.optim.Optimizer, LocalSteps]:
    model = Net()
    inner = inner_of(model)
    return model, inner, LocalSteps(model.named_parameters(), inner, wire, **how)


def run(model: nn.Module, inner: torch.optim.Optimizer, local: LocalSteps, steps: range, **how: float) -> None:
    for step in steps:
        train(model, inner, step, dist.get_rank())
        local.step(**how)


def carried_fragments_follow_the_formula() -> None:
    """θ ← anchor + (θ − θ_sent), every fragment at its own offset, a step late; LocalSGD outside."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model, inner, local = make("off", outer=lambda a: torch.optim.SGD(a, 1.0), **FEW)
    sites, under_way = Sites(size), {}
    for step in range(1, 18):
        train(model, inner, step, rank)
        local.step()
        sites.train(step)
        for number, (due, mean, sent) in list(under_way.items()):
            if due == step:
                del under_way[number]
                for name in mean:
                    sites.anchor[name] = sites.anchor[name] - mean[name]
                    for site in range(size):
                        weight = sites.weights(site)[name]
                        weight.copy_(sites.anchor[name] + (weight - sent[site][name]))
        for number, fragment in enumerate(local.fragments):
            if step % 4 == 2 * number:
                mean = {name: sites.mean(name) for name in fragment.parameters}
                under_way[number] = (
                    step + 1,
                    mean,
                    [{n: w.clone() for n, w in sites.weights(s).items()} for s in range(size)],
                )
    check_equal("weights", trained(model), sites.weights(rank), tolerance=1e-6)
    check(local.rounds == 8, f"{local.rounds} rounds")
    check(
        int(model.seen) == 17 * (1 + rank) and bool((model.fixed == 1).all()), "buffers and frozen ones are left alone"
    )
    with local.at_anchor():
        check_ranks_agree("anchors", trained(model))
    check_equal("weights after", trained(model), sites.weights(rank), tolerance=1e-6)
    local.finish()
    check_ranks_agree("at the end", trained(model))
    local.close()


def the_last_round_sends_all_that_is_left() -> None:
    """finish(last="off"): the anchor moves by the exact mean of what sites have learnt and not sent, residuals too."""
    for steps in (7, 8):  # a step since the last round, or none
        model, inner, local = make(tw.collectives.Gather(tw.codecs.TopK(0.1)), every=4)
        run(model, inner, local, range(1, steps + 1))
        rank, size = dist.get_rank(), dist.get_world_size()
        (fragment,) = local.fragments
        left = torch.cat(list(fragment.outer_gradient().values())) + _residuals(local)
        expected = _anchors(fragment) - torch.stack(gather(left, None)).sum(0) / size
        check(bool(_residuals(local).any()), f"rank {rank} has a residual")
        before = local.summary().sent
        local.finish(last="off")
        check_equal("all that was left", {"": _anchors(fragment)}, {"": expected}, tolerance=1e-6)
        check_ranks_agree("at the end", trained(model))
        check(not bool(_residuals(local).any()) and local.summary().sent > before, "nothing is left")
        local.close()


def a_share_is_mixed() -> None:
    model, inner, local = make("off", every=3, delay=2, mix=0.25)
    run(model, inner, local, range(1, 5))
    train(model, inner, 5, dist.get_rank())
    before = trained(model)
    local.step()
    expected = {n: 0.25 * w + 0.75 * local.fragments[0].anchors[n].detach() for n, w in before.items()}
    check_equal("mixed", trained(model), expected)
    local.close()


def _residuals(local: LocalSteps) -> Tensor:
    exchange = local.site.exchange
    found = [exchange.channels[unit].state.read("e", unit.name) for unit in exchange.units]
    return torch.cat([torch.zeros(u.numel) if e is None else e for u, e in zip(exchange.units, found)])


def _anchors(fragment: Fragment) -> Tensor:
    return torch.cat([fragment.anchors[n].detach().reshape(-1) for u in fragment.units for n in u.parameters])


def tokens_weigh_and_mass_is_conserved() -> None:
    """Σ w_i·(Δ_i + residual before − residual after) = mean, with w_i the share of tokens."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model, inner, local = make(every=2, outer=lambda a: torch.optim.SGD(a, 1.0))
    share = (1 + rank) / sum(range(1, size + 1))
    for last in (2, 4):
        train(model, inner, last - 1, rank)
        local.step(tokens=10 * (1 + rank))
        train(model, inner, last, rank)
        (fragment,) = local.fragments
        anchor = _anchors(fragment)
        moved = torch.cat(list(fragment.outer_gradient().values()))
        before = _residuals(local)
        local.step(tokens=10 * (1 + rank))
        part = share * moved + (before - _residuals(local)) / size
        dist.all_reduce(part)
        error = float((anchor - _anchors(fragment) - part).abs().max())
        check(error < 1e-6, f"the mean and what was sent differ by {error:.1e}")
        check(last == 2 or bool(before.any()), "residuals are kept")
    local.close()


def a_site_with_nan_has_no_weight() -> None:
    """The others average without it; it returns to the anchor, its residual stays, and it trains on."""
    size, rank = dist.get_world_size(), dist.get_rank()
    wire = tw.Wire(gradient=tw.Reduction(tw.collectives.Gather(tw.codecs.Quantize(8)), exact_dims=0))
    model, inner, local = make(wire, every=2, outer=lambda a: torch.optim.SGD(a, 1.0))
    run(model, inner, local, range(1, 4))
    train(model, inner, 4, rank)
    if rank == 1:
        model.layers[0].weight.data[0, 0] = torch.nan
        inner.state[model.layers[0].weight]["exp_avg"].fill_(torch.nan)
    (fragment,) = local.fragments
    before, anchor = _residuals(local), _anchors(fragment)
    others = torch.cat(list(fragment.outer_gradient().values())) * (size / (size - 1)) + before  # P·w·Δ + residual
    others = torch.zeros_like(others) if rank == 1 else others
    dist.all_reduce(others)
    local.step()
    check_ranks_agree("weights", trained(model))
    moved = anchor - _anchors(fragment)
    error = float((moved - others / size).abs().max() / moved.abs().max())
    check(error < 0.01, f"the mean of the others differs by {error:.1e}")
    check((local.returns, local.skips) == (rank == 1, 0), f"{local.returns} returns, {local.skips} skips")
    check(torch.equal(_residuals(local), before) == (rank == 1), "its residual stays")
    run(model, inner, local, range(5, 9))
    check((local.returns, local.rounds) == (rank == 1, 4), "it trains on, with finite moments")
    check_ranks_agree("weights later", trained(model))
    local.close()


def a_mean_that_is_not_finite_drops_the_round() -> None:
    model, inner, local = make(every=1)
    run(model, inner, local, range(1, 3))
    anchors = {n: a.detach().clone() for n, a in local.fragments[0].anchors.items()}
    before = _residuals(local)
    model.layers[1].weight.data.fill_(-3e38)
    local.step(tokens=1 if dist.get_rank() else 3)  # more than its share: P·w·Δ leaves the range
    check_equal("back at the anchor", trained(model), anchors)
    check(torch.equal(before, _residuals(local)) and local.skips == 1, f"{local.skips} rounds were dropped")
    for p in model.parameters():
        p.data.fill_(torch.nan)
    local.step()
    check_equal("back again", trained(model), anchors)
    check((local.skips, local.returns) == (2, 1), "nobody was finite")
    local.close()


def warmup_averages_exactly() -> None:
    model, inner, local = make(every=2, warmup=3)
    for step in range(1, 4):
        train(model, inner, step, dist.get_rank())
        flat = torch.cat([w.reshape(-1) for w in trained(model).values()])
        dist.all_reduce(flat)
        local.step()
        mean = torch.cat([w.reshape(-1) for w in trained(model).values()])
        check(torch.allclose(mean, flat / dist.get_world_size(), atol=1e-6), f"step {step}: not the mean")
    check(not local.fragments[0].outer.state, "the outer optimiser has not been asked")
    run(model, inner, local, range(4, 6))
    check(local.rounds == 4 and bool(local.fragments[0].outer.state), f"{local.rounds} rounds")
    local.close()


def resumed_at_any_step_has_the_same_bits(folder: str) -> None:
    """Also between a fragment's sending and its application; once through torch's checkpoints."""
    how = {"every": 4, "fragments": 2, "delay": 2, "warmup": 1, "keep": 0.75}
    model, inner, local = make(**how)
    run(model, inner, local, range(1, 14), tokens=1 + dist.get_rank())
    for cut in (1, 3, 4, 5, 6):  # fragments are sent after 3, 5, 7 and 9, and applied two steps later
        first_model, first_inner, first = make(**how)
        run(first_model, first_inner, first, range(1, cut + 1), tokens=1 + dist.get_rank())
        saved = first.state_dict()
        second_model, second_inner, second = make(**how)
        if cut == 4:
            check(bool(first.in_flight), "a fragment is under way")
            path = os.path.join(folder, "resumed")
            dcp.save({"local": saved}, checkpoint_id=path)
            saved = second.read_state(path, "local")
        second.load_state_dict(saved)
        run(second_model, second_inner, second, range(cut + 1, 14), tokens=1 + dist.get_rank())
        check_equal(f"resumed after {cut}", trained(second_model), trained(model))
        check_equal(f"state after {cut}", second.state_dict(), local.state_dict())
        check(second.summary().steps == 13 - cut, f"{second.summary().steps} steps of its own")
        first.close()
        second.close()
    local.close()


def other_sites_conserve_the_mean_residual(folder: str) -> None:
    """Four sites' state, read by two: the mean residual, the anchor, and what was under way is applied."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model, inner, local = make(every=4, delay=2)
    run(model, inner, local, range(1, 10))  # sent after 8
    path = os.path.join(folder, "sites")
    dcp.save({"local": local.state_dict()}, checkpoint_id=path)
    flat = _residuals(local)
    dist.all_reduce(flat)
    local.finish()
    half = subgroup([r for r in range(size) if r // 2 == rank // 2], dist.group.WORLD)
    other_model, other_inner, other = make(every=4, delay=2, group=half)
    other.load_state_dict(other.read_state(path, "local"))
    check(torch.allclose(_residuals(other), flat / size, atol=1e-7) and bool(flat.any()), "the mean residual")
    check(other.steps == 9 and not other.in_flight and other.rounds == 1, "what was under way is applied")
    check_ranks_agree("anchors", trained(other_model))
    run(other_model, other_inner, other, range(10, 13))
    other.finish()
    check_ranks_agree("at the end", trained(other_model), half)
    for one in (local, other):
        one.close()


def host_memory_changes_no_bit() -> None:
    model, inner, local = make(**FEW)
    other_model, other_inner, other = make(host=True, **FEW)
    run(model, inner, local, range(1, 8))
    run(other_model, other_inner, other, range(1, 8))
    check_equal("host", trained(other_model), trained(model))
    summary, values = local.summary(), sum(w.numel() for w in trained(model).values())
    size = dist.get_world_size()
    check(summary.would_have_sent == 7 * (8 * values * (size - 1) // size), "fp32 after each of 7 steps")
    check(0 < summary.sent == local.site.exchange.sent < summary.would_have_sent / 8, str(summary))
    for one in (local, other):
        one.close()


def mistakes_are_refused() -> None:
    rank = dist.get_rank()
    for words, how in (
        ("delay = 4", {"every": 4, "delay": 4}), ("mix = 1", {"mix": 1.0}), ("keep = 2", {"keep": 2}),
        ("no residual to keep", {"wire": "off", "keep": 1}), ("grow = 3", {"grow": 3, "fragments": 2}),
        ("fragments = 9", {"fragments": 9, "every": 9}), ("host = 'yes': must be true", {"host": "yes"}),
        ("nesterov = 'no': must be true", {"wire": {"preset": "diloco", "nesterov": "no"}}),
        ("outer_lr = inf", {"wire": {"preset": "diloco", "outer_lr": float("inf")}}),
        ("no preset of local steps (diloco", {"wire": "sparseloko"}),
        ("differs from rank 0 in local.every", {"every": 4 + (rank > 0)}),
    ):  # fmt: skip
        with refused(words):
            make(**how)
    model = Net()
    model.layers[0].weight.data += rank
    with refused("the weights of layers.0.weight"):
        LocalSteps(model.named_parameters(), inner_of(model), "diloco")
    with refused("no such key"):
        make({"evry": 3, "every": 2})
    with refused("it has none of them"):
        LocalSteps(model.named_parameters(), inner_of(Net()), "diloco")
    local = make(every=1)[2]
    for tokens in (-1.0, float("nan"), float("inf")):
        with refused("0 or more, and finite"):
            local.step(tokens)
    check(local.steps == 0, "a step that is refused does not count")
    local.steps = rank % 2  # a step ahead
    with refused("all sites make as many inner steps"):
        local.step()
    local.close()


def cases(folder: str) -> list[Any]:
    return [
        carried_fragments_follow_the_formula, the_last_round_sends_all_that_is_left, a_share_is_mixed,
        tokens_weigh_and_mass_is_conserved,
        a_site_with_nan_has_no_weight, a_mean_that_is_not_finite_drops_the_round, warmup_averages_exactly,
        functools.partial(resumed_at_any_step_has_the_same_bits, folder),
        functools.partial(other_sites_conserve_the_mean_residual, folder), host_memory_changes_no_bit,
        mistakes_are_refused,
    ]  # fmt: skip
