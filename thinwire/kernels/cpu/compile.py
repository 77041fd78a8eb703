"""How the CPU kernels are compiled: Numba with the thread-safe OpenMP layer and a cache on disk.

The default "workqueue" layer aborts when two threads call kernels at once (a communication thread and autograd
do). The cache lives beside the package, or, where that cannot be written, in the user's cache folder or a
temporary one: a read-only install still works. A folder that others can write to is not used (`is_ours`); where nothing
else is left, kernels are compiled anew in every process.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import numba
import numpy as np
import torch
from torch import Tensor

PARALLEL_VALUES = 1 << 16  # below this many values one thread does it all
HUGE_BYTES, PAGE, MADV_HUGEPAGE = 4 << 20, 4096, 14
CHUNK_BLOCKS = 64  # blocks a loop iteration handles: enough work to share among threads, small enough for L1


def _cache_directory() -> str:
    """A writable folder for compiled kernels, named by a hash of their sources.

    Numba's own check sees only the file of the kernel itself: an edit to a helper it calls would go unnoticed.
    """
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *here.parent.glob("*.py")])
    name = "kernels-" + hashlib.blake2b(b"".join(p.read_bytes() for p in sources), digest_size=6).hexdigest()
    temporary = Path(tempfile.gettempdir()) / f"thinwire-{os.getuid()}"
    for folder in (here / "__pycache__", Path.home() / ".cache" / "thinwire", temporary):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder / name):
                pass
        except OSError:
            continue
        if is_ours(folder) and is_ours(folder / name):
            return str(folder / name)
    folder = Path(tempfile.mkdtemp(prefix="thinwire-"))  # for this process alone
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


def is_ours(folder: Path) -> bool:
    """May code be loaded from this folder? Numba's cache is a pickle: whoever can write there runs code as us.

    The folder is no link, belongs to this user or to root, and nobody else can write to it.
    """
    about = folder.lstat()
    others_write = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(about.st_mode) and about.st_uid in (0, os.getuid()) and not others_write


numba.config.THREADING_LAYER = "omp"
numba.config.CACHE_DIR = CACHE_DIRECTORY = _cache_directory()

_owner: dict[str, int] = {}  # the process that ran the first parallel kernel: OpenMP's threads belong to it
_kernels: list[Any] = []  # all that `parallel` made

OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


def inline(function: Callable) -> Any:
    """Compile a helper that kernels call."""
    return numba.njit(**OPTIONS)(function)


def parallel(function: Callable) -> Any:
    """Compile a kernel whose `prange` loops run on as many threads as torch uses (`torch.set_num_threads`).

    One thread means a serial version of the same code, which never touches OpenMP: for small arrays, where waking a
    thread costs more than it saves; where torch is told to use one (torchrun does, for several ranks a machine); in a
    child forked after its parent ran a parallel kernel, which OpenMP would end; and on macOS, where pip's Numba comes
    without OpenMP, and with torch's copy of it would share a process with other copies.
    """
    many = numba.njit(parallel=True, **OPTIONS)(function)
    one = numba.njit(**OPTIONS)(_renamed(function, "serial"))

    def call(*args: Any) -> Any:
        small = all(a.size < PARALLEL_VALUES for a in args if isinstance(a, np.ndarray))
        threads = 1 if small else kernel_threads()
        if threads == 1:
            return one(*args)
        numba.set_num_threads(threads)
        return many(*args)

    call.many, call.one = many, one
    _kernels.append(call)
    return call


def kernel_threads() -> int:
    """How many threads a kernel on large arrays runs on, in this process."""
    if sys.platform == "darwin":
        return 1
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    return 1 if threads == 1 or os.getpid() != _owner.setdefault("pid", os.getpid()) else threads


@contextmanager
def compiled_once() -> Iterator[None]:
    """Around first calls of kernels, on small arrays: what they compile is then compiled for many threads as well,
    where large arrays will need that.

    Ranks of one machine would all compile the same at the same time. The first to come here locks the cache's folder,
    the others wait for it and load what it compiled.
    """
    with (Path(CACHE_DIRECTORY) / "lock").open("wb") as file:
        _lock(file)
        yield
        if kernel_threads() > 1:
            for kernel in _kernels:
                for signature in kernel.one.signatures:
                    kernel.many.compile(signature)


def _lock(file: IO[bytes]) -> None:
    """Until it is closed: alone if nobody has it, else together with all who waited."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError:  # a file system without locks, as Lustre may be: every process compiles for itself
        return


def _renamed(function: Callable, suffix: str) -> Callable:
    """The same function under another name: Numba's cache knows functions by name, not by how they are compiled."""
    twin = FunctionType(function.__code__, function.__globals__, f"{function.__name__}_{suffix}", function.__defaults__)
    twin.__qualname__, twin.__module__ = twin.__name__, function.__module__
    return twin


def allocate(n: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised float[n] or uint8[n]. A large one asks the kernel for huge pages: a fresh 64 MiB buffer is
    touched in 5 ms instead of 19 (advice only: where the system has none, it is an ordinary buffer)."""
    out = torch.empty(n, dtype=dtype)
    size = out.numel() * out.element_size()
    if size >= HUGE_BYTES and sys.platform == "linux":
        start = -(-out.data_ptr() // PAGE) * PAGE
        length = (out.data_ptr() + size - start) // PAGE * PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)
    return out


def array(x: Tensor) -> Any:
    """The numpy view that kernels take: bfloat16 as uint16 (numpy has no such type), others as they are."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy()
    return x.numpy()
