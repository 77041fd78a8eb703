"""Leaving Python while threads of Gloo still run: what would abort the process is waited for."""

from __future__ import annotations

import ctypes
import threading
import time

from thinwire.torch_private import leaving

PR_SET_NAME = 15


def test_a_thread_of_gloo_that_runs_is_waited_for():
    """A thread of that name computes for a while."""
    libc = ctypes.CDLL(None)
    ended = []

    def compute():
        libc.prctl(PR_SET_NAME, leaving.THREADS.encode())
        stop = time.monotonic() + 0.3
        while time.monotonic() < stop:
            sum(range(100_000))
        libc.prctl(PR_SET_NAME, b"done")
        ended.append(True)

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.05)
    leaving.wait_for_gloo()
    assert ended
    thread.join()


def test_the_name_is_torchs(tmp_path):
    """Else nothing would be waited for."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    group = dist.ProcessGroupGloo(store, 0, 1)
    names: set[str] = set()
    until = time.monotonic() + 20  # its threads name themselves, on a busy machine not at once
    while leaving.THREADS not in names and time.monotonic() < until:
        names = {task.read_text().strip() for task in leaving.TASKS.glob("*/comm")}
    del group
    assert leaving.THREADS in names, names


def test_a_thread_that_never_rests_is_not_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(leaving, "LONGEST", 0.05)
    monkeypatch.setattr(leaving, "_is_running", lambda: True)
    leaving.wait_for_gloo()  # returns


def test_where_nothing_can_be_read_it_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(leaving, "TASKS", tmp_path / "nowhere")
    leaving.wait_for_gloo()  # returns
