"""Kernels of a card are all loaded before the first message: loading one later may make ranks wait for ever."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from kernels_gpu_support import DEVICE, interpreted  # noqa: F401
from thread_group import run

from thinwire.collectives.transit import checksum_of
from thinwire.config.presets import PRESETS
from thinwire.config.wire import Wire
from thinwire.data_parallel.gradient_units import make_units
from thinwire.data_parallel.precompile import try_exchange
from thinwire.distributed.precompile import precompile
from thinwire.kernels import dispatch
from thinwire.kernels.gpu import launch
from thinwire.memory.channel import Channel
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message
from thinwire.pipeline.precompile import try_link

ROW = (3, 40)  # 120 values: no multiple of the tile, nor of 16 bytes when packed
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
SHAPES = {"weight": (33, 40), "other": (17, 8)}


@pytest.fixture
def like(monkeypatch):
    """A tensor whose kernels are those of a card, called in this test for the first time."""
    monkeypatch.setitem(dispatch.BY_DEVICE, "cpu", "gpu")
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "new_kernels", "expect")
    one_at_a_time, launched = threading.RLock(), launch._run

    def locked(*args):
        with one_at_a_time:  # the interpreter is for one thread
            launched(*args)

    monkeypatch.setattr(launch, "_run", locked)
    return torch.empty(0, device=DEVICE)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "off"])
def test_steps_call_only_what_was_called_before(preset, like, monkeypatch):
    wire = Wire.of(preset)
    links = [link for link in (wire.forward, wire.backward) if link is not None]
    calls = [lambda link=link: try_link(link, ROW, like) for link in links]
    calls.append(lambda: try_exchange(wire.gradient, SHAPES, like))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        precompile("a test", calls, like, print)
    finally:
        dist.destroy_process_group()
    called = len(launch._compiled)
    monkeypatch.setattr(launch, "new_kernels", "refuse")
    for link in links:
        _messages(link, like)
    run(2, lambda rank: _exchanges(wire.gradient, like, rank))
    message = torch.zeros(100, dtype=torch.uint8, device=DEVICE)
    for start in (0, 1, 8):  # wherever a message lies
        checksum_of(message[start : start + 64])
    assert len(launch._compiled) == called > 0


def _messages(link, like):
    """Of samples never seen, seen once, and twice, in micro-batches of one and of three."""
    sender, receiver = (Lane(link, "steps", end, 0) for end in ("send", "recv"))
    for step in range(3):
        for ids in ((0,), (1, 2, 3)):
            for lane in (sender, receiver):
                lane.begin(step)
                lane.digests(ids)
            x = torch.randn(len(ids), *ROW).to(like)
            message = Message(0, ids, True, tokens=torch.arange(x[..., 0].numel()).view(x.shape[:-1]))
            receiver.recv(message, 0, sender.send(message, 0, x), x.shape, x.dtype)
            for lane in (sender, receiver):
                lane.resolve_checks()
                lane.end_step(keep=True)


def _exchanges(reduction, like, rank):
    units = [unit for unit in make_units(SHAPES, reduction) if not unit.exact]
    channel = Channel(reduction.collective.for_shapes(units[0].shapes), reduction.memory, name="steps")
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        channel.begin(step)
        for unit in units:
            channel.reduce(unit.name, torch.randn(unit.numel, generator=generator).to(like), None)
        channel.commit()


def test_a_kernel_that_is_new_in_a_step_is_named(like, monkeypatch):
    from thinwire.kernels import sign

    monkeypatch.setattr(launch, "new_kernels", "refuse")
    with pytest.raises(RuntimeError, match=r"kernel .* is loaded in a step: it was not called before"):
        sign.encode_sign(torch.ones(64, device=DEVICE), 32)


def test_no_kernel_is_compiled_for_the_value_of_an_integer(like, monkeypatch):
    """Else one would be new when a size or a random key has another divisor."""
    seen = []

    def record(kernel, programs, args, constants, *options):
        names = kernel.arg_names[: len(args)]
        ints = {name for name, x in zip(names, args) if isinstance(x, int)}
        seen.append(kernel.__name__)
        assert ints <= set(kernel.kwargs.get("do_not_specialize", ())), kernel.__name__
        return run_it(kernel, programs, args, constants, *options)

    run_it = launch._run
    monkeypatch.setattr(launch, "_run", record)
    for preset in PRESETS:
        wire = Wire.of(preset)
        for link in (wire.forward, wire.backward):
            if link is not None:
                try_link(link, ROW, like)
    assert len(set(seen)) > 5
