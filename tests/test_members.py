"""Collectives in a group that torch.distributed does not know, by the few things that thinwire asks of one."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import thinwire as tw
from thinwire import collectives as c
from thinwire.collectives.groups import Metered, elastic, is_alone, unmetered, world
from thinwire.collectives.members import DirectMembers, Elastic
from thinwire.collectives.messages import all_reduce, gather, maximum
from thinwire.distributed.values import broadcast_json, gather_json, tensors_on_first
from thinwire.elastic.alarm import Alarm
from thinwire.elastic.alarmed import AlarmedMembers
from thinwire.errors import UsageError
from thinwire.train.members.late import Late

SIZE = 3
LIMIT = 30.0


class Unlisted(AlarmedMembers):
    """A group of Gloo that was made by hand, with an alarm."""

    backends, alarm = "gloo", None

    def __init__(self, store: dist.Store, rank: int, limit: float = LIMIT) -> None:
        self.alarm = Alarm(store, rank, SIZE, "127.0.0.1", limit)
        self.group = dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=limit))

    def process_group(self) -> dist.ProcessGroup:
        return self.group


def on_members(work) -> list:
    """work(group) on SIZE threads, each a member of one group."""
    store, out, groups = dist.HashStore(), {}, {}

    def member(rank: int) -> None:
        groups[rank] = Unlisted(store, rank)  # kept until all are through
        out[rank] = work(groups[rank])

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return [out[rank] for rank in range(SIZE)]


def exchanges(group: Unlisted) -> list:
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


def killed_in_a_message(rank: int, folder: str) -> None:
    """Member 2 is killed while a message to member 0 leaves, for which 1 waits."""
    store = dist.FileStore(f"{folder}/store", SIZE)
    group = Unlisted(store, rank, limit=600.0)
    large, small = torch.ones(1 << 26), torch.zeros(4)
    if rank == 2:
        group.irecv(small, 0).wait()  # 0 has said where the message is to go, so that it leaves at once
        group.isend(large, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    arriving = group.irecv(large.zero_(), 2) if rank == 0 else group.irecv(small, 0)
    told = group.isend(small, 2) if rank == 0 else None  # not waited for: 2 may be gone by then
    try:
        arriving.wait()
        said = "it came"
    except RuntimeError as error:
        said = str(error)
    assert told or rank
    assert not large.any() or rank, "what comes late, or in part, is not in the caller's memory"
    Path(folder, str(rank)).write_text(said)
    os._exit(0)  # the thread that waits for Gloo has ten minutes


def test_who_waits_for_a_message_hears_that_a_member_was_killed(tmp_path):
    """In the middle of it; Gloo says nothing to 0, and to 1 neither, and both would wait for ten minutes."""
    members = mp.spawn(killed_in_a_message, (str(tmp_path),), SIZE, join=False).processes
    for member in members:
        member.join(300)
        member.kill()
    heard = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert "member 2 is gone" in heard, heard  # one of them may have heard it of the other
    assert set(heard) <= {"member 2 is gone", "member 0 gave the step up", "member 1 gave the step up"}, heard


def test_an_alarm_that_is_left_does_not_ring():
    """Member 2 leaves, 0 and 1 go on; then 0 gives up, and 1 hears it."""

    def work(group: Unlisted) -> list[str]:
        rank, x = world(group)[1], torch.ones(4)
        if rank == 2:
            group.alarm.leave()
            group.group.send([x], 1, 0).wait()
            return []
        if rank == 1:
            group.irecv(x, 2).wait()  # it had left
            sent = group.isend(x, 0)  # not waited for: 0 may have given up by then
            with pytest.raises(RuntimeError, match="member 0 gave the step up"):
                group.irecv(x, 0).wait()
            assert sent
            return [group.alarm.reason]
        group.irecv(x, 1).wait()
        group.alarm.ring("a test gives up")
        with pytest.raises(RuntimeError, match="a test gives up"):
            group.irecv(x, 1).wait()
        return [group.alarm.reason]

    assert on_members(work) == [["a test gives up"], ["member 0 gave the step up"], []]


def refusal(group: Unlisted) -> str:
    with pytest.raises(UsageError) as refused:
        c.Hierarchical(per_host=1).exchange(torch.ones(8), group, state={})
    assert not is_alone(group) and elastic(group) is None
    with pytest.raises(UsageError):
        unmetered(group)
    return str(refused.value)


def test_what_needs_a_group_of_torch_says_so():
    assert on_members(refusal)[0] == "Unlisted: this needs a process group of torch, whose ranks stay"


class Alone(DirectMembers, Elastic):
    """A quorum of one."""

    backends, number, committed, counted = "gloo", 1, -1, True

    def __init__(self) -> None:
        self.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=LIMIT))
        self.staged: list = []
        self.told: dict = {}

    def process_group(self) -> dist.ProcessGroup:
        return self.group

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


def test_a_member_goes_on_from_its_own_part_whatever_its_number_was():
    model = torch.nn.Linear(4, 4, bias=False)
    reducer = tw.parallel.Reducer(model.named_parameters(), "max", Alone())
    reducer.load_state_dict({"rank2of3/e/weight": torch.full((4, 4), 5.0), "rank2of3/step": torch.tensor(7)})
    assert reducer.exchange.state_dict()["e/weight"].unique().tolist() == [5.0]
    parts = {f"rank{r}of3/e/weight": torch.ones(4, 4) for r in range(2)}
    with pytest.raises(UsageError, match="all parts are needed, not 2"):
        reducer.load_state_dict(parts | {f"rank{r}of3/step": torch.tensor(7) for r in range(2)})
    reducer.close()


def site(
    state: dict | None = None, wire: str = "sparseloco"
) -> tuple[torch.nn.Linear, torch.optim.Optimizer, tw.parallel.LocalSteps]:
    """In a quorum of one, which sends nothing; four inner steps per round."""
    torch.manual_seed(0 if state is None else 1)
    model = torch.nn.Linear(4, 4, bias=False)
    inner = torch.optim.AdamW(model.parameters(), 0.1)
    return (
        model, inner, tw.parallel.LocalSteps(model.named_parameters(), inner, wire, Alone(), every=4, state=state)
    )  # fmt: skip


def train(model: torch.nn.Linear, inner: torch.optim.Optimizer, local: tw.parallel.LocalSteps, steps: int) -> None:
    for number in range(steps):
        model(torch.full((4,), 1.0 + number)).sum().backward()
        inner.step()
        inner.zero_grad()
        local.step()


def left(local: tw.parallel.LocalSteps) -> list[float]:
    """The values of its residual."""
    (unit,) = local.site.exchange.compressed
    residual = local.site.residual(unit)
    return [] if residual is None else residual.unique().tolist()


def test_a_site_that_is_resumed_goes_on_from_its_part_and_on_another_number_from_the_anchor():
    model, inner, local = site()
    train(model, inner, local, 8)
    (unit,) = local.site.exchange.compressed
    local.site.exchange.channels[unit].state.write("e", unit.name, torch.full((16,), 3.0))
    state = local.state_dict()
    with pytest.raises(UsageError, match="who has met the others has theirs"):
        local.load_state_dict(state)
    own = {name.replace("rank0of1/", "rank2of3/"): value for name, value in state.items()}
    again, moments, resumed = site(own)
    assert resumed.steps == 8 and torch.equal(again.weight, model.weight)
    assert torch.equal(moments.state[again.weight]["exp_avg"], inner.state[model.weight]["exp_avg"])
    assert left(resumed) == [3.0]
    train(model, inner, local, 4), train(again, moments, resumed, 4)
    assert torch.equal(again.weight, model.weight), "the same bits"
    other = {name.replace("rank2of3/", "rank0of3/"): v * 2 if "/e/" in name else v for name, v in own.items()}
    none = {name.replace("rank2of3/", "rank1of3/"): v * 0 if "/e/" in name else v for name, v in own.items()}
    another, moments, mean = site(own | other | none)
    assert left(mean) == [3.0] and not moments.state, "(3 + 6 + 0) / 3"
    assert torch.equal(another.weight, state["rank0of1/anchor/weight"])
    for one in (local, resumed, mean):
        one.close()


def test_the_first_round_of_a_site_that_is_resumed_moves_nothing():
    """Nobody has trained since the checkpoint, and the outer optimiser has a momentum."""
    model, inner, local = site(wire="diloco")
    train(model, inner, local, 8)
    again, _, resumed = site(local.state_dict(), "diloco")
    assert torch.equal(again.weight, model.weight)
    local.close(), resumed.close()


@pytest.mark.parametrize(("option", "said"), [({"delay": 1}, "delay = 1, warmup = 0"), ({"warmup": 3}, "warmup = 3")])
def test_local_steps_in_a_quorum_refuse_a_delay_and_a_warmup_in_a_line(option, said):
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=f"LocalSteps in a quorum: .*{said}.*both must be 0"):
        tw.parallel.LocalSteps(model.named_parameters(), inner, "sparseloco", Alone(), every=4, **option)


def test_a_newcomers_residual_is_a_copy_of_a_sites():
    sites = []
    for left in (3.0, None, 5.0):
        model, quorum = torch.nn.Linear(4, 4, bias=False), Alone()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        local = tw.parallel.LocalSteps(model.named_parameters(), inner, "sparseloco", quorum, every=2)
        (unit,) = local.site.exchange.compressed
        if left is not None:
            local.site.exchange.channels[unit].state.write("e", unit.name, torch.full((16,), left))
        sites.append((local, quorum.told["thinwire local steps"]))
    told = sites[0][1][1]()
    for (local, (load, _)), expected in zip(sites[1:], (3.0, 5.0)):
        load(told)
        (unit,) = local.site.exchange.compressed
        assert local.site.residual(unit).unique().tolist() == [expected], "one that comes back keeps its own"
    told["residual"][unit.name].zero_()
    (unit,) = sites[0][0].site.exchange.compressed
    assert sites[0][0].site.residual(unit).unique().tolist() == [3.0], "the copy is no view"
    for local, _ in sites:
        local.close()


def test_means_that_a_killed_life_kept_are_deleted(tmp_path):
    (tmp_path / "7.safetensors").write_bytes(b"of an earlier life")
    Late(SimpleNamespace(is_whole=True), None, tmp_path, print)
    assert list(tmp_path.iterdir()) == []
