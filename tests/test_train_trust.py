"""A run's folder: one launch at a time, files that are as they were written, and no code in them."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from thinwire.cli import main
from thinwire.distributed.checkpoint_files import METADATA, CheckpointReader, find_damage, write_checksums
from thinwire.errors import RunFailed, UsageError
from thinwire.kernels.cpu.compile import is_ours
from thinwire.lab.errors import DeadLink, LabError, RankFailed
from thinwire.train import local, rank
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.folder_lock import locked
from thinwire.train.metrics import EventReader, Metrics, read_events, say_unreadable


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved(folder, steps=(1, 2)) -> Checkpoints:
    kept = Checkpoints(folder, keep=9)
    for step in steps:
        kept.save(step, {"x": torch.full((64,), float(step)), "step": torch.tensor(step)})
    return kept


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_bit_is_found_and_the_checkpoint_before_is_taken(tmp_path, alone, seed):
    kept, said, pick = saved(tmp_path), [], random.Random(seed)
    newest = tmp_path / "step-00000002"
    file = pick.choice(sorted(p for p in newest.iterdir() if p.name.startswith(("__", "."))))
    content = bytearray(file.read_bytes())
    content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    file.write_bytes(content)
    assert kept.newest_sound(said.append) == tmp_path / "step-00000001"
    assert len(said) == 1 and "step-00000002" in said[0] and f"{file.name} has changed" in said[0]


@pytest.mark.parametrize("what", ["cut", "gone", "added", "list cut", "list gone"])
def test_a_file_that_is_cut_gone_or_new_is_found(tmp_path, alone, what):
    kept = saved(tmp_path)
    newest = tmp_path / "step-00000002"
    data, listed = next(newest.glob("__*")), next(newest.glob("checksums-*"))
    {
        "cut": lambda: data.write_bytes(data.read_bytes()[:-1]),
        "gone": data.unlink,
        "added": lambda: (newest / "more").write_text("?"),
        "list cut": lambda: listed.write_text(listed.read_text()[:-9]),
        "list gone": lambda: listed.rename(newest / "checksums-0of2.json"),
    }[what]()
    assert kept.newest_sound(lambda line: None) == tmp_path / "step-00000001"


def test_where_all_are_damaged_nothing_begins_anew_in_silence(tmp_path, alone):
    kept = saved(tmp_path)
    for file in tmp_path.glob("step-*/__*"):
        file.write_bytes(b"")
    with pytest.raises(UsageError, match=r"every checkpoint in .* is damaged"):
        kept.newest_sound(lambda line: None)


def test_a_checkpoint_that_cannot_be_compared_is_not_taken_in_silence(tmp_path, alone):
    kept, said = saved(tmp_path), []
    assert kept.newest_sound(said.append) == kept.newest() and not said
    for file in kept.newest().glob("*checksums*"):
        file.unlink()
    assert kept.newest_sound(said.append) == kept.newest() and "has no checksums" in said[0]


def test_several_look_at_a_part_of_the_files_each(tmp_path):
    files = [tmp_path / f"__{rank}_0.distcp" for rank in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]))
        write_checksums(tmp_path, [file], number, 3)
    files[1].write_bytes(b"?")
    assert [find_damage(tmp_path, part, 3) is not None for part in range(3)] == [False, True, False]


class Hostile:
    """Pickled, it is a call."""

    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [(os.system, "touch {ran}"), (eval, "open({ran!r}, 'w')"), (getattr, "x", "upper"), (subprocess.Popen, "x")],
)
def test_metadata_that_would_run_code_is_refused_in_one_line(tmp_path, alone, call):
    kept, ran = saved(tmp_path, steps=(1,)), tmp_path / "ran"
    folder = tmp_path / "step-00000001"
    arguments = [a.format(ran=str(ran)) if isinstance(a, str) else a for a in call[1:]]
    (folder / METADATA).write_bytes(pickle.dumps(Hostile(call[0], *arguments)))
    next(folder.glob("checksums-*")).unlink()  # whoever writes the one can write the other
    with pytest.raises(UsageError, match="may run code, and is not read") as refused:
        kept.read(folder, lambda name: True)
    assert "\n" not in str(refused.value) and not ran.exists()


def test_metadata_cannot_name_files_elsewhere(tmp_path, alone):
    saved(tmp_path, steps=(1,))
    folder = tmp_path / "step-00000001"
    metadata = CheckpointReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match="outside of the checkpoint"):
        CheckpointReader(folder).read_metadata()


HOLD = "import sys, time\nfrom thinwire.train.folder_lock import locked\n" + (
    "with locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)\n"
)


def test_a_second_launch_into_one_folder_gets_one_line(tmp_path, capsys):
    """And once the first is gone, be it killed, the next goes in."""
    config = tmp_path / "run.toml"
    config.write_text(f"[run]\nout = {str(tmp_path / 'out')!r}\n")
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        assert main(["train", str(config)]) == 2
        said = capsys.readouterr().err
        assert f"is in use by process {first.pid} on " in said and said.count("\n") == 1
    finally:
        first.kill()
        first.wait()
    with locked(tmp_path / "out"):
        pass


def ended(statuses: dict[int, int], output: dict[int, list[str]]) -> SimpleNamespace:
    """A job whose ranks have ended so."""
    first = next(rank for rank, status in statuses.items() if status)

    def results():
        raise RankFailed(first, f"host{first}", statuses[first], output[first])

    return SimpleNamespace(placements=[SimpleNamespace(rank=r) for r in statuses], output=output.get, results=results)


def test_a_rank_that_lost_another_ends_the_run_in_one_line():
    said = ["thinwire: lost rank 1: Connection closed by peer"]
    with pytest.raises(RunFailed, match=r"^lost rank 1: Connection closed by peer; go on with --resume$"):
        local._check_end(ended({0: 1, 1: -9}, {0: said, 1: []}), asked=False)
    with pytest.raises(RunFailed, match=r"^lost rank 1"):
        local._check_end(ended({1: -9, 0: 1}, {0: said, 1: ["Killed"]}), asked=False)
    with pytest.raises(RunFailed, match=r"^rank 1 on host1 was killed by signal 9; go on with --resume$"):
        local._check_end(ended({1: -9, 0: -15}, {0: ["a step"], 1: []}), asked=False)


@pytest.mark.parametrize("error", [DeadLink("host1"), LabError("the process that delays packets has ended")], ids=str)
def test_what_goes_wrong_in_the_lab_ends_the_run_in_one_line(tmp_path, monkeypatch, capsys, error):
    def goes_wrong(*_, **__):
        raise error

    placements = [SimpleNamespace(rank=rank, host=f"host{rank // 2}") for rank in range(4)]
    job = SimpleNamespace(placements=placements, seconds=0.0, results=goes_wrong)
    job.watch = (lambda _: True) if isinstance(error, DeadLink) else goes_wrong
    monkeypatch.setattr(local, "check", lambda: [SimpleNamespace(ok=True)])
    monkeypatch.setattr(local, "Network", lambda **_: nullcontext(SimpleNamespace(start=lambda *_, **__: job)))
    config = tmp_path / "run.toml"
    config.write_text(f"[run]\nout = {str(tmp_path / 'out')!r}\n[mesh]\npp = 2\ntp = 2\n")
    assert main(["train", str(config), "--local", "4"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith("; go on with --resume\n")
    assert "ranks 2, 3 on host1: a link to another host is dead" in said or str(error) in said


def test_a_rank_gives_a_status_where_it_failed(monkeypatch, capsys):
    def fail(*_, **__):
        raise RunFailed("lost rank 3: gone")

    monkeypatch.setattr(rank, "train_rank", fail)
    with pytest.raises(SystemExit) as end:
        local._train(None, False, None)
    assert end.value.code == 1 and capsys.readouterr().err == "thinwire: lost rank 3: gone\n"


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    """Behind a dead link the store blocks for as long as its own time-out: rank 0, which keeps it, is the one lost."""
    monkeypatch.setattr(rank, "SILENCE", 0.05)
    release = threading.Event()
    heartbeat = rank.Heartbeat.__new__(rank.Heartbeat)
    heartbeat.rank, heartbeat.size = 1, 3
    heartbeat.store = SimpleNamespace(add=lambda *_: release.wait(30))
    assert heartbeat.lost() == [0]
    release.set()


def test_code_is_loaded_from_folders_of_ones_own_only(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    assert is_ours(mine)
    (tmp_path / "link").symlink_to(mine)
    assert not is_ours(tmp_path / "link")
    mine.chmod(0o777)
    assert not is_ours(mine)
    mine.chmod(0o770)
    assert not is_ours(mine)
    if os.getuid() == 0:
        mine.chmod(0o700)
        os.chown(mine, 12345, 12345)
        assert not is_ours(mine)


def test_what_is_readable_of_the_metrics_is_kept_and_the_rest_named(tmp_path):
    """A garbled line, one that is no object, and one that is no text, in the midst of good ones."""
    good = [{"kind": "step", "step": step, "loss": 1.0} for step in (1, 2, 3, 4)]
    lines = [json.dumps(event).encode() for event in good]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([lines[0], b"{oops", lines[1], b"[1]", b"\xff\xfe", lines[2], lines[3], b'{"kin']))
    assert read_events(path) == good
    metrics = Metrics(tmp_path, resumed_at=3)
    metrics.close()
    assert metrics.unreadable == [2, 4, 5, 8] and read_events(path) == good[:3]
    assert say_unreadable(metrics.unreadable).startswith("lines 2, 4, 5, 8 cannot be read")


def test_a_growing_file_is_read_once(tmp_path):
    """What is new, a line at a time as it comes; all of it again once another file has taken its name."""
    path, event = tmp_path / "metrics.jsonl", {"kind": "step", "step": 1}
    reader = EventReader(path)
    assert reader.poll() == []
    path.write_text(json.dumps(event))
    assert reader.poll() == []  # the line has no end yet
    with path.open("a") as file:
        file.write("\n" + json.dumps({**event, "step": 2}) + "\n")
    assert [e["step"] for e in reader.poll()] == [1, 2]
    with mock.patch("json.loads", side_effect=AssertionError("read again")):
        assert len(reader.poll()) == 2
    other = tmp_path / "other"
    other.write_text(json.dumps({**event, "step": 7}) + "\n")
    os.replace(other, path)
    assert [e["step"] for e in reader.poll()] == [7]
