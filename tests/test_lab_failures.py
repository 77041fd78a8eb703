"""What goes wrong ends soon, says why, and leaves nothing: dead ranks, dead links, a killed launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import lab_programs
import pytest
from lab_support import footprint, gone_within, processes_with, require_network

from thinwire.errors import RunFailed
from thinwire.lab import DeadLink, LabError, LabTimeout, Network, RankFailed
from thinwire.lab.remedy import explain
from thinwire.train import local

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]
require_network()

DAEMON = """
import subprocess, sys, time
words = [sys.executable, "-c", "import time; time.sleep(300) # TOKEN"]
child = subprocess.Popen(words, start_new_session=True)
child.wait(WAIT)
"""
LAUNCHER = """
import sys
from thinwire.lab import Network
with Network(hosts=3, rate="10mbit", latency="5ms", preload=()) as net:
    print("up", flush=True)
    net.run([sys.executable, "-c", sys.argv[1]])
"""


def with_path(*more: str) -> dict[str, str]:
    """This environment, with our module path in it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, *more])}


def test_a_failing_rank_stops_the_others_and_its_last_words_are_kept() -> None:
    with Network(hosts=3, preload=()) as network:
        began = time.monotonic()
        with pytest.raises(RankFailed, match="no such luck") as failed:
            network.run(lab_programs.fail_on, 1, timeout=60)
        assert time.monotonic() - began < 8
        assert failed.value.rank == 1 and failed.value.host == "host1" and failed.value.status == 1
        assert "about to fail" in failed.value.output
        assert list(network.run(lab_programs.sleep, 0.0)) == [None] * 3  # and the network is still good


def test_ranks_that_ignore_the_request_to_stop_are_killed() -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"import os, signal, time; {stubborn}; os.environ['RANK'] == '0' and exit(3); time.sleep(300)"
    with Network(hosts=2, preload=()) as network:
        began = time.monotonic()
        with pytest.raises(RankFailed) as failed:
            network.run([sys.executable, "-c", code], timeout=60)
        assert failed.value.status == 3 and time.monotonic() - began < 10


def test_a_killed_rank_is_reported_as_killed() -> None:
    with Network(hosts=2, preload=()) as network:
        job = network.start(lab_programs.sleep, 300.0)
        job.kill(1)
        with pytest.raises(RankFailed, match="rank 1 on host1 was killed by signal 9"):
            job.wait(20)
        assert job.statuses[1] == -signal.SIGKILL


def test_time_runs_out() -> None:
    with Network(hosts=2, preload=()) as network:
        with pytest.raises(LabTimeout, match="still running"):
            network.run(lab_programs.sleep, 300.0, timeout=0.5)
        assert network.run(lab_programs.sleep, 0.0)[0] is None


def test_a_dead_link_is_an_error_in_the_ranks_and_not_a_hang() -> None:
    with Network(hosts=2, rate="100mbit", patience="1s", preload=("torch.distributed",)) as network:
        job = network.start(lab_programs.all_reduce_for_ever, 100_000)
        until = time.monotonic() + 30
        while job.traffic()["host0"].sent < 2_000_000:
            assert not job.watch(0.2) and time.monotonic() < until
        network.link_down("host1")
        began = time.monotonic()
        with pytest.raises((RankFailed, DeadLink), match=r"timed out|closed by peer|reset|link is dead"):
            job.wait(40)
        assert time.monotonic() - began < 25


def test_a_dead_link_ends_a_run_whose_ranks_only_wait() -> None:
    with Network(hosts=2, patience="1s", preload=()) as network:
        job = network.start(lab_programs.drip, "stubborn")
        while job.traffic()["host0"].sent < 2_000_000:
            assert not job.watch(0.2)
        network.link_down("host1")
        with pytest.raises(DeadLink, match="TCP on host0 had no answer"):
            job.wait(40)
        with pytest.raises(RunFailed, match=r"^rank 0 on host0: a link to another host is dead: TCP [^\n]+$"):
            local._check_end(job, asked=False)  # thinwire train --local


def test_a_network_is_closed_once_left() -> None:
    with Network(hosts=1, preload=()) as network:
        pass
    with pytest.raises(LabError, match="not open"):
        network.run(["true"])


def test_refusals_name_a_remedy() -> None:
    for request, number in (("a user namespace", 1), ("build", 95), ("build", 2)):
        text = explain(request, number, "unshare: Operation not permitted")
        assert "cannot make" in text and "; " in text and "\n" not in text


def test_a_machine_that_forbids_namespaces_gets_one_line_with_the_remedy() -> None:
    """Forbidden here as an administrator would, but inside a user namespace of the test's own."""
    code = """
from pathlib import Path
from thinwire import cli
from thinwire.lab.namespaces import become_own_root
become_own_root()
Path("/proc/sys/user/max_user_namespaces").write_text("0")
raise SystemExit(cli.main(["lab", "run", "--", "true"]))
"""
    words = [sys.executable, "-c", code]
    run = subprocess.run(words, capture_output=True, text=True, timeout=30, env=with_path())
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert "cannot make a user namespace" in run.stderr
    assert "as root: sysctl -w user.max_user_namespaces=10000" in run.stderr


@pytest.mark.parametrize("delay", [0.02, 0.08, 0.14, 0.2, 0.3, 0.5, None])
def test_nothing_survives_kill_9_of_the_launcher(tmp_path: Path, delay: float | None) -> None:
    """At any moment of its life; None waits until the ranks and what they started are running."""
    token = f"lab-{uuid.uuid4().hex}"
    before = footprint()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, DAEMON.replace("TOKEN", token).replace("WAIT", "300")],
        env=with_path(f"/nowhere/{token}") | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert launcher.stdout is not None
        if delay is None:
            assert launcher.stdout.readline() == b"up\n"
            until = time.monotonic() + 20
            while len(processes_with(token)) < 10:  # launcher, guard, supervisor, delay, three ranks, their daemons
                assert time.monotonic() < until
                time.sleep(0.02)
        else:
            time.sleep(delay)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(10)
        assert launcher.stdout is not None
        launcher.stdout.close()
    assert gone_within(10.0, token)
    assert footprint() == before
    assert list(tmp_path.iterdir()) == []


def test_nothing_survives_a_network_that_was_left() -> None:
    """A daemon that a rank left behind, in a session of its own, ends with the network."""
    token = f"lab-{uuid.uuid4().hex}"
    with Network(hosts=2, preload=()) as network:
        code = DAEMON.replace("TOKEN", token).replace("child.wait(WAIT)", "time.sleep(0.3)")
        network.run([sys.executable, "-c", code])
        assert len(processes_with(token)) == 2
    assert gone_within(3.0, token)
