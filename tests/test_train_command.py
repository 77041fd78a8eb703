"""`thinwire train` and `thinwire demo` as a user meets them: help, a first configuration, and mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire import installed
from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.train import checkpoint, local
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.config.sections import load
from thinwire.train.metrics import METRICS, Metrics, read_events
from thinwire.train.rank import join, nccl_flows
from thinwire.train.show import closing, describe
from thinwire.train.stop import StopRequest

SMALL = """
[model]
hidden = 32
layers = 2
heads = 2
[data]
seq_len = 16
corpus_bytes = 2000
[mesh]
{mesh}
[optim]
batch = 8
steps = 2
[run]
out = "{out}"
{wire}
"""


def write(tmp_path, mesh="", wire=""):
    path = tmp_path / "run.toml"
    path.write_text(SMALL.format(mesh=mesh, out=tmp_path / "out", wire=wire))
    return str(path)


def test_init_writes_what_train_reads(tmp_path, capsys):
    path = tmp_path / "run.toml"
    assert main(["train", "--init", str(path)]) == 0
    assert load(path).mesh.ranks == 4 and "--local 4" in capsys.readouterr().out
    assert main(["train", "--init", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(("mesh", "wire", "words", "said"), [
    ("dp = 2", "", [], "dp = 2, pp = 1, tp = 1: takes 2 ranks, but 1 was started"),
    ("pp = 2", "", ["--local", "3"], "takes 2 ranks, but 3 were started"),
    ("pp = 2\nmicrobatches = 1", "", [], "microbatches = 1"),
    ("depth = 2", "", [], "depth"),
    ("", "[wire]\npreset = 'maximum'", [], "maximum"),
    ("", "[wire]\nauto = 'yes'", [], "auto = 'yes'"),
    ("", "[wire.gradient]\ncollective = 'low_rank'\nrank = 2\nstages = [1]", [], "the last of 1 stages is 0"),
    ("", "", ["--rate", "1mbit"], "--rate is for ranks on hosts of the lab: give --local 1"),
    ("", "", ["--latency", "1ms"], "--latency is for"),
    ("", "", ["--wire", "thin"], "thin"),
    pytest.param("", 'device = "cuda"', [], "no CUDA device",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, capsys, mesh, wire, words, said):
    assert main(["train", write(tmp_path, mesh, wire), *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], lines


def test_what_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(installed, "MODELS", ("torch", "no_such_package"))
    for words in (["train", write(tmp_path)], ["demo", "--out", str(tmp_path / "demo")]):
        assert main(words) == 2
        assert "training needs no_such_package: pip install 'thinwire[train]'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_missing_file_and_no_file(tmp_path, capsys):
    assert main(["train", str(tmp_path / "nothing.toml")]) == 2
    assert main(["train"]) == 2
    assert main(["demo", "--steps", "3"]) == 2
    said = capsys.readouterr().err
    assert "nothing.toml" in said and "--init" in said and "--steps 3" in said


def test_one_process_from_start_to_saved_model(tmp_path):
    """As a user runs it; a second start without --resume is refused, --resume finds nothing left to do."""
    words = [sys.executable, "-m", "thinwire", "train", write(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "(2/2)" in done.stderr and "done: " in done.stderr.splitlines()[-2]
    events = read_events(tmp_path / "out" / "metrics.jsonl")
    kinds = [event["kind"] for event in events]
    assert kinds.count("step") == 2 and kinds[-1] == "end"
    (memory,) = events[-1]["memory"]
    assert 50e6 < memory < 5e9  # Python and torch take more than the one, this model less than the other
    assert (tmp_path / "out" / "model" / "config.json").exists()
    again = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "--resume" in again.stderr and "Traceback" not in again.stderr
    resumed = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    wider = tmp_path / "wider.toml"
    wider.write_text((tmp_path / "run.toml").read_text().replace("hidden = 32", "hidden = 64"))
    other = subprocess.run([*words[:-1], str(wider), "--resume"], capture_output=True, text=True, timeout=120)
    assert other.returncode == 2 and "Traceback" not in other.stderr, other.stderr[-2000:]
    assert "is a checkpoint of another model" in other.stderr and "is (264, 32), here it is (264, 64)" in other.stderr


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    path = write(tmp_path)
    assert main(["train", path, "--out", "/proc/nowhere"]) == 2
    assert "[run] out = '/proc/nowhere': cannot write there" in capsys.readouterr().err


def test_a_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UsageError, match=f"rank 0 cannot meet the others at 127.0.0.1:{port}: .*in use"):
            join("gloo", timedelta(seconds=5))


@pytest.mark.lab
@pytest.mark.parametrize(("words", "status"), [([], 0), (["--local", "1"], 130)])
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(tmp_path, words, status):
    """SIGINT to the command, with the rank in it or on a host of the lab; nothing of the steps done is lost."""
    run = Path(write(tmp_path))
    run.write_text(run.read_text().replace("steps = 2", "steps = 100000"))
    metrics = tmp_path / "out" / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire", "train", str(run), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as train:  # fmt: skip
        until = time.monotonic() + 90
        while sum(e["kind"] == "step" for e in read_events(metrics)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        train.send_signal(signal.SIGINT)
        said, _ = train.communicate(timeout=60)
    last = [e["step"] for e in read_events(metrics) if e["kind"] == "step"][-1]
    assert train.returncode == status, said
    assert "Ctrl-C again" in said and f"stopped at step {last}, with a checkpoint: go on with --resume" in said
    assert (tmp_path / "out" / "checkpoints" / f"step-{last:08d}").is_dir()


def test_a_second_ctrl_c_is_obeyed_at_once(capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest(loud=True) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before and "Ctrl-C again" in capfd.readouterr().err


@pytest.mark.lab
def test_a_mistake_that_a_local_rank_finds_is_one_line(tmp_path, capsys):
    run = Path(write(tmp_path, "pp = 2"))
    run.write_text(run.read_text().replace("corpus_bytes", "samples = 3\ncorpus_bytes"))
    assert main(["train", str(run), "--local", "2"]) == 2
    assert "thinwire: [optim] batch = 8: there are only" in capsys.readouterr().err.splitlines()[-1]


def step(number, **values):
    counts = dict.fromkeys(("forward_bytes", "backward_bytes", "embedding_bytes"), 0)
    timed = {"tokens": 100, "step_seconds": 0.5, "seconds": 65.0, "loss": 2.5, "hit_rate": 0.25}
    return {"kind": "step", "step": number, **counts, "gradient_bytes": 2e6, "raw_bytes": 8e6} | timed | values


KEYS = ("kind", "step")
RUN = {"kind": "run", "step": 0, "steps": 16}


def test_what_a_run_says_of_itself():
    alone = step(1, gradient_bytes=0, raw_bytes=0, hit_rate=None)
    assert describe(step(7)) == (
        "loss 2.5000, 2.00 MB sent, 4.0× less than fp32, 200 tokens/s, 25 % of samples remembered"
    )
    assert describe(alone) == "loss 2.5000, 200 tokens/s"
    events = [{"kind": "eval", "held_out": 3.0}, step(6), step(7), {"kind": "eval", "held_out": 2.25}]
    assert closing("out/x", events).splitlines() == [
        "done: out/x: 7 steps in 1 min 05 s, held-out loss 2.2500, 2.00 MB sent, 4.0× less than fp32",
        "the model is in out/x/model; thinwire report out/x draws the run",
    ]
    assert "sent" not in closing("out/x", [alone])


@pytest.mark.parametrize(("resume", "kept"), [(False, None), (True, None), (True, 8), (True, 12)])
def test_progress_counts_from_where_it_resumed(resume, kept, tmp_path, monkeypatch, capsys):
    """A run of 16 steps was stopped after 12 that it recorded, its last checkpoint being at `kept` (None: there is
    none). The ranks drop what comes after the checkpoint, and do those steps again."""
    first = kept or 0
    monkeypatch.setattr("thinwire.terminal.QUIET_SECONDS", 0.0)
    monkeypatch.setattr(local, "_check_end", lambda job, asked: None)
    (tmp_path / METRICS).write_text(
        "".join(json.dumps(e) + "\n" for e in [RUN, *(step(n, seconds=n) for n in range(1, 13))])
    )
    left = iter(range(first + 1, 17))

    def watch(seconds):
        """A moment of the job: the first brings the file in order, every other one adds a step."""
        if not job.written:
            job.written = Metrics(tmp_path, kept)
            if kept is None:
                job.written.write("run", 0, steps=16)
            return False
        number = next(left, None)
        if number is not None:
            job.written.write("step", number, **{k: v for k, v in step(number, seconds=99).items() if k not in KEYS})
        return number is None

    job = SimpleNamespace(watch=watch, written=None, seconds=0.0)
    network = SimpleNamespace(start=lambda *arguments, **options: job)
    config = SimpleNamespace(run=SimpleNamespace(out=str(tmp_path)), mesh=SimpleNamespace(tp=1))
    local._watched(network, config, resume, None, "train", None, None)
    job.written.close()
    counted = [int(line.split("/16")[0].rpartition("(")[2]) for line in capsys.readouterr().err.splitlines()]
    assert counted == list(range(first + 1, 17))


def test_options_reach_the_run(tmp_path, monkeypatch):
    """With the network and the ranks left out: what they would have been given, and what is kept beside the results."""
    seen, out, run = {}, tmp_path / "elsewhere", write(tmp_path)

    def watched(network, config, resume, timeout, label, rate, stop):
        seen.update(config=config, resume=resume, timeout=timeout, measured_against=rate)
        return [step(2), {"kind": "end"}]

    monkeypatch.setattr(local, "Network", lambda **given: seen.update(given) or nullcontext())
    monkeypatch.setattr(local, "check", lambda: [SimpleNamespace(ok=True)])
    monkeypatch.setattr(local, "_watched", watched)
    words = ["--local", "1", "--rate", "3mbit", "--latency", "7ms", "--resume", "--timeout", "9", "--wire", "safe"]
    assert main(["train", run, *words, "--out", str(out)]) == 0
    (host,) = seen["topology"].hosts
    assert (host.link.up, host.link.down, host.link.latency, seen["measured_against"]) == (3e6, 3e6, 7e-3, 3e6)
    assert seen["resume"] and seen["timeout"] == 9.0
    assert seen["config"].run.out == str(out) and seen["config"].wire == {"preset": "safe"}
    kept = json.loads((out / "config.json").read_text())
    assert kept["wire"] == {"preset": "safe"} and kept["optim"]["steps"] == 2
    assert (out / "run.toml").read_text() == Path(run).read_text()


def test_a_run_that_takes_too_long_is_stopped():
    stops = []
    job = SimpleNamespace(seconds=5.0, stop=lambda: stops.append(1))
    local._check_time(job, None)
    local._check_time(job, 6.0)
    assert not stops
    with pytest.raises(UsageError, match="longer than 4 s"):
        local._check_time(job, 4.0)
    assert stops


def test_a_second_run_touches_nothing_of_the_first(tmp_path, capsys):
    """Refused before its configuration or metrics are overwritten."""
    out = tmp_path / "out"
    (out / "checkpoints" / "step-00000002").mkdir(parents=True)
    (out / "run.toml").write_text("# the first")
    (out / "metrics.jsonl").write_text('{"kind": "end", "step": 2}\n')
    for words in ([], ["--local", "1"]):
        assert main(["train", write(tmp_path), *words]) == 2
        assert "--resume" in capsys.readouterr().err
    assert (out / "run.toml").read_text() == "# the first" and read_events(out / "metrics.jsonl")


@pytest.mark.parametrize("words", [["demo"], ["bench", "train"], ["bench", "optimus"]])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, capsys, words):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "another folder" in capsys.readouterr().err and (tmp_path / "thesis.tex").exists()


def rank_of_torchrun(launcher, rank):
    """The process id of a rank that torchrun has started; None while there is none."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):  # gone in the meantime
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    return None


@pytest.mark.timeout(200)
def test_torchrun_names_a_lost_rank_and_goes_on(tmp_path):
    """kill -9 of a rank under torchrun: the other says whose, unless torchrun ends it first and says so itself; the
    restart takes the newest whole checkpoint."""
    text = SMALL.format(mesh="dp = 2", out=tmp_path / "out", wire="").replace("steps = 2", "steps = 120")
    (tmp_path / "run.toml").write_text(text.replace("[run]", "[run]\ncheckpoint_every = 8"))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["-m", "thinwire", "train", str(tmp_path / "run.toml")]
    metrics, said = tmp_path / "out" / "metrics.jsonl", tmp_path / "said"
    with said.open("w") as log:
        launcher = subprocess.Popen(
            [sys.executable, *words], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + 90
            while not (tmp_path / "out" / "checkpoints" / "step-00000016").exists() and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(rank_of_torchrun(launcher.pid, 1), signal.SIGKILL)
            status = launcher.wait(190)
        finally:
            launcher.kill()
            launcher.wait()
    heard = said.read_text()
    assert status == 0 and ("lost rank 1" in heard or "(exitcode: -9) local_rank: 1" in heard), heard[-3000:]
    resumed = int(heard.partition("resumed at step ")[2].split()[0])
    assert resumed >= 16 and resumed % 8 == 0 and "(120/120)" in heard
    assert [e["step"] for e in read_events(metrics) if e["kind"] == "step"] == list(range(1, 121))


def test_restarts_on_several_machines_want_a_new_store(monkeypatch):
    for name, value in {"USE_AGENT_STORE": "True", "MAX_RESTARTS": "3", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"--max-restarts 3 .* TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join("gloo", timedelta(seconds=1))


def test_checkpoints_are_whole_and_few(tmp_path, alone):
    kept = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        kept.save(step, {"x": torch.full((4,), float(step)), "step": torch.tensor(step)})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000003"]
    (tmp_path / "step-00000004.part").mkdir()  # a save that was killed
    newest = kept.newest()
    assert newest is not None and newest.name == "step-00000003" == kept.newest_sound(print).name
    assert torch.equal(kept.read(newest, lambda name: name == "x")["x"], torch.full((4,), 3.0))
    for file in newest.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(UsageError, match="no whole checkpoint"):
        kept.read(newest, lambda name: True)


def test_machines_that_share_no_folder_take_the_newest_that_all_have(tmp_path, alone, monkeypatch):
    def gathered(mine):
        return [mine, [2, 3], [1, 2, 3]] if isinstance(mine, list) else [mine, None, None]

    for number in (1, 2, 4):
        (tmp_path / f"step-{number:08d}").mkdir()
    kept = Checkpoints(tmp_path)
    kept.size = 3
    monkeypatch.setattr(checkpoint, "gather_json", gathered)
    assert kept.newest_sound(print) == tmp_path / "step-00000002" and kept.newest() == tmp_path / "step-00000004"


def test_metrics_drop_what_will_be_done_again(tmp_path):
    first = Metrics(tmp_path)
    for step in (1, 2, 3):
        first.write("step", step, loss=1.0 / step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # killed while writing
    second = Metrics(tmp_path, resumed_at=2)
    second.write("step", 3, loss=0.25)
    second.close()
    assert [(e["step"], e["loss"]) for e in read_events(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 0.5), (3, 0.25)]


def test_streams_as_nccl_has_them():
    """At least as many flows as were asked for, 64 at most, and none where nothing was said."""
    assert nccl_flows(1) == nccl_flows("auto") == {}
    assert nccl_flows(8) == {"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "8"}
    for streams in range(2, 65):
        threads, sockets = map(int, nccl_flows(streams).values())
        assert streams <= threads * sockets <= 64 and sockets <= 8
