"""State between members as bytes: what is packed comes back, what is damaged or too large is refused."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinwire.elastic import healing, streams
from thinwire.elastic.fetching import Fetch
from thinwire.elastic.healing import Healing
from thinwire.elastic.packing import DTYPES, MAGIC, nbytes, pack, unpack
from thinwire.elastic.streams import Fetching
from thinwire.errors import UsageError

SECOND = timedelta(seconds=1)


def reader(data: bytes):
    """read(buffer) from these bytes."""
    stream = io.BytesIO(data)

    def read(into: memoryview) -> None:
        if stream.readinto(into) != into.nbytes:
            raise ConnectionError("at its end")

    return read


def joined(state: object) -> bytes:
    return b"".join(pack(state))


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b and type(a) is type(b)


tensors = st.builds(
    lambda dtype, shape: torch.ones(shape, dtype=dtype),
    st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=3),
)  # fmt: skip
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(trees)
def test_a_state_comes_back_as_it_was(state):
    assert equal(unpack(reader(joined(state)), nbytes(state)), state)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=80), st.integers(0, 200), st.integers(1, 255))
def test_damaged_bytes_are_refused_and_run_nothing(garbage, place, change):
    state = {"x": torch.arange(20.0), "y": [1, "two"]}
    for data in (garbage, MAGIC + garbage):
        with pytest.raises((ValueError, ConnectionError)):
            unpack(reader(data), 1 << 20)
    damaged = bytearray(joined(state))
    damaged[-1 - place % 40] ^= change  # in the tensor
    with pytest.raises(ValueError, match="damaged"):
        unpack(reader(bytes(damaged)), 1 << 20)


def test_more_than_is_expected_is_refused_before_it_is_allocated():
    for entry, words in (
        (["float32", [1 << 50], 0, [1] * 4], "at most 100 are expected"),
        (["float32", [2], 0, [1 << 40, 1, 1, 1]], "planes of"),
        (["float32", [-2, -2], 0, [1] * 4], "is announced"),
        (["object", [2], 0, [1]], "is announced"),
        ([["float32"], [2], 0, [1] * 4], "a header that is no state's"),
        (["float32", [0, 1 << 62, 1 << 62], 0, [0] * 4], "no place for a tensor"),
    ):
        header = json.dumps({"tree": {"tensor": 0}, "tensors": [entry]}).encode()
        with pytest.raises(ValueError, match=words):
            unpack(reader(MAGIC + len(header).to_bytes(8, "little") + header), 100)


def test_a_plane_that_would_grow_beyond_its_tensor_is_refused():
    bomb = zlib.compress(bytes(10**6), 9)
    header = json.dumps({"tree": {"tensor": 0}, "tensors": [["uint8", [2000], 0, [len(bomb)]]]}).encode()
    data = MAGIC + len(header).to_bytes(8, "little") + header + bomb
    with pytest.raises(ValueError, match="damaged"):
        unpack(reader(data), 4000)


def test_weights_take_fewer_bytes_than_they_have():
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.02
    assert len(joined(weights)) < 0.9 * weights.nbytes


def test_what_cannot_be_sent_is_named():
    with pytest.raises(UsageError, match=r"state\['a'\]\[0\] is a set"):
        pack({"a": [{1}]})
    with pytest.raises(UsageError, match=r"\('x',\)"):
        pack({("x",): 1})
    with pytest.raises(UsageError, match="complex64"):
        pack(torch.zeros(2, dtype=torch.complex64))


@pytest.fixture
def ends():
    both = Healing("127.0.0.1", 1.0, lambda: 1 << 24), Healing("127.0.0.1", 1.0, lambda: 1 << 24)
    yield both
    for one in both:
        one.shutdown()


def test_a_newcomer_fetches_weights_and_moments(ends):
    member, newcomer = ends
    model = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    member.send_checkpoint([1], 7, state, SECOND)
    optimizer.step()  # training goes on: what is sent is a copy
    fetched = newcomer.recv_checkpoint(0, member.metadata(), 7, SECOND)
    assert not torch.equal(fetched["model"]["weight"], model.weight)
    assert newcomer.received == member.snapshot.nbytes > 3 * 300 * 300
    torch.optim.Adam(nn.Linear(300, 300).parameters()).load_state_dict(fetched["optimizer"])


def test_a_broken_connection_is_taken_up_where_it_broke_off(ends, monkeypatch):
    member, newcomer = ends
    state = {"x": torch.randn(500_000)}
    member.send_checkpoint([1], 1, state, SECOND)
    calls = []
    receive = socket.socket.recv_into

    def breaks(self, into, count):
        calls.append(count)
        if len(calls) % 5 == 4:
            raise ConnectionResetError("pulled")
        return receive(self, into, count)

    monkeypatch.setattr(socket.socket, "recv_into", breaks)
    fetched = newcomer.recv_checkpoint(0, member.metadata(), 1, SECOND)
    assert torch.equal(fetched["x"], state["x"]) and len(calls) > 8
    assert newcomer.received == member.snapshot.nbytes, "no byte came twice"


def test_without_the_token_or_for_another_step_nothing_is_sent(ends):
    member, newcomer = ends
    member.send_checkpoint([1], 3, {"x": torch.ones(3)}, SECOND)
    stranger = json.dumps(json.loads(member.metadata()) | {"token": "0" * 32})
    for metadata, step in ((stranger, 3), (member.metadata(), 4)):
        member.timeout = 0.05
        with pytest.raises(ConnectionError):
            newcomer.recv_checkpoint(0, metadata, step, SECOND)
    member.disallow_checkpoint()
    with pytest.raises(ConnectionError):
        newcomer.recv_checkpoint(0, member.metadata(), 3, SECOND)
    assert member.sent == newcomer.received == 0


def until(found: Callable[[], bool]) -> bool:
    """Does it become so?"""
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_who_serves_no_more_leaves_no_thread_and_takes_no_call():
    before = threads_named("thinwire healing")
    one = Healing("127.0.0.1", 1.0, lambda: 0)
    address = one.listener.getsockname()
    (thread,) = set(threads_named("thinwire healing")) - set(before)
    one.shutdown()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    one.shutdown()


def stream(ends: tuple[Healing, Healing], state: dict[str, torch.Tensor], parts: int = 9) -> Fetching:
    """The state, asked for by the newcomer and offered by the member."""
    member, _ = ends
    fetching = Fetching(member.metadata(), 1 << 20, parts)
    assert until(lambda: member.wanted == 1)
    member.offer(3, state)
    return fetching


def test_a_state_whose_packing_fails_and_one_of_too_many_tensors_are_errors_and_no_waits(ends, caplog):
    late = stream(ends, {"x": torch.zeros(4), "y": torch.zeros(4, dtype=torch.complex64)})
    late.thread.join(60)
    assert late.failed and not late.done and late.state.keys() == {"x"}
    assert "a newcomer cannot be sent the state: state['y'] is of type torch.complex64" in caplog.text
    many = stream(ends, {str(i): torch.zeros(2) for i in range(10)})
    many.thread.join(60)
    assert many.failed == "10 tensors are announced, and at most 9 are expected"


def test_a_state_for_which_there_is_no_memory_is_an_error_and_no_wait(ends, monkeypatch):
    monkeypatch.setattr(streams, "unpack", lambda *about: bytearray(1 << 60))
    fetching = Fetching(ends[0].metadata(), 1 << 20, 9)
    fetching.thread.join(60)
    assert fetching.failed == "MemoryError" and not fetching.done


def served(member: Healing, newcomer: Healing) -> bool:
    """Does a newcomer get the state?"""
    member.send_checkpoint([1], 3, {"x": torch.ones(3)}, SECOND)
    return newcomer.recv_checkpoint(0, member.metadata(), 3, SECOND)["x"].tolist() == [1.0] * 3


def hung_up(caller: socket.socket) -> bool:
    """Does the member end this connection, and nothing else?"""
    caller.settimeout(60)
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:  # it had not read all
        return True


@pytest.mark.parametrize(
    "said",
    [b"[" * 4000 + b"\n", b"7\n", b'{"token": "\xc3\xa4", "offset": 0}\n', b'{"token": "TOKEN", "offset": 1e999}\n'],
)
def test_what_a_stranger_says_ends_no_more_than_its_own_connection(ends, monkeypatch, said):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    member, newcomer = ends
    with socket.create_connection(member.listener.getsockname()) as stranger:
        stranger.sendall(said.replace(b"TOKEN", member.token.encode()))
        assert hung_up(stranger)
    assert served(member, newcomer) and not errors


def test_strangers_who_are_slow_or_many_are_hung_up_on(monkeypatch):
    monkeypatch.setattr(healing, "MOST", 2)
    member = Healing("127.0.0.1", 0.3, lambda: 0)
    try:
        address = member.listener.getsockname()
        first, second, third = (socket.create_connection(address) for _ in range(3))
        assert hung_up(third), "two are answered at a time"
        sent = 0
        with suppress(ConnectionError):
            while sent < 400:  # all of a request must come within the 0.3 s, and not a byte of it
                first.sendall(b"x")
                sent += 1
                time.sleep(0.02)
        assert sent < 400 and hung_up(second)
        assert until(lambda: served(member, Healing("127.0.0.1", 60.0, lambda: 1 << 20)))
    finally:
        member.shutdown()


def test_who_can_start_no_thread_for_a_while_serves_again(monkeypatch):
    """Nor are its places lost: there are two, and three callers could not be answered."""
    monkeypatch.setattr(healing, "MOST", 2)
    starts, start = [], threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) == member._answer and len(starts) < 3:
            starts.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    member = Healing("127.0.0.1", 1.0, lambda: 0)
    monkeypatch.setattr(threading.Thread, "start", fails)
    try:
        for number in (1, 2, 3):
            with socket.create_connection(member.listener.getsockname()) as caller:
                assert hung_up(caller) and len(starts) == number
        assert served(member, Healing("127.0.0.1", 1.0, lambda: 1 << 20))
    finally:
        member.shutdown()


def test_a_state_that_no_thread_can_pack_ends_too_early_and_not_the_member(ends, monkeypatch, caplog):
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "thinwire packing":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    fetching = stream(ends, {"x": torch.zeros(4)})
    fetching.thread.join(60)
    assert fetching.failed and not fetching.done
    assert "a newcomer cannot be sent the state: can't start new thread" in caplog.text


def test_who_has_too_many_files_open_for_a_while_serves_again(ends):
    member, newcomer = ends
    callers = [socket.socket() for _ in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, limits[1]))
    try:
        for caller in callers:
            caller.connect(member.listener.getsockname())
        time.sleep(0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in taken:
            os.close(number)
        for caller in callers:
            caller.close()
    assert served(member, newcomer)


def test_a_state_that_is_not_wanted_any_more_is_not_waited_for(ends):
    """Neither before the member has taken it, nor while the connection is being made."""
    asked = Fetching(ends[0].metadata(), 1 << 20, 9)
    assert until(lambda: ends[0].wanted == 1)
    asked.close()
    assert not asked.thread.is_alive() and asked.failed
    late = Fetch(json.loads(ends[0].metadata()), {"stream": -1}, 60.0)
    late.give_up()
    with pytest.raises(ConnectionError, match="not wanted any more"):
        late.read(memoryview(bytearray(1)))


def test_a_copy_that_nobody_fetches_to_its_end_is_not_kept(ends, monkeypatch):
    member, _ = ends
    fetching = stream(ends, {str(i): torch.randn(200_000) for i in range(8)})
    fetching.close()
    assert until(lambda: not member.served)
    assert member.stream is not None, "it may come back for the rest"
    monkeypatch.setattr(healing, "KEPT", 0.0)
    member.offer(4, {})
    assert member.stream is None


@pytest.mark.parametrize("tree", [{"tensor": -9}, {"tensor": "x"}, {"table": 3}, {"list": [3]}, {"a": 1}, [1], 7])
def test_a_tree_that_is_none_is_refused(tree):
    header = json.dumps({"tree": tree, "tensors": []}).encode()
    with pytest.raises(ValueError):
        unpack(reader(MAGIC + len(header).to_bytes(8, "little") + header), 100)
