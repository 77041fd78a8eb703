"""Cases of the DDP tests: what a training loop does around the gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from ddp_support import SPARSE, Net, backward, batch, dense, gradients, loss_of, residual_key, wrap
from rank_cases import check, check_equal, check_ranks_agree, differences
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives import OkTopk
from thinwire.data_parallel import auto_switch
from thinwire.data_parallel.ddp import CompressedDDP
from thinwire.data_parallel.reducer import Reducer
from thinwire.parallel import compress_ddp


def clipped_training_stays_equal_on_all_ranks() -> None:
    model = wrap()
    compress_ddp(model, SPARSE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        check(norm > 0.05, f"step {step}: norm {norm}, so nothing was clipped")
    check_ranks_agree("clipped", model)


class Scaler:
    """The part of a GradScaler that thinwire asks for."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def changing_loss_scale_changes_no_bit() -> None:
    """Residuals are kept in the gradient's own unit."""
    plain, scaled, scaler = wrap(), wrap(), Scaler()
    compress_ddp(plain, SPARSE)
    compress_ddp(scaled, SPARSE, scaler=scaler)
    for step in range(6):
        scaler.scale = 2.0 ** (step % 3 + 5)
        backward(plain, step)
        scaled.zero_grad()
        (loss_of(scaled, batch(step)) * scaler.scale).backward()
        unscaled = {n: g / scaler.scale for n, g in gradients(scaled).items() if g is not None}
        check_equal(f"step {step}", unscaled, gradients(plain))


def grad_scaler_skips_the_step_that_overflows_on_one_rank() -> None:
    """Under autocast; and it still learns."""
    model = wrap()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    handle = compress_ddp(model, SPARSE, scaler=scaler)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(0))
        broken = step == 3 and dist.get_rank() == dist.get_world_size() - 1
        scaler.scale(loss * torch.inf if broken else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    check_ranks_agree("scaled", model)
    check(handle.skips == 1, f"{handle.skips} steps were skipped, not one")
    check(losses[-1] < losses[0], f"the loss did not fall: {losses}")


def unused_branch_keeps_its_gradient_and_residual() -> None:
    """A branch used by one rank only gets a gradient; used by nobody, DDP leaves .grad alone and the residual waits."""
    model = wrap(find_unused_parameters=True)
    handle = compress_ddp(model, SPARSE)
    backward(model, 0)
    backward(model, 1, branches="lr" if dist.get_rank() == 0 else "l")
    check(model.module.right.weight.grad is not None, "a branch used by rank 0 got no gradient")
    before = handle.state_dict()[residual_key("right.weight")].clone()
    model.zero_grad(set_to_none=True)
    loss_of(model, batch(2), branches="l").backward()
    check(model.module.right.weight.grad is None, "a branch that nobody used got a gradient")
    after = handle.state_dict()[residual_key("right.weight")]
    check(before.any(), "there is no residual, so nothing was tested")
    check(torch.equal(before, after), "the residual of an unused branch was spent")


def static_graph_changes_no_bit() -> None:
    static, usual = wrap(static_graph=True), wrap()
    compress_ddp(static, SPARSE)
    compress_ddp(usual, SPARSE)
    for step in range(4):
        backward(static, step)
        backward(usual, step)
        check_equal(f"step {step}", gradients(static), gradients(usual))


def layer_frozen_in_mid_run_keeps_its_residual() -> None:
    """One frozen from the start has no state; one frozen later wakes with its residual."""
    net = Net()
    net.left.requires_grad_(False)
    model = wrap(net, find_unused_parameters=True)
    handle = compress_ddp(model, SPARSE)
    backward(model, 0)
    check(residual_key("left.weight") not in handle.state_dict(), "a frozen layer has state")
    check(net.left.weight.grad is None, "a frozen layer has a gradient")
    kept = handle.state_dict()[residual_key("right.weight")].clone()
    net.right.requires_grad_(False)
    backward(model, 1)
    now = handle.state_dict()[residual_key("right.weight")]
    check(torch.equal(kept, now), "a layer frozen in mid-run lost its residual")
    net.right.requires_grad_(True)
    backward(model, 2)
    check(net.right.weight.grad is not None, "the layer got no gradient after it was unfrozen")


def wrapping_again_with_more_parameters_keeps_residuals() -> None:
    """As with LoRA, more parameters train later. The new units take over the residuals of the old ones by name."""
    net = Net()
    net.first.requires_grad_(False)
    model = wrap(net)
    handle = compress_ddp(model, SPARSE)
    for step in range(3):
        backward(model, step)
    state = handle.state_dict()
    handle.close()
    net.first.requires_grad_(True)
    model = wrap(net)
    second = compress_ddp(model, SPARSE)
    second.load_state_dict(state)
    now = second.state_dict()
    for key in map(residual_key, ("left.weight", "last.bias")):
        check(torch.equal(state[key], now[key]), f"{key} is lost")
    backward(model, 3)
    check_ranks_agree("gradients", gradients(model))


def nan_on_one_rank_is_rolled_back_by_all() -> None:
    """Gradients are NaN (or zero), and the next step is as if it had not been."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for option in ("nan", "zero"):
        model = wrap()
        handle = compress_ddp(model, SPARSE, nonfinite=option)
        for step in range(3):
            backward(model, step)
        before = handle.state_dict()
        model.zero_grad()
        (loss_of(model, batch(3)) * (torch.nan if last else 1.0)).backward()
        flat = torch.cat([g.reshape(-1) for g in gradients(model).values() if g is not None])
        check(flat.isnan().all() if option == "nan" else not flat.any(), f"{option}: gradients are {flat[:3]}")
        check(handle.skipped and handle.skips == 1, f"{option}: {handle.skips} steps were skipped, not one")
        after = handle.state_dict()
        changed = [n for n in before if not n.endswith("/step") and not torch.equal(before[n], after[n])]
        check(not changed, f"{option}: the rolled back step changed {changed[:2]}")
        backward(model, 4)
        check(not handle.skipped, f"{option}: the next step was skipped too")
        check_ranks_agree(f"{option}: later", gradients(model))


def exception_in_the_bracket_drops_the_step() -> None:
    """An exception inside `step` drops what was written; without one it is kept."""
    model = wrap()
    handle = compress_ddp(model, SPARSE)
    backward(model, 0)
    before = handle.state_dict()

    def changed() -> list[str]:
        return [n for n, v in handle.state_dict().items() if "/e/" in n and not torch.equal(v, before[n])]

    try:
        with handle.step():
            backward(model, 1)
            raise KeyError("on purpose")
    except KeyError:
        pass
    check(not changed(), f"dropped, but changed: {changed()[:2]}")
    with handle.step():
        backward(model, 2)
    check(changed(), "kept, but nothing changed")


def exception_on_one_rank_drops_the_step_on_all() -> None:
    """Before, within and after its pass; ages of thresholds and regions, which decide what is sent, stay equal."""
    net = Net()
    reducer = Reducer(net.named_parameters(), SPARSE)
    for step, place in enumerate(("none", "before", "within", "after", "second", "none", "none", "none")):
        before, skips = reducer.state_dict(), reducer.skips
        try:
            with reducer.step():
                for each in range(2):
                    _raise_if(place == "before" or (place == "second" and each == 1))
                    backward(net, 2 * step + each)
                    reducer.ready(reducer.units[-1])
                    _raise_if(place == "within")
                    reducer.finish()
                _raise_if(place == "after")
        except KeyError as error:
            check("on purpose" in str(error), f"{place}: raised was {error}")
        dropped = place != "none"
        check(reducer.skipped == dropped and reducer.skips == skips + dropped, f"{place}: skipped is {reducer.skipped}")
        after = reducer.state_dict()
        changed = [
            n for n in after if not n.endswith("/step") and not torch.equal(before.get(n, after[n] + 1), after[n])
        ]
        check(bool(changed) != dropped, f"{place}: changed {changed[:2]}")
        ages = {n.partition("/")[2]: v for n, v in after.items() if n.endswith(("/age", "/step"))}
        check_ranks_agree(f"{place}: ages", ages)
    check_ranks_agree("gradients", gradients(net))
    reducer.close()


def _raise_if(condition: bool) -> None:
    """On the last rank."""
    if condition and dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("on purpose")


def exception_around_backward_drops_the_step_on_all() -> None:
    """Not before the second step, in which DDP's own forward agrees on new buckets."""
    model = wrap()
    handle = compress_ddp(model, SPARSE)
    for step, place in enumerate(("none", "none", "before", "none", "after", "none")):
        try:
            with handle.step():
                _raise_if(place == "before")
                backward(model, step)
                _raise_if(place == "after")
        except KeyError:
            pass
        check(handle.skipped == (place != "none"), f"{place}: skipped is {handle.skipped}")
    check_ranks_agree("gradients", gradients(model))


def warmup_is_exact_and_ends() -> None:
    model = wrap()
    handle = compress_ddp(model, tw.Wire(gradient=tw.Reduction(OkTopk(0.02), warmup=2)))
    for step in range(4):
        backward(model, step)
        off = differences(gradients(model), dense(step), 1e-5)
        check(bool(off) == (step >= 2), f"step {step}: {off or 'was not compressed'}")
    check(handle.compressing, "the warm-up does not end")


def auto_turns_compression_off_where_it_loses() -> None:
    """On a clock on which compression loses; what residuals still owe is repaid by the exact steps."""
    handle, _, sent, total = _trial(loses=True)
    check(not handle.compressing, "compression loses, yet it stayed on")
    check_equal("sum of all steps", sent, total, 1e-5)


def auto_keeps_compression_where_it_wins() -> None:
    handle, _, _, _ = _trial(loses=False)
    check(handle.compressing, "compression wins, yet it was turned off")


def agreeing_beside_receives_that_are_posted_early() -> None:
    """Messages of fixed sizes are awaited a step ahead; what ranks agree on in between (auto's choice, a bracket) must
    not arrive in their place: it was lost there, and all ranks waited."""
    for wire, bracketed in (("auto", False), (tw.collectives.Quantized(4), True)):
        model = wrap()
        handle = compress_ddp(model, wire)
        for step in range(len(handle.auto.plan) + 2 if handle.auto else 4):
            with handle.step() if bracketed else nullcontext():
                backward(model, step)
        check_ranks_agree(f"{wire}", model)


def auto_skips_nan_in_exact_passes_too() -> None:
    """In its first pass, which is DDP's own all-reduce; in the pass that sends the residual; and after it has turned
    itself off."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for option in ("nan", "zero"):
        model = wrap()
        handle = compress_ddp(model, tw.Wire(gradient=SPARSE.gradient, auto=True), nonfinite=option)
        plan, skips = handle.auto.plan, 0
        passes = (0, plan.index("compressed") + auto_switch.LENGTH, len(plan) + 1)
        with mock.patch.object(handle.auto, "_decide", partial(handle.reducer.use_exact, True)):
            for step in range(len(plan) + 3):
                model.zero_grad()
                loss = loss_of(model, batch(step))
                if step in passes and last:  # in one bucket only
                    loss = loss + model.module.last.bias.sum() * (torch.nan if step else torch.inf)
                loss.backward()
                skips += step in passes
                where = f"{option}, step {step}"
                check(handle.skipped == (step in passes), f"{where}: skipped is {handle.skipped}")
                check(handle.skips == skips, f"{where}: {handle.skips} skips, not {skips}")
                flat = torch.cat([g.reshape(-1) for g in gradients(model).values() if g is not None])
                if step in passes:
                    check(flat.isnan().all() if option == "nan" else not flat.any(), f"{where}: {flat[:3]}")
                if step == passes[1]:
                    check(handle.auto.sending_residual, f"{where}: not the pass that sends the residual")
                elif step == passes[1] + 1:
                    left = [n for n, e in handle.state_dict().items() if "/e/" in n and e.any()]
                    check(not left, f"{where}: the residual that was not sent stays: {left[:2]}")
        made = handle.reducer.exchange.steps
        check(made == len(plan) + 3, f"{option}: {made} steps were counted, not {len(plan) + 3}")
        check_ranks_agree(option, gradients(model))


def error_on_the_thread_is_raised_by_backward() -> None:
    """In plain words on every rank, not as a failed conversion inside DDP."""
    model = wrap()
    handle = compress_ddp(model, SPARSE)

    def broken(*_: object) -> Tensor:
        raise ValueError("on purpose")

    with mock.patch.object(handle.reducer.exchange, "reduce_steps", broken):
        try:
            backward(model, 0)
            check(False, "nothing was raised")
        except RuntimeError as error:
            check("could not exchange the gradients: on purpose" in str(error), f"raised was {error}")


def _trial(loses: bool) -> tuple[CompressedDDP, nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """The handle and the model after auto's trial, what the steps gave, and their exact means, summed."""
    model = wrap()
    handle = compress_ddp(model, tw.Wire(gradient=SPARSE.gradient, auto=True))
    seconds = [0.0]

    def clock() -> float:
        seconds[0] += 2.0 if loses == handle.compressing and handle.auto.passes > 0 else 1.0
        return seconds[0]

    total = {n: torch.zeros_like(p) for n, p in model.module.named_parameters()}
    sent = {n: torch.zeros_like(p) for n, p in model.module.named_parameters()}
    with mock.patch.object(auto_switch, "time", SimpleNamespace(perf_counter=clock)):
        for step in range(len(handle.auto.plan) + 2):
            backward(model, step)
            for n, g in gradients(model).items():
                sent[n] += g
            for n, g in dense(step).items():
                total[n] += g
    return handle, model, sent, total


CASES = [
    clipped_training_stays_equal_on_all_ranks, changing_loss_scale_changes_no_bit,
    grad_scaler_skips_the_step_that_overflows_on_one_rank, unused_branch_keeps_its_gradient_and_residual,
    static_graph_changes_no_bit, layer_frozen_in_mid_run_keeps_its_residual,
    wrapping_again_with_more_parameters_keeps_residuals, nan_on_one_rank_is_rolled_back_by_all,
    exception_in_the_bracket_drops_the_step, exception_on_one_rank_drops_the_step_on_all,
    exception_around_backward_drops_the_step_on_all, warmup_is_exact_and_ends,
    auto_turns_compression_off_where_it_loses, auto_keeps_compression_where_it_wins,
    agreeing_beside_receives_that_are_posted_early, auto_skips_nan_in_exact_passes_too,
    error_on_the_thread_is_raised_by_backward,
]  # fmt: skip
