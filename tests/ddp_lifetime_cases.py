"""Cases of the DDP tests: copies of an attached model, what close() gives back, and what is refused afterwards."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import time
from unittest import mock

import torch
import torch.distributed as dist
from ddp_support import SPARSE, Net, backward, batch, dense, gradients, wrap
from rank_cases import check, check_equal, refused
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import thinwire as tw
from thinwire.collectives import Hierarchical, OkTopk, Quantized
from thinwire.collectives.messages import Swap
from thinwire.data_parallel.reducer import Reducer
from thinwire.parallel import compress_ddp


def saved_and_loaded(model: DDP) -> DDP:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies_of_an_attached_model_are_plain() -> None:
    model = wrap()
    handle = compress_ddp(model, SPARSE)
    backward(model, 0)
    ways = {
        "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved_and_loaded,
        "AveragedModel": lambda m: AveragedModel(m).module,
    }  # fmt: skip
    for name, way in ways.items():
        twin = way(model)
        check_equal(name, dict(twin.module.named_parameters()), dict(model.module.named_parameters()))
        backward(twin, 1)
        check_equal(f"{name}, its gradients", gradients(twin), dense(1), 1e-5)
        second = compress_ddp(twin, SPARSE)
        backward(twin, 2)
        check(second.sent > 0 and second.compressing, f"{name} cannot be compressed")
        second.close()
    sent = handle.sent
    backward(model, 1)
    check(handle.sent > sent, "the original is not compressed any more")


def a_capture_is_refused_before_forward() -> None:
    """In backward it would be too late: CUDA then complains about the capture, and hides what was refused."""
    model = wrap()
    handle = compress_ddp(model, SPARSE)
    twin = copy.deepcopy(model)
    there, capturing = "torch.cuda.is_available", "torch.cuda.is_current_stream_capturing"
    with mock.patch(there, return_value=True), mock.patch(capturing, return_value=True):
        with refused("in a CUDA graph"):
            model(batch(0))
        with model.no_sync():
            model(batch(0))
        twin(batch(0))
    handle.close()


def _held() -> tuple[int, int, int]:
    """This process's threads, descriptors and groups."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(_world.pg_map)


def _at_most(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    return all(a <= b for a, b in zip(now, before))


def closing_gives_back_threads_descriptors_and_groups() -> None:
    wires = (SPARSE, tw.Wire(gradient=Hierarchical(Quantized(8), OkTopk(0.1), per_host=1)))
    held: list[tuple[int, int, int]] = []
    for _ in range(3):
        for wire in wires:
            net = Net()
            reducer = Reducer(net.named_parameters(), wire)
            backward(net, 0)
            reducer.finish()
            reducer.close()
            check(reducer.summary().sent > 0, "a closed reducer does not know what it sent")
        gc.collect()
        dist.barrier()
        held.append(_held())
    limit = time.monotonic() + 10  # a connection may take a moment to end
    while not _at_most(held[-1], held[1]) and time.monotonic() < limit:
        time.sleep(0.1)
        held.append(_held())
    check(_at_most(held[-1], held[1]), f"threads, descriptors and groups grow: {held[:3]}, then {held[-1]}")
    with refused("was closed"):
        reducer.finish()


def thawed_parameter_is_refused() -> None:
    for wire in (SPARSE, "off", tw.Wire(gradient=SPARSE.gradient, auto=True)):
        net = Net()
        net.left.requires_grad_(False)
        model = wrap(net)
        compress_ddp(model, wire)
        backward(model, 0)
        net.left.requires_grad_(True)
        with refused("left.weight trains now"):
            backward(model, 1)


def exact_wire_uses_the_plain_all_reduce() -> None:
    """Unless a residual was loaded, which is sent first; and the NaN contract holds."""
    model = wrap()
    handle = compress_ddp(model, "off", nonfinite="zero")
    backward(model, 0)
    check(handle.plain and not handle.skipped, "an exact wire went through the units")
    check(handle.reducer.thread.thread is None, "an exact wire started a thread")
    before = wrap()
    sparse = compress_ddp(before, SPARSE)
    backward(before, 0)
    handle.load_state_dict(sparse.state_dict())
    backward(model, 1)
    check(not handle.plain, "the residual that was loaded is not sent")
    backward(model, 2)
    check(handle.plain, "the plain all-reduce is not used again")
    check_equal("exact", gradients(model), dense(2), 1e-5)
    model.zero_grad()
    (model(torch.ones(8, 12)).sum() * (torch.nan if dist.get_rank() == 0 else 1.0)).backward()
    check(handle.skipped and not any(g.any() for g in gradients(model).values()), "a NaN was not skipped")


def flipped_bit_in_a_message_drops_the_step_on_all() -> None:
    """On one rank, once; the next step is as if it had not been."""
    leaving = Swap.leaving
    two_levels = tw.Wire(gradient=Hierarchical(Quantized(8), Quantized(4), per_host=dist.get_world_size()))
    for wire in (SPARSE, "max", two_levels):
        net, whole = Net(), Net()
        reducer, other = Reducer(net.named_parameters(), wire), Reducer(whole.named_parameters(), wire)
        left = [int(dist.get_rank() == 0)]  # messages to damage

        def damaged(swap: Swap, to: int, left: list[int] = left) -> torch.Tensor:
            message = leaving(swap, to)
            if left[0] and message.numel() > 64:  # not the counts, whose damage is seen when sizes do not fit
                left[0] = 0
                message = message.clone()
                message[message.numel() // 3] ^= 4
            return message

        backward(net, 0)
        with mock.patch.object(Swap, "leaving", damaged):
            check(not reducer.finish(), f"{wire}: the damage was not found")
        check(not left[0], f"{wire}: no message was damaged, so nothing was tested")
        check(all(p.grad.isnan().all() for p in net.parameters()), f"{wire}: gradients are not NaN")
        check(reducer.skips == 1, f"{wire}: {reducer.skips} skips")
        backward(net, 1)
        backward(whole, 1)
        other.exchange.count_step()
        check(reducer.finish() and other.finish(), f"{wire}: the next step was dropped too")
        check_equal(f"{wire}: the next step", gradients(net), gradients(whole))
        reducer.close()
        other.close()


CASES = [
    copies_of_an_attached_model_are_plain, a_capture_is_refused_before_forward,
    closing_gives_back_threads_descriptors_and_groups,
    flipped_bit_in_a_message_drops_the_step_on_all, thawed_parameter_is_refused, exact_wire_uses_the_plain_all_reduce,
]  # fmt: skip
