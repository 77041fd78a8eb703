"""`thinwire train` with sites: whatever is inside a site, resuming is bitwise, and what does not fit is refused."""

from __future__ import annotations

import importlib
import os
import random
import shutil
from pathlib import Path

import pytest
from train_ranks import MAX, Stopped, settings, several, several_and_stopped

from thinwire.errors import UsageError
from thinwire.lab import check
from thinwire.train.config.mesh import MeshConfig
from thinwire.train.local import topology
from thinwire.train.metrics import read_events

LAB = pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "network"
PRELOAD = ("train_warm",)
EXACT = {"preset": "diloco", "every": 3}
OURS = {"preset": "local-max", "every": 3}  # sent after steps 3, 6, …, applied one step later
FEW = {"samples": 24, "held_out": 0.1}


def events(out, kind) -> list[dict]:
    return [e for e in read_events(out / "metrics.jsonl") if e["kind"] == kind]


def same(ranks, number) -> dict[str, float]:
    """All ranks' parameters of a run together; sites and replicas must agree to the bit at its end."""
    whole: dict[str, float] = {}
    for runs in ranks:
        for name, value in runs[number].items():
            assert whole.setdefault(name, value) == value, f"{name} differs"
    return whole


def copied(out, step, to) -> None:
    folder = f"step-{step:08d}"
    shutil.copytree(out / "checkpoints" / folder, to / "checkpoints" / folder)


@LAB
@pytest.mark.lab
@pytest.mark.timeout(200)
def test_sites(four_hosts, tmp_path, monkeypatch):
    """In one launch: a pipeline inside a site trains as replicas do; resuming between sending and applying is bitwise,
    and so it is after kills; another number of sites goes on; a stop on one site stops all."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kills = importlib.import_module("site_kills")
    piped, twins = {"sites": 2, "pp": 2}, {"sites": 2, "dp": 2}
    short = {"steps": 7}
    ours = {"mesh": piped, "local": OURS, "data": FEW, "optim": short}
    whole = [
        (settings(tmp_path / "piped", mesh=piped, local=EXACT, optim=short), False),
        (settings(tmp_path / "twins", mesh=twins, local=EXACT, optim=short), False),
        (settings(tmp_path / "max", MAX, **ours), False),
    ]
    first = four_hosts.run(several, whole, timeout=90, echo=False)
    copied(tmp_path / "max", 3, tmp_path / "again")
    copied(tmp_path / "twins", 6, tmp_path / "four")
    resumed = [
        (settings(tmp_path / "again", MAX, **ours), True),
        (settings(tmp_path / "four", mesh={"sites": 4}, local=EXACT, optim=short), True),
    ]
    stopped = settings(tmp_path / "stopped", mesh=piped, local=OURS, data=FEW, optim=short)
    second = four_hosts.run(several_and_stopped, resumed, stopped, timeout=90, echo=False)
    rough = settings(tmp_path / "rough", MAX, **ours)
    assert len(kills.disturb(four_hosts, rough, 2, random.Random(int(os.environ.get("THINWIRE_SEED", 0))))) == 2
    assert kills.outcome(tmp_path / "rough") == kills.outcome(tmp_path / "max")
    _check_same_training(tmp_path, first)
    assert same([runs for runs, _ in second], 0) == same(first, 2)
    before, after = (events(tmp_path / name, "step") for name in ("max", "again"))
    assert [e["loss"] for e in after] == [e["loss"] for e in before[3:]] != []
    for key in (*(f"{kind}_bytes" for kind in ("forward", "embedding", "raw", "site", "site_raw")), "skips"):
        assert after[-1][key] == before[-1][key], key  # before the end others' are as last heard
    assert [e["step"] for e in events(tmp_path / "four", "step")] == [7]
    assert any("the checkpoint is of 2 sites" in e["text"] for e in events(tmp_path / "four", "note"))
    assert {one for _, one in second} == {Stopped(step=4, agreed=True)}  # asked in step 2, told with the round after 3


def _check_same_training(folder, ranks) -> None:
    """Two sites that are pipelines, and two of two replicas: one loss curve, equal weights on all ranks at the end."""
    same(ranks, 0)
    same(ranks, 1)
    for kind, key in (("step", "loss"), ("eval", "held_out"), ("sites", "losses")):
        a, b = ([(e["step"], e[key]) for e in events(folder / name, kind)] for name in ("piped", "twins"))
        assert [s for s, _ in a] == [s for s, _ in b] != []
        assert [v for _, v in a] == [pytest.approx(v, abs=1e-4) for _, v in b], key
    assert [e["step"] for e in events(folder / "piped", "sites")] == [3, 6, 7]
    between = [e["site_bytes"] for e in events(folder / "piped", "step")]
    assert between[1] == 0 < between[2] == between[3] < between[-1]


def test_links_of_the_lab_are_between_sites():
    """--rate and --latency: of every host's link with one site, of the sites' uplinks with several."""
    one, two = (topology(MeshConfig(pp=2, **sites), "3mbit", "7ms", "0%") for sites in ({"dp": 2}, {"sites": 2}))
    assert {(host.site, host.link.up, host.link.latency) for host in one.hosts} == {("lab", 3e6, 7e-3)}
    assert [host.site for host in two.hosts] == ["site0", "site0", "site1", "site1"]
    assert {host.link.up for host in two.hosts} == {None}
    assert {(link.up, link.latency) for link in two.sites.values()} == {(3e6, 7e-3)}


def test_what_does_not_fit_is_refused(tmp_path):
    both = {"sites": 2, "pp": 2}
    for changed, words in (
        ({"mesh": both}, r"sites = 2: needs \[local\]"),
        ({"local": EXACT}, r"\[local\]: is for several sites"),
        ({"mesh": {**both, "tp": 2}, "local": EXACT}, "tensor parallelism"),
        ({"mesh": both, "local": EXACT, "optim": {"name": "frozen_adam"}}, "take adamw"),
        ({"mesh": both, "local": EXACT, "optim": {"batch": 6}}, "multiple of sites × dp × microbatches"),
    ):
        with pytest.raises(UsageError, match=words):
            settings(tmp_path, **changed)
