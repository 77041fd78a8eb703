"""Members that come and go, on loopback: processes that are killed, and newcomers. docs/elastic.md has the table.

Every wait has a limit, and none of them is asserted on. THINWIRE_TEST_SLOW multiplies the limits, on a machine that is
so busy that members do not answer each other within seconds.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_member import live

import thinwire as tw
from thinwire.errors import RunFailed, UsageError

SLOW = float(os.environ.get("THINWIRE_TEST_SLOW", "1"))
LIMIT = 250 * SLOW  # seconds until a run is given up
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed (pip install 'thinwire[elastic]')"
)


FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["elastic_warm"])


def start(address: str, name: str, wire: str, steps: int, events: dict[int, str], folder: Path) -> BaseProcess:
    """A member, forked from a process that has imported what it needs."""
    process = FORKING.Process(target=live, args=(address, name, wire, steps, events, str(folder / name)))
    process.start()
    return process


def log_of(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text()[-300:] if path.exists() else "not begun"


def thaw(member: BaseProcess) -> None:
    assert member.pid is not None
    if member.is_alive():
        os.kill(member.pid, signal.SIGCONT)


def notes(folder: Path, name: str) -> list[dict]:
    path = folder / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be on its way


def run(
    folder: Path, wire: str, steps: int, events: dict[str, dict[int, str]], joins: dict[str, str],
    thaws: dict[str, tuple[str, int]] | None = None,
) -> dict:  # fmt: skip
    """name → its notes. joins: a newcomer → the member after whose death it comes. thaws: a frozen member → the member
    and the step after which it goes on."""
    for newcomer in joins:
        (folder / f"{newcomer}.hold").touch()
    from thinwire.elastic import Lighthouse

    with Lighthouse(min_members=2, lost_seconds=2 * SLOW, join_seconds=20 * SLOW) as lighthouse:
        members = {
            name: start(lighthouse.address, name, wire, steps, happens, folder) for name, happens in events.items()
        }
        try:
            deadline = time.monotonic() + LIMIT
            while any(member.is_alive() for member in members.values()) or joins:
                assert time.monotonic() < deadline, {n: log_of(folder, n) for n in members}
                for newcomer, lost in list(joins.items()):
                    if not members[lost].is_alive():
                        del joins[newcomer]
                        (folder / f"{newcomer}.hold").unlink()
                for frozen, (other, step) in (thaws or {}).items():
                    if any(line.get("step") == step for line in notes(folder, other)):
                        thaw(members[frozen])
                time.sleep(0.05)
        finally:
            for member in members.values():
                member.kill()
                member.join()
    return {name: notes(folder, name) for name in events}


def check_survivors(found: dict, steps: int) -> None:
    """Weights, moments and the collectives' state have the same bits on all members after every step, and every step
    counted once."""
    by_step: dict[int, list[dict]] = {}
    for name, lines in found.items():
        counted = [line for line in lines if line.get("counts")]
        for line in counted:
            by_step.setdefault(line["step"], []).append(line)
        assert [line["step"] for line in counted] == sorted({line["step"] for line in counted}), name
    assert sorted(by_step) == list(range(steps))
    for step, lines in by_step.items():
        for field in ("weights", "moments", "quorum", "size", "mean", "averaged_in", "averaged_steps"):
            assert len({line[field] for line in lines}) == 1, (step, field)


def test_a_death_a_nan_and_a_newcomer(tmp_path):
    """a, b and c train. c gives NaN in step 2, and is killed in step 4; d comes."""
    events = {"a": {}, "b": {}, "c": {2: "nan", 4: "die"}, "d": {}}
    found = run(tmp_path, "feedback", 14, events, {"d": "c"})
    check_survivors(found, 14)
    for name in ("a", "b"):
        lines = found[name]
        assert lines.pop()["done"]
        failed = [line for line in lines if not line["counts"]]
        assert {2, 4} <= {line["step"] for line in failed}, "the step with NaN and the one of the death do not count"
        assert lines[-1]["skips"] == len(failed)  # more of them on a machine that is busy for seconds
        assert all(line["averaged_in"] == line["quorum"] for line in lines if line["counts"])
        for line, following in itertools.pairwise(lines):
            grown = following["averaged_steps"] > line["averaged_steps"]
            assert grown == following["counts"], "the state of all_reduce is replaced by the vote"
            kept = line["after" if line["counts"] else "before"]["residual"]
            assert following["before"]["residual"] == kept, "a step that does not count leaves the residual as it was"
        assert lines[-1]["size"] == 3
    first = found["d"][0]
    assert first["before"]["residual"] is None and first["size"] == 3
    donor = next(line for line in found["a"] if line["counts"] and line["step"] == first["step"] and "weights" in line)
    assert first["quorum"] == donor["quorum"] and first["moments"] == donor["moments"]


def test_a_death_between_two_messages_and_mean_shifts(tmp_path):
    """c tells a that the exchange is whole, and dies before it tells b: the step counts for a. b takes a's state, and
    keeps what it has staged: its message was applied. Mean shifts are those of the members that are there. Later a is
    frozen, and comes back when the others have gone on."""
    events = {"a": {8: "freeze"}, "b": {}, "c": {4: "die between"}, "d": {}}
    found = run(tmp_path, "shift", 20, events, {"d": "c"}, {"a": ("b", 9)})
    check_survivors(found, 20)
    place, cut_off = next(
        (i, line) for i, line in enumerate(found["a"]) if line.get("step") == 8 and not line["counts"]
    )
    back = next(line for line in found["a"][place:] if line.get("step", 0) > 8)
    assert back["step"] > 9
    assert back["before"]["residual"] == cut_off["before"]["residual"], "its own residual stays"
    place, failed = next((i, line) for i, line in enumerate(found["b"]) if line.get("step") == 4 and not line["counts"])
    healed = found["b"][place + 1]
    assert healed["step"] == 5
    assert healed["before"]["residual"] == failed["after"]["residual"] != failed["before"]["residual"]
    first = found["d"][0]
    assert first["before"]["shift"] is None and first["before"]["residual"] is None
    lines = [next(x for x in found[n] if x.get("step") == 19 and x["counts"]) for n in "abd"]
    mean = [sum(values) / len(values) for values in zip(*(line["after"]["shift"] for line in lines))]
    assert lines[0]["size"] == 3 and any(mean)
    for line in lines:
        assert line["after"]["mean_shift"] == pytest.approx(mean, abs=1e-6)


def test_local_steps_of_sites_that_come_and_go(tmp_path):
    """The same with rounds of local steps: c has NaN in round 4, and is killed in the midst of round 6; d comes. b is
    slow: its mean weighs what it has trained on, and it makes fewer inner steps per round."""
    found = run(tmp_path, "local", 20, {"a": {}, "b": {}, "c": {4: "nan", 6: "die agreeing"}, "d": {}}, {"d": "c"})
    by_inner: dict[int, set[str]] = {}
    for name, (joined, *lines) in found.items():
        assert name == "c" or lines.pop()["done"]
        for line in lines:
            by_inner.setdefault(line["inner"], set()).add(line["weights"])
            assert line["finite"], "a site with NaN returns to the anchor in that round"
            assert line["skips"] == 0, "the others' round counts"
        if name == "d":
            assert joined["joined"]["rounds"] > 6 and joined["joined"]["inner"] > 0, "moments come with the anchors"
            assert joined["joined"]["residual"], "and what a site has not sent"
    assert all(len(weights) == 1 for weights in by_inner.values()), "anchors have the same bits on all sites"
    assert [max(line["returns"] for line in found[name] if "returns" in line) for name in "abcd"] == [0, 0, 1, 0]
    assert [line["size"] for line in found["a"] if "size" in line][-1] == 3
    made = {name: sum("inner" in line for line in found[name]) for name in "ab"}
    assert made["b"] < 0.7 * made["a"], f"the slow site makes fewer inner steps per round, not {made}"


def test_members_that_are_fsdp_sites(tmp_path):
    """Two sites of two ranks. One rank of b has NaN in step 2; both are killed in step 4, and c comes, with other
    weights: its ranks take the shards of a's. Shard by shard, weights and moments have the same bits on all sites."""
    dies = {4: "die"}
    events = {"a0": {}, "a1": {}, "b0": dict(dies), "b1": dies | {2: "nan"}, "c0": {}, "c1": {}}
    found = run(tmp_path, "site", 10, events, {"c0": "b0", "c1": "b1"})
    for rank in "01":
        mine = {name: lines for name, lines in found.items() if name.endswith(rank)}
        check_survivors(mine, 10)
        assert all(mine[f"{site}{rank}"].pop()["done"] for site in "ac")
        assert {line["size"] for line in mine[f"a{rank}"]} == {2}
        assert mine[f"c{rank}"][0]["step"] == 4, "the newcomer goes on where the others are"
        assert [line["counts"] for line in mine[f"a{rank}"] if line["step"] == 2] == [False, True], "on no rank"
    assert found["a0"][-1]["weights"] != found["a1"][-1]["weights"], "they are two shards"


def quorum(address: str = "http://127.0.0.1:9", **options) -> tw.elastic.Quorum:
    from torch import nn

    return tw.elastic.Quorum({"model": nn.Linear(2, 2)}, address, timeout=1.0, patience=2.0, **options)


def test_a_lighthouse_that_is_not_there_is_one_line():
    with pytest.raises(RunFailed, match="the lighthouse cannot be reached"):
        quorum().begin()


def test_addresses_that_cannot_be_are_one_line_and_leave_no_thread():
    before = threading.active_count()
    with pytest.raises(UsageError, match=r"host 127.0.0.1: members on other machines .* the lighthouse is at 10.0.0.1"):
        quorum("http://10.0.0.1:29510")
    with pytest.raises(UsageError, match=r"lighthouse '10.0.0.1:29510': must be an address such as http://"):
        quorum("10.0.0.1:29510", host="10.0.0.2")
    with pytest.raises(UsageError, match=r"host 192.0.2.7: is no address of this machine"):
        quorum(host="192.0.2.7")
    assert threading.active_count() == before
    with tw.elastic.Lighthouse() as first, pytest.raises(UsageError, match="no lighthouse can listen") as said:
        tw.elastic.Lighthouse("127.0.0.1", int(first.address.rpartition(":")[2]))
    assert str(said.value).endswith(f"join the one that is there (--lighthouse {first.address})")


def test_a_newcomer_whose_state_has_other_parts_is_refused():
    one, other = quorum(), quorum()
    try:
        other.register("schedule", print, dict)
        load, save = one.told["thinwire members"]
        load(save())
        with pytest.raises(UsageError, match=r"differs from the quorum in state: model, .* against model, schedule, "):
            load(other.told["thinwire members"][1]())
    finally:
        one.close(), other.close()


def test_members_that_meet_over_ipv6(monkeypatch):
    """Two on one machine, by the addresses that they tell each other; one gives its own in brackets, as in a URL. Gloo
    takes them too, and asks for no interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of-another-network")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    counted: dict[str, list[bool]] = {}
    with tw.elastic.Lighthouse("::1", min_members=2, join_seconds=20 * SLOW) as lighthouse:
        members = [
            threading.Thread(target=make_steps, args=(lighthouse.address, host, counted), daemon=True)
            for host in ("::1", "[::1]")
        ]
        for member in members:
            member.start()
        for member in members:
            member.join(LIMIT)
    assert [sum(counts) for counts in counted.values()] == [3, 3]


class Site:
    """Trains by itself, on a thread, in rounds with another. saved: what `save` gave on a site before."""

    def __init__(self, address: str, seed: int, saved: dict | None = None) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(8, 8)
        self.inner = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.quorum = tw.elastic.Quorum({}, address, min_members=2, timeout=5 * SLOW)
        if saved:
            self.quorum.go_on_from(saved["rounds"], saved["batches"])
        self.local = tw.parallel.LocalSteps(
            self.model.named_parameters(), self.inner, "sparseloco", self.quorum, every=2,
            state=saved and saved["local"],
        )  # fmt: skip
        self.begun = self.quorum.steps, len(self.inner.state), self.anchor()

    def anchor(self) -> list[float]:
        return self.local.fragments[0].anchors["weight"].flatten().tolist()

    def train(self, rounds: int) -> dict:
        while self.quorum.steps < rounds:
            self.model(torch.randn(4, 8)).pow(2).sum().backward()
            self.inner.step()
            self.inner.zero_grad()
            self.local.step()
        saved = {"rounds": self.quorum.steps, "batches": self.quorum.batches, "local": self.local.state_dict()}
        self.local.close(), self.quorum.close()
        return saved


def test_a_site_is_resumed_and_one_without_a_checkpoint_takes_its_state():
    """All sites of a run were lost, and two checkpoints of its three are there: of four rounds, and of none."""
    from thinwire.elastic import Lighthouse

    def together(*works: Callable[[str], Any]) -> list[Any]:
        with Lighthouse(min_members=2, join_seconds=20 * SLOW) as lighthouse, ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(work, lighthouse.address) for work in works]
            return [future.result(LIMIT) for future in futures]

    def first(address: str, seed: int) -> dict:
        return Site(address, seed).train(4)

    def again(saved: dict | None, address: str) -> tuple[Site, dict]:
        site = Site(address, 7, saved)
        return site, site.train(6)

    one, other = together(partial(first, seed=1), partial(first, seed=2))
    assert one["rounds"] == other["rounds"] == 4
    (back, _), (new, _) = together(partial(again, one), partial(again, None))
    rank = next(iter(one["local"])).partition("/")[0]
    kept = one["local"][f"{rank}/anchor/weight"].flatten().tolist()
    assert back.begun == (5, 2, kept), "it goes on from round 4, with its moments; the meeting is round 5"
    assert new.begun == (5, 2, kept), "and the other one has taken all of it"
    assert back.anchor() == new.anchor() != kept
    assert back.quorum.steps == 6


def make_steps(address: str, host: str, counted: dict[str, list[bool]]) -> None:
    """Three that count, with another member."""
    quorum = tw.elastic.Quorum({}, address, host=host, min_members=2, timeout=5 * SLOW)
    while quorum.steps < 3:
        quorum.begin()
        x = torch.ones(4)
        try:
            quorum.all_reduce(x)
        except RuntimeError as error:
            quorum.report(error)
        counted.setdefault(host, []).append(quorum.commit() and x.tolist() == [2.0] * 4)
    quorum.close()
