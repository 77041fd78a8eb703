"""Ranks that share one machine's cores are timed one after another, and the simulator lets them share the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.distributed.values import gather_json
from thinwire.train.tune.links import meet

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and namespaces of a machine


def turns() -> Iterator[None]:
    """`for _ in turns(): …` runs the body once on every rank, on ranks of one machine one after another. All ranks of
    the world call it together."""
    machines = _machines()
    rank = dist.get_rank()
    mine = machines[:rank].count(machines[rank])
    for turn in range(max(map(machines.count, machines))):
        if turn == mine:
            yield
        meet()


def shared_cores(device: torch.device) -> int:
    """How many ranks can compute at the same time, where all ranks are on one machine that has fewer cores than they
    have threads; else 0. All ranks of the world call it together."""
    machines = _machines()
    cores = _usable_cores() // torch.get_num_threads()
    return cores if device.type == "cpu" and len(set(machines)) == 1 and 0 < cores < len(machines) else 0


def _usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machines() -> list[str]:
    """By rank, what tells machines apart."""
    found: list[str] = gather_json(BOOT.read_text().strip() if BOOT.exists() else str(dist.get_rank()))
    return found
