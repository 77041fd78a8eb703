"""Several ranks on one card: started, told apart, timed out. What the NCCL sections of gpu.py stand on.

NCCL refuses two ranks on one device unless they claim different hosts, so every rank gets its own NCCL_HOSTID and
talks over sockets: the loopback device, or the `eth0` of a host in the lab's emulated network.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing as mp
import os
import queue
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(Path(__file__).resolve().parent)]
sys.path[:0] = PATHS
PRELOAD = ["torch", "torch.distributed.pipelining", "thinwire.pipeline.pipeline", "thinwire.data_parallel.ddp"]
KERNELS = ("bits", "checksum", "delta", "hadamard", "indices", "quantize", "select", "sign", "ternary")
BOTH = "cpu:gloo,cuda:nccl"
PORTS = 20  # a launch may meet so many times, at one port after the other


def nccl_variables(rank: int, interface: str = "lo") -> dict[str, str]:
    return {
        "NCCL_HOSTID": f"thinwire-{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface,
    }  # fmt: skip


def join(device: str, backend: str = BOTH, seconds: float = 60.0) -> torch.device:
    """This rank into the group; its device. Without a card (for a trial of the scripts) everything is Gloo's."""
    use_reference_without_numba()
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        return torch.device("cpu")
    for name, value in nccl_variables(int(os.environ["RANK"]), os.environ.get("NCCL_SOCKET_IFNAME", "lo")).items():
        os.environ[name] = value
    torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return torch.device("cuda", 0)


def use_reference_without_numba() -> None:
    """A machine without Numba can still run the CPU side, slowly: in plain torch."""
    if importlib.util.find_spec("numba") is not None:
        return
    for name in KERNELS:
        module: Any = importlib.import_module(f"thinwire.kernels.{name}")
        given = module.choose
        module.choose = lambda x, impl=None, given=given: impl or ("reference" if x.device.type == "cpu" else given(x))
    random: Any = importlib.import_module("thinwire.kernels.random")
    for name in ("uniform_rows", "sample_rows"):
        rows = getattr(random, name)
        plain = lambda *args, rows=rows: rows(*args, impl="reference")  # noqa: E731
        setattr(random, name, plain)
        for user in ("thinwire.codecs.theory", "thinwire.codecs.sparse", "thinwire.pipeline.dropout"):
            if hasattr(importlib.import_module(user), name):
                setattr(importlib.import_module(user), name, plain)


def launch(function: Callable[..., Any], ranks: int, *arguments: Any, seconds: float) -> Iterator[tuple[int, Any]]:
    """function(tell, *arguments) on every rank; yields (rank, whatever it tells) as it comes, and (rank, Failure)."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    told, port, end = context.Queue(), _free_port(), time.monotonic() + seconds
    processes = [
        context.Process(target=_rank, args=(told, rank, ranks, port, seconds, function, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    running = set(range(ranks))
    try:
        while running:
            try:
                rank, what = told.get(timeout=max(0.01, min(1.0, end - time.monotonic())))
            except queue.Empty:
                if time.monotonic() > end:
                    yield from ((rank, Failure(f"no answer in {seconds:.0f} s")) for rank in running)
                    return
                dead = [r for r in running if processes[r].exitcode not in (None, 0)]
                yield from ((r, Failure(f"ended with {processes[r].exitcode}")) for r in dead)
                running -= set(dead)
                continue
            if isinstance(what, _Done):
                running.discard(rank)
            else:
                yield rank, what
                if isinstance(what, Failure):
                    running.discard(rank)
    finally:
        for process in processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()


class Failure(str):
    """Why a rank did not come to its end."""


class _Done:
    pass


def _rank(
    told: Any, rank: int, ranks: int, port: int, seconds: float, function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    faulthandler.dump_traceback_later(0.9 * seconds)  # where every thread stands, should it hang
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **nccl_variables(rank),
    }  # fmt: skip
    try:
        function(lambda what: told.put((rank, what)), *arguments)
        told.put((rank, _Done()))
    except BaseException:
        told.put((rank, Failure(traceback.format_exc())))
    told.close()
    told.join_thread()
    os._exit(0)  # libraries of a card are slow to unload, and nothing is left to do


def _free_port() -> int:
    """The first of PORTS free ports in a row, from below those that the kernel hands out to connections."""
    for first in random.sample(range(20_000, 30_000, PORTS), 100):
        with ExitStack() as held:
            try:
                for port in range(first, first + PORTS):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError(f"no {PORTS} free ports in a row between 20000 and 30000")
