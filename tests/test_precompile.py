"""Kernels are compiled before the first step, by one process a folder, and nothing else comes of it."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_train_run import PRELOAD, SQUARE
from train_ranks import MAX, compiled, settings

import thinwire as tw
from thinwire.config.wire import Reduction, Wire
from thinwire.data_parallel.precompile import try_exchange
from thinwire.distributed.precompile import precompile
from thinwire.kernels.cpu import compile as compiling
from thinwire.lab import Network, check
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message
from thinwire.pipeline.precompile import try_link
from thinwire.train.metrics import read_events

FEW = {"samples": 18, "held_out": 0.1}  # seen again in every other step


@pytest.mark.lab
@pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)")
@pytest.mark.timeout(200)
def test_no_kernel_is_new_in_a_step(tmp_path):
    """Be it compiled or loaded: all that steps call, cold and warm, and that the planner times, was called before. Each
    wire has processes of its own, which know no other's kernels."""
    coded = {**MAX, "gradient": {**MAX["gradient"], "values": "bf16", "indices": "coded"}}
    wires = {"max": {"preset": "max"}, "sparse": coded, "auto": {"auto": True}}
    with Network(hosts=4, preload=PRELOAD) as net:
        for name, wire in wires.items():
            config = settings(tmp_path / name, wire, mesh=SQUARE, data=FEW, optim={"steps": 5})
            for (found,) in net.run(compiled, [config], timeout=100, echo=False):
                assert found["before"] and not found["measuring"] + found["steps"], (name, found)
            if name != "auto":  # which compresses nothing on this network
                last = [e for e in read_events(tmp_path / name / "metrics.jsonl") if e["kind"] == "step"][-1]
                assert last["hit_rate"] > 0, "no step met a sample again"


def test_large_arrays_need_no_other_kernels():
    """Precompiling is on few values; the kernels for many threads come with it."""
    wire, row = Wire.of("max"), (256, 256)
    assert wire.forward is not None and compiling.PARALLEL_VALUES <= 2 * 256 * 256 and torch.get_num_threads() > 1
    precompile("a test", [lambda: try_link(wire.forward, (2, 64), torch.empty(0))], torch.empty(0), print)
    kernels = [version for kernel in compiling._kernels for version in (kernel.one, kernel.many)]
    before = {kernel: len(kernel.signatures) for kernel in kernels}
    sender, receiver = (Lane(wire.forward, "large", end, 0) for end in ("send", "recv"))
    for step in range(2):
        for lane in (sender, receiver):
            lane.begin(step)
            lane.digests([0, 1])
        x = torch.randn(2, *row)
        receiver.recv(Message(0, (0, 1), True), 0, sender.send(Message(0, (0, 1), True), 0, x), x.shape, x.dtype)
        for lane in (sender, receiver):
            lane.end_step(keep=True)
    assert receiver.channels().__next__()[1].stats.warm == 2
    assert {kernel.__name__ for kernel in kernels if len(kernel.signatures) > before[kernel]} == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precompiling_leaves_no_trace(dtype, tmp_path):
    """Of whatever memories and collectives, beside a process group: torch's generator stands still, no file is made."""
    links = [None, *(Wire.of({"forward": table}).forward for table in (
        {"codec": "quantize", "bits": 4, "memory": {"memory": "delta", "path": str(tmp_path / "store")}},
        {"codec": "low_rank", "rank": 2, "memory": "error_feedback"}, {"codec": "topk", "density": 0.1},
        {"codec": "quantize", "bits": 8, "memory": "auto"},
    ))]  # fmt: skip
    collectives = [
        tw.collectives.OkTopk(0.05, scope="model"), tw.collectives.GTopk(0.05), tw.collectives.LowRank(2),
        tw.collectives.Hierarchical(across=tw.collectives.Quantized(4), per_host=2), tw.collectives.TopkDSA(0.05),
        tw.collectives.Gather(tw.codecs.ScaledSign()),
    ]  # fmt: skip
    reductions, shapes = [*map(Reduction, collectives)], {"weight": (64, 64)}
    state = torch.get_rng_state()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        calls = [partial(try_link, link, (3, 50), torch.empty(0, dtype=dtype)) for link in links]
        calls += [partial(try_exchange, reduction, shapes, torch.empty(0, dtype=dtype)) for reduction in reductions]
        precompile("a test", calls, torch.empty(0), print)
    finally:
        dist.destroy_process_group()
    assert torch.equal(torch.get_rng_state(), state) and not list(tmp_path.iterdir())


def test_one_compiles_and_the_others_wait(monkeypatch, tmp_path):
    """Whoever comes while one compiles gets in after it, and all of those together."""
    monkeypatch.setattr(compiling, "CACHE_DIRECTORY", str(tmp_path))  # other tests may be compiling in the usual one
    order, arrived = [], threading.Semaphore(0)
    together = threading.Barrier(2)

    def wait() -> None:
        arrived.release()
        with compiling.compiled_once():
            order.append("other")
            together.wait(20)  # the other one is inside too

    others = [threading.Thread(target=wait) for _ in range(2)]
    with compiling.compiled_once():
        for other in others:
            other.start()
            arrived.acquire()
        others[0].join(0.3)  # ample for one that does not wait
        order.append("first")
    for other in others:
        other.join(20)
    assert order == ["first", "other", "other"] and not together.broken
