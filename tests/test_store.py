"""Stores of remembered tensors: files equal RAM, capacity, host memory, and what goes wrong with files."""

from __future__ import annotations

import os

import pytest
import torch
from channel_support import ends, move
from inputs import tensor

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m
from thinwire.errors import UsageError
from thinwire.memory.store import FileStore, RamStore


@pytest.mark.parametrize("dtype", ["native", "fp32", "bf16", "int8"])
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


def test_a_store_cut_while_in_use_is_an_error(tmp_path):
    store = FileStore(tmp_path / "s", "fp32")
    store.put(1, store.pack(torch.ones(64)))
    os.truncate(store.path, 10)
    with pytest.raises(OSError, match="cut while in use"):
        store.get(1)


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
