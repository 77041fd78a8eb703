"""Ranks that must share a machine's cores are timed one after another, and the simulator lets them share the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.distributed.values import gather_json
from thinwire.train.tune.links import meet

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and namespaces of a machine


def turns(device: torch.device) -> Iterator[None]:
    """`for _ in turns(device): …` runs the body once on every rank. Ranks of one machine run it one after another, but
    where the machine has cores for all of them at once, as in a step. All ranks of the world call it together."""
    places = _places()
    machines = [machine for machine, _ in places]
    crowded = device.type != "cpu" or any(machines.count(machine) > cores for machine, cores in places)
    rank = dist.get_rank()
    mine = machines[:rank].count(machines[rank]) if crowded else 0
    for turn in range(max(map(machines.count, machines)) if crowded else 1):
        if turn == mine:
            yield
        meet()


def shared_cores(device: torch.device) -> int:
    """How many ranks can compute at the same time, where all ranks are on one machine that has fewer cores than they
    have threads; else 0. All ranks of the world call it together."""
    places = _places()
    machines = {machine for machine, _ in places}
    cores = min(cores for _, cores in places)
    return cores if device.type == "cpu" and len(machines) == 1 and 0 < cores < len(places) else 0


def _places() -> list[tuple[str, int]]:
    """By rank, what tells machines apart, and how many ranks like this one it has cores for."""
    machine = BOOT.read_text().strip() if BOOT.exists() else str(dist.get_rank())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [(name, cores) for name, cores in gather_json([machine, usable // torch.get_num_threads()])]
