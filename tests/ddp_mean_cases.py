"""Cases of the DDP tests: which mean of the gradients the ranks get."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from ddp_support import SPARSE, Net, backward, batch, dense, gradients, loss_of, wrap
from rank_cases import check, check_equal, check_ranks_agree, refused
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.collectives import Collective, Dense, LowRank, OkTopk, Quantized, flows
from thinwire.collectives.groups import new_group, subgroup, twin, unmetered
from thinwire.collectives.messages import gather
from thinwire.data_parallel.reducer import Reducer
from thinwire.parallel import compress_ddp
from thinwire.torch_private.groups import timeout_of
from thinwire.train.tune.links import exchanges

ALL_VALUES = tw.Wire(gradient=tw.Reduction(OkTopk(1.0), exact_dims=0))
EVERY_KIND = (SPARSE, tw.Wire(gradient=LowRank(2)), tw.Wire(gradient=Quantized(4)))


def exact_wire_gives_the_mean_of_plain_ddp() -> None:
    model = wrap()
    compress_ddp(model, Dense())
    for step in range(3):
        backward(model, step)
        check_equal(f"step {step}", gradients(model), dense(step), 1e-5)


def selecting_all_values_gives_the_dense_mean() -> None:
    model = wrap()
    compress_ddp(model, ALL_VALUES)
    for step in range(3):
        backward(model, step)
        check_equal(f"step {step}", gradients(model), dense(step), 1e-4)


def ddp_buckets_and_reducer_give_the_same_bits() -> None:
    """DDP rebuilds its buckets after the first step."""
    for wire in EVERY_KIND:
        model, alone = wrap(), Net()
        compress_ddp(model, wire)
        reducer = Reducer(alone.named_parameters(), wire)
        for step in range(5):
            backward(model, step)
            backward(alone, step)
            reducer.finish()
            check_equal(f"{wire.gradient.collective} step {step}", gradients(model), gradients(alone))
        reducer.close()


def order_in_which_units_are_ready_changes_no_bit() -> None:
    in_order, shuffled = Net(), Net()
    one = Reducer(in_order.named_parameters(), SPARSE)
    two = Reducer(shuffled.named_parameters(), SPARSE)
    check(len(two.units) > 2, f"the case wants several units, not {len(two.units)}")
    for step in range(4):
        backward(in_order, step)
        backward(shuffled, step)
        units = two.units if (dist.get_rank() + step) % 2 else two.units[::-1]
        for unit in units[: 1 + dist.get_rank() % len(units)]:
            two.ready(unit)
        one.finish()
        two.finish()
        check_equal(f"step {step}", gradients(in_order), gradients(shuffled))
    one.close()
    two.close()


def streams_change_no_bit() -> None:
    """Messages over three flows, in pieces of seven bytes, and over one; with receives posted early and without."""
    with mock.patch.object(flows, "LEAST", 7):
        for wire in (SPARSE, tw.Wire.of("max"), tw.Wire.of("off")):
            three_net, one_net = Net(), Net()
            three = Reducer(three_net.named_parameters(), replace(wire, streams=3))
            one = Reducer(one_net.named_parameters(), wire)
            for step in range(3):
                backward(three_net, step)
                backward(one_net, step)
                check(three.finish() and one.finish(), f"step {step} was dropped")
                check_equal(f"step {step}", gradients(three_net), gradients(one_net))
            check(
                three.exchange.sent == one.exchange.sent,
                f"{three.exchange.sent} bytes, {one.exchange.sent} over one flow",
            )
            check(three.exchange.flows.count == 3, "there is one flow")
            three.close()
            one.close()


def mean_and_residuals_conserve_the_gradients_sum() -> None:
    """Σ residual' + P·mean = Σ (residual + gradient), every step."""
    size, model, alone = dist.get_world_size(), wrap(Net(torch.float64)), Net(torch.float64)
    handle = compress_ddp(model, SPARSE)
    before = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
    for step in range(12):
        for each in (model, alone):
            each.zero_grad()
            loss_of(each, batch(step, dtype=torch.float64)).backward()
        state = {k.partition("/")[2]: v for k, v in handle.state_dict().items()}
        for (name, p), q in zip(model.module.named_parameters(), alone.parameters()):
            kept = state[f"e/{name}"].clone()
            put, got = before[name] + q.grad, kept + p.grad
            before[name] = kept
            for x in (put, got):
                dist.all_reduce(x)
            lost = float((put - got).abs().max())
            check(torch.allclose(put, got, atol=1e-12 * size), f"step {step} {name}: lost {lost:.1e}")
        left = any(v.any() for k, v in state.items() if k.startswith("e/"))
        check(left, f"step {step}: nothing was left out, so nothing was tested")


def accumulated_backwards_are_exchanged_once() -> None:
    """Three backwards, one exchange, of their sum."""
    model = wrap()
    handle = compress_ddp(model, tw.collectives.Gather(tw.codecs.Identity()))
    for step in range(2):
        model.zero_grad()
        for i in range(3):
            with model.no_sync() if i < 2 else contextlib.nullcontext():
                loss_of(model, batch(step + 50 * i)).backward()
        check_equal(f"step {step}", gradients(model), dense(step, accumulate=3), 1e-5)
    made = handle.reducer.exchange.steps
    check(made == 2, f"{made} exchanges in two steps: no_sync was ignored")


def group_of_ranks_that_know_unlike_many_groups() -> None:
    rank = dist.get_rank()
    if rank == 0:
        for _ in range(2):
            dist.new_group([0], use_local_synchronization=True)
    pair = new_group([0, 1] if rank < 2 else [rank], dist.group.WORLD)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=pair)
    check(int(total) == (3 if rank < 2 else rank + 1), f"the pair's sum is {int(total)}")
    for _ in range(2 if rank else 0):  # torch 2.15 itself wants all ranks to have made equally many
        dist.new_group([rank], use_local_synchronization=True)


def own_groups_wait_as_long_as_their_parents() -> None:
    size, rank, timeout = dist.get_world_size(), dist.get_rank(), timedelta(seconds=12)
    parent = dist.new_group(list(range(size)), timeout=timeout)
    reducer = Reducer(Net().named_parameters(), SPARSE, parent)
    made = {
        "twin": twin(parent), "new_group": new_group([rank], parent), "subgroup": subgroup([rank], parent),
        "a reducer's": unmetered(reducer.exchange.group),
    }  # fmt: skip
    for name, group in made.items():
        check(timeout_of(group) == timeout, f"{name} waits {timeout_of(group)}")
    reducer.close()


def several_models_and_groups_do_not_mix() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    first = size // 2 or 1  # ranks of the first group
    halves = dist.new_group(list(range(first))), dist.new_group(list(range(first, size)))
    mine = halves[0] if rank < first else halves[1]
    once, twice, in_half = wrap(), wrap(), wrap(process_group=mine)
    for model in (once, twice, in_half):
        compress_ddp(model, ALL_VALUES)
    for step in range(2):
        loss = loss_of(once, batch(step)) + 2 * loss_of(twice, batch(step)) + loss_of(in_half, batch(step))
        for model in (once, twice, in_half):
            model.zero_grad()
        loss.backward()
        check_equal("first model", gradients(once), dense(step), 1e-5)
        check_equal("second model", gradients(twice), {n: 2 * g for n, g in dense(step).items()}, 1e-5)
        flat = torch.cat([g.reshape(-1) for g in gradients(in_half).values() if g is not None])
        check(all(torch.equal(flat, x) for x in gather(flat, mine)), f"step {step}: the group's ranks differ")
        same = [torch.equal(flat, x) for x in gather(flat, None)]
        check(size < 3 or not all(same), "two groups agree, so the group was ignored")


def excluded_parameters_stay_exact() -> None:
    model = wrap()
    compress_ddp(model, tw.Wire(gradient=tw.Reduction(OkTopk(0.02), exclude=("left.*",), exact_dims=1)))
    for step in range(3):
        backward(model, step)
        got, exact = gradients(model), dense(step)
        kept = {n: g for n, g in got.items() if n.startswith("left.") or g.dim() == 1}
        check_equal(f"step {step}", kept, exact, 1e-6)
        compressed = not torch.allclose(got["first.weight"], exact["first.weight"], atol=1e-6)
        check(compressed, "first.weight was not compressed, so nothing was tested")


class Odd(nn.Module):
    """A single number, an empty tensor, a transposed one and one in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(16, 12, generator=g).t())
        kernel = torch.randn(4, 3, 3, 3, generator=g)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.turned).square().mean() * self.scale + self.empty.sum() + self.kernel.pow(3).mean() * x.mean()


def parameters_of_every_form_alone_in_a_unit_or_not() -> None:
    kinds = {"dense": Dense(), "sparse": OkTopk(0.2), "low rank": LowRank(2), "4 bits": Quantized(4)}
    for name, collective in kinds.items():
        for unit_mb in (1e-6, 25.0):
            _odd_tensors(name, collective, unit_mb)


def _odd_tensors(name: str, collective: Collective, unit_mb: float) -> None:
    wire = tw.Wire(gradient=tw.Reduction(collective, exact_dims=0, unit_mb=unit_mb))
    alone, model, mean, size = Odd(), DDP(Odd()), Odd(), dist.get_world_size()
    reducer, handle = Reducer(alone.named_parameters(), wire), compress_ddp(model, wire)
    for step in range(3):
        for each in (alone, model, mean):
            each.zero_grad()
        alone(batch(step)).backward()
        model(batch(step)).backward()
        reducer.finish()
        tolerance = 1e-5 if name == "dense" else 0.0  # DDP's own all-reduce divides first
        check_equal(f"{name}, units of {unit_mb} MB", gradients(model), gradients(alone), tolerance)
        if name == "dense":
            sum(mean(batch(step, rank)) / size for rank in range(size)).backward()
            check_equal("mean", gradients(alone), gradients(mean), 1e-5)
    reducer.load_state_dict(reducer.state_dict())
    reducer.close()
    handle.close()


def parameters_of_every_form_are_measured() -> None:
    """By the measurement of a network that chooses the wire of a training run."""
    shapes = {name: tuple(p.shape) for name, p in Odd().named_parameters()}
    exact, cast = exchanges(shapes, [None, tw.Wire.of("bf16").gradient], None, torch.device("cpu"))
    check(0 < cast.sent < exact.sent, f"measured: {exact.sent} bytes exact, {cast.sent} in bf16")


def empty_parameter_is_reduced_like_any() -> None:
    for wire in EVERY_KIND:
        empty, full = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.zeros(6, 4))
        reducer = Reducer([("empty", empty), ("full", full)], wire)
        empty.grad, full.grad = torch.empty(0, 4), torch.full((6, 4), 1.0 + dist.get_rank())
        check(reducer.finish(), f"{wire.gradient.collective}: the step was skipped")
        check(tuple(empty.grad.shape) == (0, 4), f"{wire.gradient.collective}: shape {tuple(empty.grad.shape)}")
        reducer.close()


def all_reduce_with_its_state_in_our_hands_equals_the_reducer() -> None:
    net, state = Net(), {}
    reducer = Reducer(net.named_parameters(), SPARSE)
    for step in range(4):
        backward(net, step)
        means = tw.all_reduce({n: p.grad.clone() for n, p in net.named_parameters()}, SPARSE, None, state)
        reducer.finish()
        check_equal(f"step {step}", gradients(net), means)
    reducer.close()
    with refused("not finite", ValueError):
        bad = torch.tensor([torch.nan if dist.get_rank() == 0 else 1.0])
        tw.all_reduce({"x": bad}, SPARSE, None, state)


def finite_gradients_whose_sum_overflows_have_a_finite_mean() -> None:
    """As under plain DDP, which divides first."""
    for wire in ("off", "safe", "max", "paper-oktopk", tw.Wire(gradient=LowRank(2)), SPARSE):
        parameter = nn.Parameter(torch.zeros(40, 30))
        reducer = Reducer([("x", parameter)], wire)
        parameter.grad = torch.full((40, 30), 3e38)
        good = reducer.finish()
        mean = parameter.grad
        if wire != tw.Wire(gradient=LowRank(2)):  # whose factors leave the range: one rollback everywhere
            most = mean.abs().max()
            check(good and 2.8e38 < most < 3.3e38, f"{wire}: {'kept' if good else 'dropped'}, {most}")
        else:
            check(not good and mean.isnan().all(), f"{wire}: {'kept' if good else 'dropped'}, {mean[0, :3]}")
        parameter.grad = torch.ones(40, 30)
        check(reducer.finish() and parameter.grad.isfinite().all(), f"{wire}: the next step is not finite")
        check_ranks_agree(f"{wire}", {"mean": parameter.grad})
        reducer.close()


def value_beyond_the_codec_on_one_rank_drops_the_step_on_all() -> None:
    """1e5 is finite, and too large for fp16; likewise a mean too large for the parameter's type."""
    wire = tw.Wire(gradient=tw.Reduction(tw.collectives.TwoHop(tw.codecs.Cast("fp16")), exact_dims=0))
    for collective in (wire, tw.collectives.Gather(tw.codecs.Cast("fp16"))):
        parameter = nn.Parameter(torch.zeros(40, 30))
        reducer = Reducer([("x", parameter)], collective)
        parameter.grad = torch.full((40, 30), 1e5 if dist.get_rank() == 0 else 1.0)
        check(not reducer.finish(), f"{collective}: was not dropped")
        check(parameter.grad.isnan().all(), f"{collective}: {parameter.grad[0, :3]}")
        parameter.grad = torch.ones(40, 30)
        check(reducer.finish() and torch.equal(parameter.grad, torch.ones(40, 30)), f"{collective}: {parameter.grad}")
        reducer.close()
        with refused("left the range", ValueError):
            tw.all_reduce({"x": torch.full((40, 30), 1e5 if dist.get_rank() == 0 else 1.0)}, collective)
    half = nn.Parameter(torch.zeros(40, 30, dtype=torch.float16))
    reducer = Reducer([("x", half)], SPARSE)
    for step in range(3):
        half.grad = torch.full_like(half, 6e4)
        good = reducer.finish()
        check(good == bool(half.grad.isfinite().all()), f"step {step} of fp16: good is {good}, {half.grad[0, :3]}")
    check(reducer.skips > 0, "no mean was too large for fp16, so nothing was tested")
    reducer.close()


CASES = [
    exact_wire_gives_the_mean_of_plain_ddp, selecting_all_values_gives_the_dense_mean,
    ddp_buckets_and_reducer_give_the_same_bits, order_in_which_units_are_ready_changes_no_bit,
    streams_change_no_bit, mean_and_residuals_conserve_the_gradients_sum, accumulated_backwards_are_exchanged_once,
    group_of_ranks_that_know_unlike_many_groups, own_groups_wait_as_long_as_their_parents,
    several_models_and_groups_do_not_mix, excluded_parameters_stay_exact,
    parameters_of_every_form_alone_in_a_unit_or_not, parameters_of_every_form_are_measured,
    finite_gradients_whose_sum_overflows_have_a_finite_mean, value_beyond_the_codec_on_one_rank_drops_the_step_on_all,
    empty_parameter_is_reduced_like_any, all_reduce_with_its_state_in_our_hands_equals_the_reducer,
]  # fmt: skip
