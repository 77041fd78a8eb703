"""Collectives in a group that torch.distributed does not know, by the few things that thinwire asks of one."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from thinwire import collectives as c
from thinwire.collectives.groups import Metered, elastic, is_alone, unmetered, world
from thinwire.collectives.members import Elastic
from thinwire.collectives.messages import all_reduce, gather, maximum
from thinwire.distributed.values import broadcast_json, gather_json, tensors_on_first
from thinwire.elastic.line import HEADER
from thinwire.elastic.mesh import Mesh
from thinwire.errors import UsageError

SIZE = 3
LIMIT = 30.0


def on_members(work) -> list:
    """work(group) on SIZE threads, each a member of one group."""
    store, out = dist.HashStore(), {}

    def member(rank: int) -> None:
        out[rank] = work(Mesh(store, rank, SIZE, "127.0.0.1", LIMIT))

    join([threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(SIZE)])
    return [out[rank] for rank in range(SIZE)]


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)


def exchanges(group: Mesh) -> list:
    """Every primitive once, directly and by the backend's own collectives (many values)."""
    rank = world(group)[1]
    few, many = torch.full((4,), float(rank)), torch.full((300_000,), float(rank))
    x = torch.randn(600, generator=torch.Generator().manual_seed(rank))
    collectives = [c.Quantized(4), c.OkTopk(0.1), c.TopkAllgather(0.1), c.LowRank(2).for_shapes([(20, 30)]), c.Dense()]
    found = [one.exchange(x, Metered(group), state={})[0] for one in collectives]
    assert all(bool(torch.isfinite(mean).all()) for mean in found)
    return [
        *found, gather(few, group)[2], all_reduce(many, group), maximum(few, group),
        broadcast_json({"from": rank}, 1, group), gather_json(rank, group),
        len(tensors_on_first({"x": few}, group)) == (SIZE if rank == 0 else 0),
    ]  # fmt: skip


def test_collectives_need_only_what_members_can_do():
    first, *others = on_members(exchanges)
    assert not dist.is_initialized()
    for found in others:
        for mine, theirs in zip(found, first, strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    *_, seconds, total, most, said, ranks, arrived = first
    assert seconds.tolist() == [2.0] * 4 and most.tolist() == [2.0] * 4 and arrived
    assert total.unique().tolist() == [3.0] and said == {"from": 1} and ranks == [0, 1, 2]


def refusal(group: Mesh) -> str:
    with pytest.raises(UsageError) as refused:
        c.Hierarchical(per_host=1).exchange(torch.ones(8), group, state={})
    assert not is_alone(group) and elastic(group) is None
    with pytest.raises(UsageError):
        unmetered(group)
    return str(refused.value)


def test_what_needs_a_group_of_torch_says_so():
    assert on_members(refusal)[0] == "Mesh: this needs a process group of torch, whose ranks stay"


class Alone(Mesh, Elastic):
    """A quorum of one."""

    number, committed, counted = 1, -1, True

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, 1, "127.0.0.1", LIMIT)
        self.staged: list = []
        self.told: dict = {}

    def begin(self) -> None: ...

    def commit(self) -> bool:
        while self.staged:
            self.staged.pop()(True)
        return True

    def stage(self, settle) -> None:
        self.staged.append(settle)

    def report(self, error: Exception) -> None: ...

    def fall_behind(self) -> None: ...

    def register(self, name, load, save) -> None:
        self.told[name] = load, save


def test_a_resume_on_another_number_of_members_conserves_the_mean_residual():
    model, quorum = torch.nn.Linear(4, 4, bias=False), Alone()
    reducer = tw.parallel.Reducer(model.named_parameters(), "max", quorum)  # 4 bits, error feedback
    state = {f"rank{r}of3/e/weight": torch.full((4, 4), float(r)) for r in range(3)}
    reducer.load_state_dict(state | {f"rank{r}of3/step": torch.tensor(7) for r in range(3)})
    before = reducer.exchange.state_dict()
    assert before["e/weight"].unique().tolist() == [1.0] and before["step"] == 7
    model(torch.ones(4)).sum().backward()
    gradient = model.weight.grad.clone()
    assert reducer.finish() and quorum.commit()
    assert torch.equal(model.weight.grad, gradient), "alone nothing is sent, and the residual stays"
    assert torch.equal(reducer.exchange.state_dict()["e/weight"], before["e/weight"])
    reducer.close()


def test_a_newcomer_with_other_settings_is_refused():
    model, quorum = torch.nn.Linear(4, 4), Alone()
    reducer = tw.parallel.Reducer(model.named_parameters(), "max", quorum)
    ((load, save),) = quorum.told.values()
    told = save()
    load(told)
    with pytest.raises(UsageError, match=r"differs from the quorum in seed: 0 against 7"):
        load(told | {"config": told["config"] | {"seed": "7"}})
    reducer.close()


def test_a_connection_that_breaks_in_mid_message_ends_every_wait_at_once():
    """Member 2 has sent half of a message, and dies; member 1 notices, and closes its own. The time-out is far away."""
    store, meshes = dist.HashStore(), {}

    def member(rank: int) -> None:
        meshes[rank] = Mesh(store, rank, SIZE, "127.0.0.1", 10 * LIMIT)

    join([threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(SIZE)])
    big, ended = 1 << 24, {}

    def wait(name: str, work: dist.Work) -> None:
        with pytest.raises(RuntimeError) as broken:
            work.wait()
        ended[name] = str(broken.value)

    arriving = meshes[0].irecv(torch.empty(big, dtype=torch.uint8), 2)
    leaving = meshes[0].isend(torch.zeros(8 * big, dtype=torch.uint8), 1)  # more than its buffers take: nobody reads
    meshes[1].lines[0].connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    waits = {"arriving": arriving, "leaving": leaving, "behind": meshes[0].irecv(torch.empty(4), 1)}
    threads = [threading.Thread(target=wait, args=item, daemon=True) for item in waits.items()]
    for thread in threads:
        thread.start()
    line = meshes[2].lines[0]
    line.connection.sendall(HEADER.pack(0, big) + bytes(big // 2))
    meshes[2].abort()
    meshes[1].abort()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(ended) == ["arriving", "behind", "leaving"], ended
    assert "member 2 broke" in ended["arriving"] and "member 1 broke" in ended["behind"]
    with pytest.raises(RuntimeError):
        meshes[0].isend(torch.ones(1), 2)


def test_messages_that_nobody_expects_yet_wait_in_their_order():
    def work(group: Mesh) -> list:
        rank = group.world()[1]
        sends = [group.isend(torch.full((n,), float(n)), 0, tag) for n, tag in ((1, 5), (0, 5), (3, 7))] if rank else []
        for send in sends:
            send.wait()
        if rank:
            return []
        found = [torch.empty(n) for n in (3, 1, 0)]
        for x, tag in zip(found, (7, 5, 5)):
            group.irecv(x, 2, tag).wait()
        with pytest.raises(RuntimeError, match=r"8 bytes of member 1 were expected, and 4 came"):
            group.irecv(torch.empty(2), 1, 5).wait()
        return [x.tolist() for x in found]

    assert on_members(work)[0] == [[3.0, 3.0, 3.0], [1.0], []]
