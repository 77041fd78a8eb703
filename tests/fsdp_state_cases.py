"""Cases of the FSDP tests: residuals, skipped and dropped steps, checkpoints, and mistakes that are refused."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_support import (
    MESH,
    SPARSE,
    WIRES,
    Net,
    backward,
    check_replicas_agree,
    compressed,
    gradients,
    loss_of,
    sharded,
    train,
    weights,
)
from rank_cases import check, check_equal, differences, refused
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.data_parallel import auto_switch
from thinwire.data_parallel.fsdp import CompressedFSDP
from thinwire.parallel import compress_fsdp


def unused_branch_keeps_its_gradient_and_residual() -> None:
    """A branch that only the first site used is averaged; one that nobody used keeps .grad and residual."""
    model, handle = compressed(SPARSE)
    backward(model, 0)
    replica = MESH[0]["replica"].get_local_rank()
    backward(model, 1, branches="lr" if replica == 0 else "l")
    check_replicas_agree("used by one site", gradients(model))
    check(model.right.weight.grad is not None, "a branch of the first site got no gradient")
    key = f"rank{replica}of2/e/right.weight"
    kept = handle.state_dict()[handle.shard][key].clone()
    before = gradients(model)["right.weight"]
    loss_of(model, 2, branches="l").backward()
    check(torch.equal(gradients(model)["right.weight"], before), "an unused .grad changed")
    check(kept.any(), "there is no residual, so nothing was tested")
    check(torch.equal(handle.state_dict()[handle.shard][key], kept), "the residual of an unused branch was spent")


def nan_in_one_shard_is_rolled_back_by_all_ranks() -> None:
    for option in ("nan", "zero"):
        model, handle = compressed(SPARSE, nonfinite=option)
        for step in range(3):
            backward(model, step)
        before = handle.state_dict()[handle.shard]
        broken = torch.tensor([torch.nan, 1.0, 1.0, 1.0]) if dist.get_rank() == 3 else None
        backward(model, 3, extra=broken)
        flat = torch.cat([g.reshape(-1) for g in gradients(model).values()])
        check(flat.isnan().all() if option == "nan" else not flat.any(), f"{option}: gradients are {flat[:3]}")
        check(handle.skipped and handle.skips == 1, f"{option}: {handle.skips} steps were skipped, not one")
        after = handle.state_dict()[handle.shard]
        changed = [n for n in before if not n.endswith("/step") and not torch.equal(before[n], after[n])]
        check(not changed, f"{option}: the rolled back step changed {changed[:2]}")
        backward(model, 4)
        check(not handle.skipped, f"{option}: the next step was skipped too")
        check_replicas_agree(f"{option}: later", gradients(model))


class Scaler:
    """The part of a GradScaler that thinwire asks for."""

    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def changing_loss_scale_changes_no_bit() -> None:
    scaler = Scaler()
    (plain, _), (scaled, _) = compressed(SPARSE), compressed(SPARSE, scaler=scaler)
    for step in range(4):
        backward(plain, step)
        scaler.scale = 2.0 ** (step % 3 + 5)
        scaled.zero_grad()
        (loss_of(scaled, step) * scaler.scale).backward()
        unscaled = {n: g / scaler.scale for n, g in gradients(scaled).items()}
        check_equal(f"step {step}", unscaled, gradients(plain))


def exception_in_the_bracket_drops_the_step() -> None:
    model, handle = compressed(SPARSE)
    backward(model, 0)
    before = handle.state_dict()[handle.shard]

    def changed() -> list[str]:
        after = handle.state_dict()[handle.shard]
        return [n for n in before if "/e/" in n and not torch.equal(before[n], after[n])]

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


def auto_turns_off_everywhere_where_one_rank_loses() -> None:
    """A clock on which compression loses on one rank alone; what residuals still owe is repaid by the exact steps."""
    model, handle = compressed(tw.Wire(gradient=SPARSE.gradient, auto=True))
    exact, seconds = sharded("both"), [0.0]

    def clock() -> float:
        compressing = handle.compressing and handle.auto.passes > 0
        seconds[0] += 1.0 if not compressing else 2.0 if dist.get_rank() == 2 else 0.5
        return seconds[0]

    with mock.patch.object(auto_switch, "time", SimpleNamespace(perf_counter=clock)):
        for step in range(len(handle.auto.plan) + 2):  # .grad adds up over all of them
            loss_of(model, step).backward()
            loss_of(exact, step).backward()
    check_equal("sum of all steps", gradients(model), gradients(exact), 1e-5)
    check(not handle.compressing, "compression stayed on")


def models_that_cannot_be_compressed_are_refused() -> None:
    with refused("not Net"):
        compressed(model=Net())
    with refused("shard it over a 1-D mesh"):
        compressed(model=sharded("both"))
    with refused("scale is not sharded"):
        partial = Net()
        fully_shard(partial.left, mesh=MESH[0]["shard"])
        compressed(model=partial)
    with refused("no other of its site"):
        compress_fsdp(sharded(), "off", replicas=MESH[0]["shard"])
    with refused("compress_fsdp's own (call it once per model)"):
        model, _ = compressed()
        compressed(model=model)


def ranks_that_differ_are_refused() -> None:
    rank = dist.get_rank()
    with refused("the weights of last.weight"):
        unequal = sharded()
        if rank >= 2:
            unequal.last.weight.to_local().detach().add_(1)
        compressed(model=unequal)
    with refused("rank 1 differs from rank 0 in seed"):
        compressed(seed=rank % 2)


def changes_after_compressing_are_refused() -> None:
    with refused("does not know"):
        thawed, _ = compressed(model=sharded(left=False))
        thawed.left.requires_grad_(True)
        backward(thawed, 0)
    with refused("set_requires_gradient_sync(False)"):
        model, _ = compressed()
        model.set_requires_all_reduce(False)
        backward(model, 0)


def resumed_run_has_the_same_bits(name: str, folder: str) -> None:
    """Six steps at once, or three, a checkpoint, everything new, and three; without the state other bits."""
    wire, path = WIRES[name], os.path.join(folder, name.replace(" ", "-"))
    (whole, _), (first, handle), (second, other) = (compressed(wire) for _ in range(3))
    train(whole, range(6), momentum=0.0)
    train(first, range(3), momentum=0.0)
    dcp.save({"model": first.state_dict(), "wire": handle.state_dict()}, checkpoint_id=path)
    dcp.load(state := {"model": second.state_dict()}, checkpoint_id=path)
    second.load_state_dict(state["model"])
    other.load_state_dict(other.read_state(path, "wire"))
    train(second, range(3, 6), momentum=0.0)
    check_equal("resumed", weights(second), weights(whole))
    check_replicas_agree("resumed", weights(second))
    forgetful, _ = compressed(wire)
    forgetful.load_state_dict(state["model"])
    train(forgetful, range(3, 6), momentum=0.0)
    check(differences(weights(forgetful), weights(whole)), "the state does not matter, so nothing was tested")


def _own_state(handle: CompressedFSDP) -> dict[str, Tensor]:
    return {name.partition("/")[2]: value for name, value in handle.state_dict()[handle.shard].items()}


def state_of_three_sites_is_averaged_on_two() -> None:
    model, handle = compressed(WIRES["diana"])
    train(model, range(3), momentum=0.0)
    mine, slots = _own_state(handle), ("e/", "h/", "m/")
    three = {f"rank{r}of3/{n}": v * r if n.startswith(slots) else v for n, v in mine.items() for r in range(3)}
    handle.load_state_dict({handle.shard: three})
    check_equal("from three sites", _own_state(handle), mine, 1e-6)
    with refused("shard0of3", ValueError):
        handle.load_state_dict({"shard0of3": {}})


CASES = [
    unused_branch_keeps_its_gradient_and_residual, nan_in_one_shard_is_rolled_back_by_all_ranks,
    changing_loss_scale_changes_no_bit, exception_in_the_bracket_drops_the_step,
    auto_turns_off_everywhere_where_one_rank_loses, models_that_cannot_be_compressed_are_refused,
    ranks_that_differ_are_refused, changes_after_compressing_are_refused, state_of_three_sites_is_averaged_on_two,
]  # fmt: skip
