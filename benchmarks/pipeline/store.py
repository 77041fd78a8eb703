"""The file store at size: 2 GB of bfloat16 rows written and read back at random; how much memory does it hold?

    python benchmarks/pipeline/store.py [GB] [FOLDER]

Prints rows, megabytes a second each way, and the growth of resident memory (the page cache is not ours).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from thinwire.memory import FileStore

ROW = (1024, 1024)  # 2 MiB in bfloat16: a sample of 1024 tokens, hidden size 1024


def resident() -> float:
    """Megabytes of this process in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    folder = sys.argv[2] if len(sys.argv) > 2 else None
    rows = int(gigabytes * 1e9 / (2 * ROW[0] * ROW[1]))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = FileStore(Path(place) / "store.bin", "bf16")
        value = torch.randn(ROW, generator=torch.Generator().manual_seed(0))
        store.put(0, store.pack(value))
        before, start = resident(), time.perf_counter()
        for key in range(rows):
            store.put(key, store.pack(value + key))
        wrote = time.perf_counter()
        for key in torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist():
            entry = store.get(key)
            assert entry is not None
            assert torch.equal(store.unpack(entry)[0, :8], (value[0, :8] + key).bfloat16()), key
        read = time.perf_counter()
        size = store.used / 1e6
        print(f"{rows} rows, {size:.0f} MB in the file, {resident() - before:.1f} MB more resident")
        print(f"write {size / (wrote - start):.0f} MB/s (packing included), read {size / (read - wrote):.0f} MB/s")
        store.close()


if __name__ == "__main__":
    main()
