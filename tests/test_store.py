"""Stores of remembered tensors: files equal RAM, capacity, host memory, and what goes wrong with files."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from channel_support import ends, move
from inputs import tensor

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m
from thinwire.errors import UsageError
from thinwire.memory.file_store import FileStore, remove_dead_stores, store_owner
from thinwire.memory.store import RamStore


@pytest.mark.parametrize("dtype", ["native", "fp32", "bf16", "int8", "int5", "int2"])
def test_file_store_equals_ram_store(tmp_path, dtype):
    ram, file = RamStore(dtype), FileStore(tmp_path / "store.bin", dtype)
    g = torch.Generator().manual_seed(0)
    for i in range(200):
        key, op = int(torch.randint(0, 20, (), generator=g)), int(torch.randint(0, 5, (), generator=g))
        shape = (int(torch.randint(1, 4, (), generator=g)) * 8,)
        for store in (ram, file):
            if op == 0:
                store.forget(key)
            else:
                store.put(key, store.pack(torch.full(shape, i + 0.37)))
        a, b = ram.get(key), file.get(key)
        assert (a is None) == (b is None) and sorted(ram) == sorted(file)
        if a is not None and b is not None:
            assert torch.equal(ram.unpack(a), file.unpack(b))
    assert ram.used == file.used and file.end >= file.used
    assert os.path.getsize(file.path) <= file.end
    file.close()
    assert not file.path.exists()


def test_pinned_share_is_chosen_by_hash_alone():
    """Half of the ids are kept, the same half whatever the order: both ends agree without talking."""
    a, b = RamStore("bf16", 0.5), RamStore("bf16", 0.5)
    value = torch.ones(4)
    for key in range(2000):
        a.put(key, a.pack(value))
        b.put(1999 - key, b.pack(value))
    assert sorted(a) == sorted(b) and 900 < len(list(a)) < 1100


def test_capacity_in_bytes_keeps_the_first_that_fit(tmp_path):
    for store in (RamStore("fp32", "1KB"), FileStore(tmp_path / "s", "fp32", 1000)):
        for key in range(10):
            store.put(key, store.pack(torch.ones(64)))  # 256 bytes
        assert list(store) == [0, 1, 2] and store.used == 768
        store.forget(1)
        assert store.put(9, store.pack(torch.ones(64))) and sorted(store) == [0, 2, 9]


def test_samples_beyond_capacity_stay_cold_and_both_ends_agree():
    pair = ends(c.Quantize(4), m.Delta(capacity=0.5))
    for _ in range(3):
        for key in range(40):
            for end in pair:
                end.begin()
            move(pair, key, torch.ones(32))
            for end in pair:
                end.commit()
    kept = sum(pair[0].is_warm(key, (32,)) for key in range(40))
    assert 10 < kept < 30 and pair[0].stats.warm == 2 * kept == pair[1].stats.warm


def test_delta_through_a_file_equals_ram(tmp_path):
    in_file = [tw.Channel(c.Quantize(3), m.Delta(path=str(tmp_path / f"{i}.bin"))) for i in range(2)]
    in_ram = ends(c.Quantize(3), m.Delta())
    for visit in range(3):
        for key in range(6):
            x = tensor("gaussian", (4, 50), torch.float32, key) + 0.01 * visit
            assert torch.equal(move(tuple(in_file), key, x), move(in_ram, key, x))


def test_delta_in_host_memory_equals_ram_and_is_checkpointed():
    """Here tensors are in host memory already; on a card benchmarks/card/gpu.py --only nccl compares."""
    in_host, in_ram = ends(c.Quantize(3), m.Delta(host=True)), ends(c.Quantize(3), m.Delta())
    for visit in range(3):
        for key in range(6):
            x = tensor("gaussian", (4, 50), torch.float32, key) + 0.01 * visit
            assert torch.equal(move(in_host, key, x), move(in_ram, key, x))
    mine, theirs = in_host[0].state_dict(), in_ram[0].state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(UsageError, match="path or host"):
        m.Delta(path="somewhere", host=True)


def test_unwritable_store_is_one_line():
    with pytest.raises(ValueError, match="cannot open the store /proc/nowhere/x") as caught:
        FileStore("/proc/nowhere/x")
    assert "\n" not in str(caught.value)


def damaged_store(tmp_path, damage) -> FileStore:
    """With keys 1, 2 and 3, after `damage` to its file; only 2's value is in its middle."""
    store = FileStore(tmp_path / "s", "fp32")
    for key in (1, 2, 3):
        store.put(key, store.pack(torch.full((64,), float(key))))
    damage(store.path)
    return store


def overwrite_middle(path):
    with path.open("r+b") as file:
        file.seek(300)
        file.write(b"x")


@pytest.mark.parametrize(
    ("damage", "words", "lost"),
    [(overwrite_middle, "changed by somebody else", [2]), (lambda p: os.truncate(p, 500), "cut by somebody", [2, 3])],
)
def test_what_somebody_else_wrote_into_a_store_is_never_read(tmp_path, caplog, damage, words, lost):
    store = damaged_store(tmp_path, damage)
    with pytest.raises(OSError, match=words):
        store.get(2)
    store.prefetch([1, 2, 3])
    store.load([1, 2, 3])
    assert [key for key in (1, 2, 3) if key not in store] == lost and store.lost == len(lost)
    assert store.get(2) is None and store.get(1) is not None
    [said] = caplog.messages
    assert words in said and f"{len(lost)} keys are forgotten, the first is 2" in said
    store.put(2, store.pack(torch.full((64,), 5.0)))
    assert float(store.get(2).data[0]) == 5.0


def test_a_checkpoint_leaves_out_what_somebody_else_wrote(tmp_path):
    channel = tw.Channel(c.Quantize(4), m.Delta(path=str(tmp_path / "s")))
    for key in range(3):
        channel.send(key, torch.ones(64))
    channel.state.stores["h"].path.write_bytes(b"x" * 100)
    assert "h/i:0" not in channel.state_dict() and channel.state.stores["h"].lost == 3


def test_a_store_has_its_file_alone(tmp_path):
    """A second opener is refused and harms nothing; a store that is closed, or gone, holds nothing."""
    first = FileStore(tmp_path / "s", "fp32")
    first.put(1, first.pack(torch.ones(8)))
    with pytest.raises(UsageError, match=r"the store .*/s is in use by another store") as caught:
        FileStore(tmp_path / "s", "fp32")
    assert "\n" not in str(caught.value) and float(first.get(1).data[0]) == 1.0
    first.close()
    second = FileStore(tmp_path / "s", "fp32")
    del second
    FileStore(tmp_path / "s", "fp32").close()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot open the store"):
        FileStore(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_files_of_dead_runs_are_removed_and_no_others(tmp_path):
    owner = store_owner("12345678", 0)
    names = {name: tmp_path / f"{owner}{name}.store" for name in ("dead", "young", "used")}
    other_machine = tmp_path / "elsewhere-12345678-rank0-dead.store"
    own_choice = tmp_path / "mine.store"
    used = FileStore(names["used"])
    for path in (names["dead"], names["young"], other_machine, own_choice):
        path.write_bytes(b"x")
    for path in tmp_path.iterdir():
        if path != names["young"]:
            os.utime(path, (0, 0))
    remove_dead_stores(tmp_path)
    assert set(tmp_path.iterdir()) == {names["young"], names["used"], other_machine, own_choice}
    used.close()
    remove_dead_stores(tmp_path / "nowhere")


def test_a_commit_that_fails_leaves_nothing_at_one_end_only(tmp_path, monkeypatch):
    """The disk is full at the third of four writes, of samples known and unknown: those written are forgotten, the
    others are as before, and the next visits of all are received."""
    memories = [m.Delta(path=str(tmp_path / name)) for name in ("sender", "receiver")]
    pair = [tw.Channel(c.Quantize(4), memory) for memory in memories]

    def visit(x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        for end in pair:
            end.begin()
        return pair[1].recv(ids, pair[0].send(ids, x), x.shape, x.dtype)

    visit(torch.ones(3, 64), [1, 3, 9])
    for end in pair:
        end.commit()
    before = [pair[0].digest(key) for key in (3, 9)]
    visit(2 * torch.ones(4, 64), [1, 2, 3, 4])
    room = [2]

    def nearly_full(*arguments):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    real = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", nearly_full)
        with pytest.raises(UsageError, match="No space left"):
            pair[0].commit()
    for end in pair:
        end.rollback()
    kept = {key: pair[0].digest(key) for key in (1, 2, 3, 4, 9)}
    assert kept[9] == before[1] and [key for key in kept if kept[key] < 0] == [1, 2, 3, 4]
    assert pair[0].state.stores["h"].used == 128
    other = {key: pair[1].digest(key) for key in kept}
    for key in (key for key in kept if kept[key] != other[key]):  # as a pipeline does at the start of a step
        for end in pair:
            end.forget(key)
    visit(3 * torch.ones(5, 64), [1, 2, 3, 4, 9])
    for end in pair:
        end.commit()
    assert [pair[0].digest(key) for key in kept] == [pair[1].digest(key) for key in kept]


def test_file_store_memory_stays_small(tmp_path):
    """200 MB through the store, under 40 MB more resident memory (the 2 GB version: benchmarks/pipeline/store.py)."""

    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    store, row = FileStore(tmp_path / "s", "bf16"), torch.ones(1024, 1024)
    store.put(0, store.pack(row))
    before = resident()
    for key in range(1, 100):
        store.put(key, store.pack(row))
        store.get(key)
    assert store.used == 200 * 2**20 and resident() - before < 40e6
