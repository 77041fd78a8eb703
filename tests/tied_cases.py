"""Cases of the tied embedding's tests. Rank = 2 · replica + (is the last stage)."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import check, check_ranks_agree
from torch import nn

from thinwire.collectives.groups import Group
from thinwire.config.wire import Wire
from thinwire.data_parallel.gradient_pass import Pass
from thinwire.parallel import TiedEmbedding
from thinwire.train.config.sections import read_config
from thinwire.train.mesh import make_mesh
from thinwire.train.update import Update

VALUES, STEPS, RATE = (2000, 100), 3, 0.1
V = 4 * math.prod(VALUES)  # bytes


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(100 * step + rank))


def bytes_that_left_the_host() -> int:
    """Headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}
    return sum(count for name, count in counts.items() if name != "lo")


def groups() -> tuple[Group, Group]:
    """This stage's replicas, and this replica's two stages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    columns = [dist.new_group(list(range(end, size, 2))) for end in range(2)]
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    return columns[rank % 2], pairs[rank // 2]


def train(sync: str) -> tuple[torch.Tensor, int, int]:
    """SGD on random gradients: the weight, bytes that the group counted, bytes that left the host."""
    column, pair = groups()
    weight = nn.Parameter(torch.ones(VALUES))
    tied = TiedEmbedding(weight, {"embedding": {"sync": sync}}, dist.group.WORLD, column, pair)
    dist.barrier()
    before = bytes_that_left_the_host()
    for step in range(STEPS):
        weight.grad = gradient(step, dist.get_rank())
        check(tied.finish(), f"step {step} was skipped")
        with torch.no_grad():
            weight -= RATE * weight.grad
    crossed = bytes_that_left_the_host() - before
    check(tied.check(), "the copies differ")
    tied.reducer.close()
    return weight.detach(), tied.sent, crossed


def sync_trains_on_the_summed_gradients_in_the_predicted_bytes(sync: str) -> None:
    """w − rate · (mean over replicas of the sum over the two stages), to 1e-6; all copies to the bit. And the bytes:
    V(3D−2)/D per rank and step where separate, V(2D−1)/D where fused, by the group's counter and at the hosts."""
    size = dist.get_world_size()
    replicas = size // 2
    weight, sent, crossed = train(sync)
    expected = torch.ones(VALUES, dtype=torch.float64)
    for step in range(STEPS):
        expected -= RATE * sum(gradient(step, rank).double() for rank in range(size)) / replicas
    off = float((weight.double() - expected).abs().max())
    check(off < 1e-6, f"the weight is off by {off:.1e}")
    check_ranks_agree("the weight", {"weight": weight})
    predicted = STEPS * V * ((3 if sync == "separate" else 2) * replicas - (2 if sync == "separate" else 1)) / replicas
    check(abs(sent / predicted - 1) < 1e-4, f"sent {sent} bytes, predicted {predicted}")
    total = torch.tensor([crossed], dtype=torch.float64)
    dist.all_reduce(total)
    ratio = float(total) / size / predicted
    check(abs(ratio - 1) < 0.06, f"what left the hosts is {ratio} of what was predicted")


def copy_that_differs_is_healed_and_counted() -> None:
    """One copy and its moment are spoilt, on rank 1."""
    weight, moment = nn.Parameter(torch.ones(VALUES)), torch.full(VALUES, 2.0)
    tied = TiedEmbedding(weight, {"embedding": {"sync": "fused"}}, dist.group.WORLD)
    for visit, (equal, healed) in enumerate([(True, 0), (False, 1), (True, 1)]):
        if visit == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                weight[5, 7], moment[5, 7] = 9.0, 9.0
        seen = tied.check([moment])
        check(seen is equal, f"visit {visit}: the copies are called {'equal' if seen else 'unequal'}")
        check(tied.healed == healed, f"visit {visit}: {tied.healed} healed, not {healed}")
        values = float(weight.detach()[5, 7]), float(moment[5, 7])
        check(values == (1.0, 2.0), f"visit {visit}: weight and moment are {values}")
    tied.reducer.close()


def on_a_card_all_exchanges_have_one_thread_and_one_order() -> None:
    """Two communicators whose kernels ranks launch in different orders can wait for each other on a card. The trainer's
    update as it is made for one, with tensors on the CPU: gradients and tied embedding, delayed at random on each rank,
    begin on one thread, and in the same order everywhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = {"dp": size // 2, "pp": 2, "microbatches": 2}
    config = read_config({"mesh": mesh, "wire": {"preset": "max"}, "run": {"device": "cuda"}})
    named = {name: nn.Parameter(torch.ones(64, 32)) for name in ("embedding", "first", "second")}
    update = Update(config, Wire.of("max"), make_mesh(config.mesh), named, "embedding", None, 10, {rank % 2: named})
    begun, threads, exchange, delays = [], set(), Pass._exchange, random.Random(rank)

    def recorded(self: Pass, unit, x) -> None:
        time.sleep(0.02 * delays.random())
        begun.append((self.setup is update.tied.reducer.setup, unit.parameters))
        threads.add(threading.current_thread())
        exchange(self, unit, x)

    with mock.patch.object(Pass, "_exchange", recorded):
        for step in range(STEPS):
            for parameter in named.values():
                parameter.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(100 * step + rank))
            check(update.exchanged(), f"step {step} was skipped")
            update.apply(0.1, 1.0, False)
    update.close()
    check(len(threads) == 1, f"{len(threads)} threads exchange")
    check({tied for tied, _ in begun} == {True, False}, f"only one of the two was exchanged: {begun}")
    everywhere = [None] * size
    dist.all_gather_object(everywhere, begun)
    check(everywhere == [begun] * size, f"orders differ: {everywhere}")
    check_ranks_agree("the embedding", {"embedding": named["embedding"].detach()})
