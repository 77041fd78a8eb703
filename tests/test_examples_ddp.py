"""The drop-in examples, each as a user would run it, on two processes of one host.

Ranks are forks of one process that has imported the trainers already: importing them takes longer than the runs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from thinwire.cli import main
from thinwire.data_parallel import ddp
from thinwire.data_parallel.trainers import compress_trainer
from thinwire.errors import UsageError
from thinwire.lab import Network, check

EXAMPLES = Path(__file__).parent.parent / "examples"
PRELOAD = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "sklearn.datasets", "accelerate", "transformers",
    "transformers.trainer", "transformers.models.llama.modeling_llama", "lightning", "test_examples_ddp",
)  # fmt: skip
needs_lab = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
    pytest.mark.timeout(240),
]


def run_example(name: str, *words: str) -> dict[str, Any]:
    """The script as __main__, or the command "thinwire"; what it printed, and what is left in the handle it made."""
    handles, attach = [], ddp.CompressedDDP.__init__

    def keep(handle: ddp.CompressedDDP, *arguments: Any) -> None:
        attach(handle, *arguments)
        handles.append(handle)

    torch.set_num_threads(1)
    said = logging.handlers.BufferingHandler(100)
    for logger in map(logging.getLogger, ("thinwire", "lightning.pytorch")):
        logger.addHandler(said)
        logger.setLevel(logging.INFO)
    with (
        mock.patch.object(ddp.CompressedDDP, "__init__", keep),
        mock.patch.object(sys, "argv", [name, *words]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        if name == "thinwire":
            assert main(words) == 0
        else:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    (handle,) = handles
    state = handle.state_dict()
    return {
        "printed": printed.getvalue(),
        "weights": torch.cat([p.detach().reshape(-1) for p in handle.model.module.parameters()]),
        "owed": sum(float(v.abs().sum()) for n, v in state.items() if "/e/" in n),
        "reductions": handle.reducer.exchange.steps,
        "compressing": handle.compressing,
        "said": [record.getMessage() for record in said.buffer],
        "summary": str(handle.summary()),
    }


@pytest.fixture(scope="module")
def host():
    with Network(hosts=1, preload=PRELOAD) as net:
        yield lambda *words: list(net.run(run_example, *words, per_host=2, timeout=100, echo=False))


def check_compressed(found: list[dict[str, Any]]) -> None:
    """Gradients were compressed on both ranks, and yet the ranks have the same weights, bit for bit."""
    assert all(one["owed"] > 0 and one["compressing"] for one in found)
    assert found[0]["owed"] != found[1]["owed"]
    assert torch.equal(found[0]["weights"], found[1]["weights"])


def check_summary(found: list[dict[str, Any]]) -> None:
    """What was saved is said once, at the end, by the first rank."""
    first, second = ([line for line in one["said"] if "per step instead of" in line] for one in found)
    assert first == [f"thinwire: {found[0]['summary']}"] and second == []


def losses(found: list[dict[str, Any]]) -> list[float]:
    return [float(x) for x in re.findall(r"loss'?:? '?([\d.]+)", found[0]["printed"])]


def write_pictures(folder: Path) -> Path:
    """Two classes of three pictures, a colour each; for testing, one of each."""
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("frog", (0, 200, 0)), ("cat", (200, 0, 0))):
        for part, count in (("train", 3), ("test", 1)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (32, 32), colour).save(folder / part / name / f"{number}.jpg")
    return folder


def write_speech(folder: Path) -> Path:
    """Six utterances of 30 frames, and one for testing, in Sphinx's format: value 13·i + j is feature j of frame i."""
    (folder / "etc").mkdir(parents=True)
    (folder / "feat/one").mkdir(parents=True)
    for part, names in (("train", "abcdef"), ("test", "g")):
        lines = "".join(f"<s> YES {name.upper()} </s> ({name})\n" for name in names)
        (folder / f"etc/an4_{part}.fileids").write_text("".join(f"one/{name}\n" for name in names))
        (folder / f"etc/an4_{part}.transcription").write_text(lines)
        for name in names:
            values = np.arange(390, dtype=">f4")
            (folder / f"feat/one/{name}.mfc").write_bytes(np.array([390], ">i4").tobytes() + values.tobytes())
    return folder


def test_pictures_and_speech_are_read_from_their_folders(tmp_path) -> None:
    vgg, lstm = (runpy.run_path(str(EXAMPLES / name)) for name in ("vgg_cifar10.py", "lstm_an4.py"))
    pictures, labels = vgg["read_folder"](write_pictures(tmp_path / "cifar") / "train")
    assert pictures.shape == (6, 3, 32, 32) and labels.tolist() == [0, 0, 0, 1, 1, 1], "cat, then frog"
    assert (pictures.float().mean((2, 3)) / 100).round().tolist() == [[2, 0, 0]] * 3 + [[0, 2, 0]] * 3
    speech = lstm["read_an4"](write_speech(tmp_path / "an4"), "train")
    assert [said for _, said in speech] == [f"YES {letter}" for letter in "ABCDEF"]
    whole = torch.arange(390.0).view(30, 13)
    expected = (whole - whole.mean(0)) / whole.std(0)
    assert all(torch.allclose(frames, expected, atol=1e-5) for frames, _ in speech)


@pytest.mark.parametrize("name", ["vgg_cifar10.py", "lstm_an4.py"])
def test_another_folder_is_refused(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert f"{tmp_path} has no folder" in capsys.readouterr().err


class TestInTheLab:
    pytestmark = needs_lab

    def test_plain_ddp(self, host):
        found = host("ddp_compressed.py", "--steps", "150")
        check_compressed(found)
        assert found[0]["reductions"] == 150
        accuracy = float(re.search(r"accuracy ([\d.]+)", found[0]["printed"])[1])
        assert accuracy > 0.8, found[0]["printed"]

    @pytest.mark.parametrize(("name", "reductions"), [("vgg_cifar10.py", 12), ("lstm_an4.py", 40)])
    def test_pictures_and_speech(self, host, name, reductions):
        """Ok-Topk's tasks, on made-up data."""
        found = host(name, "--quick")
        check_compressed(found)
        assert found[0]["reductions"] == reductions
        assert losses(found)[-1] < 0.9 * losses(found)[0], found[0]["printed"]
        assert "fewer" in found[0]["printed"]

    @pytest.mark.parametrize(
        ("name", "write", "more"),
        [("vgg_cifar10.py", write_pictures, ()), ("lstm_an4.py", write_speech, ("--sgd", "--lr", "0.01"))],
    )
    def test_a_folder_of_their_data(self, host, name, write, more, tmp_path):
        """The full network: two exact steps, then Ok-Topk. What is less than a step is refused."""
        folder = str(write(tmp_path / "data"))
        found = host(name, folder, "--epochs", "3", "--batch", "3", "--exact", "2", *more)
        check_compressed(found)
        assert found[0]["reductions"] == 3
        fewer = float(re.search(r"([\d.]+)× fewer", found[0]["printed"])[1])
        assert 1.3 < fewer < 1.6, f"two of three steps are exact: {found[0]['printed']}"
        with pytest.raises(Exception, match="are less than a step: 2 ranks"):
            host(name, folder, "--batch", "4")

    def test_accelerate(self, host, tmp_path):
        """512 samples, two ranks of batch 16, two batches a step: 8 reductions an epoch, not 16."""
        found = host("accelerate_loop.py", "--epochs", "8", "--save", str(tmp_path / "state"))
        check_compressed(found)
        assert found[0]["reductions"] == 8 * 8
        assert sum(losses(found)[-3:]) < 0.9 * sum(losses(found)[:3]), found[0]["printed"]
        saved = [torch.load(tmp_path / "state" / f"thinwire-{rank}.pt") for rank in (0, 1)]
        assert all(name.startswith(f"rank{r}of2/") for r, state in enumerate(saved) for name in state)

    def test_hugging_face_trainer_and_its_checkpoints(self, host, tmp_path):
        """Eight steps of two batches each; the last four again from the checkpoint between: the same bits."""
        found = host("hf_trainer.py", "--out", str(tmp_path))
        check_compressed(found)
        assert found[0]["reductions"] == 8
        assert losses(found)[7] < 0.95 * losses(found)[0], found[0]["printed"]
        check_summary(found)
        assert found[0]["printed"].count("'thinwire_ratio'") == 8 + 1  # beside every loss, and at the end
        shutil.rmtree(tmp_path / "checkpoint-8")
        again = host("hf_trainer.py", "--out", str(tmp_path), "--resume")
        assert torch.equal(again[0]["weights"], found[0]["weights"])
        assert [one["owed"] for one in again] == [one["owed"] for one in found]

    def test_lightning_and_its_checkpoints(self, host, tmp_path):
        """Two epochs of 8 steps at once, or one, a checkpoint and another: the same bits."""
        found = host("lightning_ddp.py", "--out", str(tmp_path / "whole"))
        check_compressed(found)
        assert found[0]["reductions"] == 16
        assert losses(found)[-1] < losses(found)[0], found[0]["printed"]
        check_summary(found)
        host("lightning_ddp.py", "--out", str(tmp_path / "parts"), "--epochs", "1")
        again = host("lightning_ddp.py", "--out", str(tmp_path / "parts"), "--resume")
        assert torch.equal(again[0]["weights"], found[0]["weights"])
        assert [one["owed"] for one in again] == [one["owed"] for one in found]

    def test_a_script_that_knows_nothing_of_thinwire(self, host):
        """`thinwire run`: the bits of the line in the script."""
        script = str(EXAMPLES / "ddp_compressed.py")
        found = host("thinwire", "run", "--wire", "max", script, "--plain", "--steps", "20")
        check_compressed(found)
        line = host("ddp_compressed.py", "--wire", "max", "--steps", "20")
        assert torch.equal(found[0]["weights"], line[0]["weights"])
        assert f"thinwire: {found[0]['summary']}\n" in found[0]["printed"] and "thinwire:" not in found[1]["printed"]

    def test_a_trainer_that_knows_nothing_of_thinwire(self, host, tmp_path):
        """Its checkpoints hold residuals, as compress_trainer's do; the wire is a file."""
        words = ("--trainer", "huggingface", "--wire", str(EXAMPLES / "wire.toml"), str(EXAMPLES / "hf_trainer.py"))
        found = host("thinwire", "run", *words, "--plain", "--out", str(tmp_path))
        check_compressed(found)
        assert {path.name for path in (tmp_path / "checkpoint-8").glob("thinwire-*")} == {
            "thinwire-0of2.pt", "thinwire-1of2.pt",
        }  # fmt: skip


def test_run_puts_the_constructor_back(tmp_path, capsys, monkeypatch):
    """Also where the script fails; one that wraps nothing is told."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script, before = tmp_path / "script.py", torch.nn.parallel.DistributedDataParallel.__init__
    script.write_text("import sys\nassert sys.argv[1:] == ['--fail'], 'as it should'\n")
    assert main(["run", "--wire", "off", str(script), "--fail"]) == 0
    assert "wrapped no model in DDP" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="as it should"):
        main(["run", "--wire", "off", str(script)])
    assert torch.nn.parallel.DistributedDataParallel.__init__ is before


@pytest.mark.timeout(120)
def test_plain_ddp_under_torchrun():
    """Without the lab, by the command in its docstring."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "ddp_compressed.py"), "--steps", "5"],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compressing: True" in done.stdout


def test_another_trainer_is_refused():
    with pytest.raises(UsageError, match="Hugging Face or Lightning trainer, not dict"):
        compress_trainer({})


def test_a_second_call_for_a_trainer_is_refused(tmp_path):
    from lightning.pytorch import Trainer as Lightning
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    face = Trainer(model=torch.nn.Linear(2, 2), args=arguments)
    bolt = Lightning(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    for trainer, callbacks in ((face, face.callback_handler.callbacks), (bolt, bolt.callbacks)):
        compress_trainer(trainer, "max")
        before = list(callbacks)
        with pytest.raises(UsageError, match="compressed already: call it once per trainer"):
            compress_trainer(trainer, "off")
        assert callbacks == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_the_commands_of_the_accelerate_example_start_two_processes(launcher: str) -> None:
    """As its docstring gives them. One process would have nothing to compress."""
    text = (EXAMPLES / "accelerate_loop.py").read_text()
    (command,) = re.findall(rf"^({launcher} .*)$", text, flags=re.MULTILINE)
    module = {"torchrun": "torch.distributed.run", "accelerate launch": "accelerate.commands.launch"}[launcher]
    words = command.removeprefix(launcher).split()
    if launcher == "torchrun":
        words.insert(0, "--standalone")  # a free port
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--epochs", "1"], cwd=EXAMPLES.parent, capture_output=True, text=True,
        timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes" in done.stdout.splitlines() and "epoch 0: loss" in done.stdout
