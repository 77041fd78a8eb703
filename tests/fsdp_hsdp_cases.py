"""Cases of the FSDP tests: an exact wire trains as torch's own HSDP does, a compressed one as its collective alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp_support import (
    MESH,
    SPARSE,
    WIRES,
    backward,
    check_replicas_agree,
    compressed,
    gradients,
    loss_of,
    sharded,
    train,
    weights,
)
from rank_cases import check, check_equal, differences
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.collectives import OkTopk, Quantized
from thinwire.parallel import compress_fsdp


def exact_wire_trains_as_plain_hsdp() -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for what in ({"reshard": True}, {"reshard": False}, {"policy": bf16}, {"left": False}):
        plain, (ours, handle) = sharded("both", **what), compressed(model=sharded(**what))
        check_equal(str(what), weights(train(ours, range(4))), weights(train(plain, range(4))), 1e-6)
        check_replicas_agree(str(what), weights(ours))
        check(handle.reducer.exchange.steps == 4, f"{what}: {handle.reducer.exchange.steps} steps, not 4")
        check(differences(weights(ours), weights(sharded(**what))), f"{what}: nothing was trained")


def gradients_are_those_of_the_collective_alone() -> None:
    """The gradients of a site, averaged by tw.all_reduce with the state in our hands: the same bits."""
    index, shards = MESH[0]["shard"].get_local_rank(), MESH[0]["shard"].size()
    for name, wire in WIRES.items():
        alone, (model, handle) = sharded(), compressed(wire, seed=5)
        state: dict[str, Tensor] = {}
        for step in range(5):
            backward(alone, step)
            backward(model, step)
            site = {n: g for n, g in gradients(alone).items() if g is not None}
            means = tw.all_reduce(site, wire, MESH[0]["replica"].get_group(), state, seed=shards * 5 + index)
            check_equal(f"{name}, step {step}", gradients(model), means)
            check_replicas_agree(f"{name}, step {step}", gradients(model))
        check(differences(means, site), f"{name}: replicas have the same gradients, so nothing was tested")
        check(handle.sent > 0 and handle.compressing, f"{name}: sent {handle.sent}, compressing {handle.compressing}")


def accumulation_is_as_in_plain_hsdp() -> None:
    """Without sync, and by backwards that each reduce; .grad keeps what it had."""
    for syncs in ((False, False, True), (True, True, True), (True, False, True)):
        plain, (ours, handle) = sharded("both"), compressed()
        for model in (plain, ours):
            for step, sync in enumerate(syncs):
                model.set_requires_gradient_sync(sync)
                loss_of(model, step).backward()
        check_equal(str(syncs), gradients(ours), gradients(plain), 1e-6)
        check_replicas_agree(str(syncs), gradients(ours))
        made = handle.reducer.exchange.steps
        check(made == sum(syncs), f"{syncs}: {made} exchanges")


def compressed_backwards_add_up_in_grad() -> None:
    (ours, _), (anew, _) = compressed(SPARSE), compressed(SPARSE)
    total = {n: torch.zeros_like(w) for n, w in weights(anew).items()}
    for step in range(3):
        loss_of(ours, step).backward()
        backward(anew, step)
        total = {n: total[n] + g for n, g in gradients(anew).items()}
    check_replicas_agree("compressed", gradients(ours))
    check_equal("compressed", gradients(ours), total)


class Tied(nn.Module):
    """One matrix at both ends, an odd number of rows, and a middle that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.up = nn.Linear(8, 17)
        self.down = nn.Linear(17, 8)
        self.head.weight = self.embed.weight
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g) * 0.3

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        return self.head(h + checkpoint(lambda h: self.down(torch.tanh(self.up(h))), h, use_reentrant=False))


def sharded_tied(mesh: DeviceMesh, reshard: bool) -> nn.Module:
    model = Tied()
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def train_tied(model: nn.Module) -> tuple[list[float], list[float]]:
    """Six steps of two accumulated parts, clipped: norms, losses."""
    optimizer, norms, losses = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5), [], []
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            g = torch.Generator().manual_seed(10 * step + part + 100 * dist.get_rank())
            tokens = torch.randint(0, 11, (32,), generator=g)
            loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11)
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()))
        losses.append(loss.item())
        optimizer.step()
    return norms, losses


def tied_checkpointed_accumulated_clipped_together() -> None:
    """Exact, it is plain HSDP, its norms too; compressed, replicas stay equal and it still learns."""
    for reshard in (True, False):
        plain = sharded_tied(MESH[0], reshard)
        ours = sharded_tied(MESH[0]["shard"], reshard)
        small = sharded_tied(MESH[0]["shard"], reshard)
        compress_fsdp(ours, "off", replicas=MESH[0]["replica"])
        handle = compress_fsdp(small, SPARSE, replicas=MESH[0]["replica"])
        (want, _), (got, _), (_, losses) = train_tied(plain), train_tied(ours), train_tied(small)
        check_equal(f"reshard {reshard}", weights(ours), weights(plain), 1e-6)
        check(max(abs(a - b) for a, b in zip(got, want)) <= 1e-5, f"norms {got}, not {want}")
        check_replicas_agree("compressed", weights(small))
        check(losses[-1] < losses[0], f"the loss did not fall: {losses}")
        one_site = MESH[0]["replica"].size() == 1
        off = differences(weights(small), weights(plain), 1e-6)
        check(bool(off) is not one_site, f"{MESH[0]['replica'].size()} sites: {off or 'nothing was compressed'}")
        check(handle.compressing is not one_site, f"compressing: {handle.compressing}")


def two_forwards_before_a_backward_are_as_in_plain_hsdp() -> None:
    plain, (ours, _) = sharded("both"), compressed()
    for model in (plain, ours):
        (loss_of(model, 0) + 2 * loss_of(model, 1)).backward()
    check_equal("two forwards", gradients(ours), gradients(plain), 1e-6)


def gradient_divide_factor_counts_all_ranks_as_in_plain_hsdp() -> None:
    plain, (ours, _) = sharded("both"), compressed()
    for model in (plain, ours):
        for part in (model.first, model.left, model.right, model):
            part.set_gradient_divide_factor(3.0)
            part.set_force_sum_reduction_for_comms(True)
        backward(model, 0)
    check_equal("divided by 3", gradients(ours), gradients(plain), 1e-6)


def excluded_parameters_stay_exact() -> None:
    wire = tw.Wire(gradient=tw.Reduction(OkTopk(0.02), exclude=("left.*",), exact_dims=1))
    exact, (model, _) = sharded("both"), compressed(wire)
    for step in range(3):
        backward(exact, step)
        backward(model, step)
        want, got = gradients(exact), gradients(model)
        kept = {n: g for n, g in got.items() if n.startswith("left.") or g.dim() == 1}
        check_equal(f"step {step}", kept, want, 1e-6)
        off = differences({"first.weight": got["first.weight"]}, want, 1e-6)
        check(off, f"step {step}: first.weight was not compressed")


def warmup_is_exact_and_bytes_fall_after_it() -> None:
    """What is sent: an all-reduce of this shard at first, about an eighth by four bits afterwards."""
    wire = tw.Wire(gradient=tw.Reduction(Quantized(4), warmup=2, exact_dims=0))
    plain, (model, handle) = sharded("both"), compressed(wire)
    sent: list[int] = []
    for step in range(4):
        backward(plain, step)
        backward(model, step)
        off = differences(gradients(model), gradients(plain), 1e-6)
        check(bool(off) == (step >= 2), f"step {step}: {off or 'was not compressed'}")
        sent.append(handle.sent - sum(sent))
    dense = 4 * sum(g.numel() for g in gradients(model).values())
    check(sent[:2] == [dense, dense], f"sent {sent}, but an exact step is {dense} bytes")
    check(sent[2] == sent[3] < 0.25 * dense, f"sent {sent}, but an exact step is {dense} bytes")


CASES = [
    exact_wire_trains_as_plain_hsdp, gradients_are_those_of_the_collective_alone, accumulation_is_as_in_plain_hsdp,
    compressed_backwards_add_up_in_grad, tied_checkpointed_accumulated_clipped_together,
    two_forwards_before_a_backward_are_as_in_plain_hsdp, gradient_divide_factor_counts_all_ranks_as_in_plain_hsdp,
    excluded_parameters_stay_exact, warmup_is_exact_and_bytes_fall_after_it,
]  # fmt: skip
