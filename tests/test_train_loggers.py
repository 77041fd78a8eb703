"""A run's numbers at TensorBoard, Weights & Biases and MLflow: stand-ins for the services record what reaches them."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.train.config.sections import init_text, load
from thinwire.train.loggers.events import check_loggers
from thinwire.train.loggers.services import TensorBoard
from thinwire.train.metrics import Metrics, read_events

STEP = {
    "loss": 2.5, "forward_bytes": 100, "backward_bytes": 50, "gradient_bytes": 40, "embedding_bytes": 10,
    "raw_bytes": 1000, "hit_rate": None, "errors": {"forward": 0.1, "gradient": 0.2},
}  # fmt: skip
NUMBERS = {"step/loss": 2.5, "step/saved_bytes": 800, "step/times_fewer": 5.0, "step/errors/forward": 0.1}


class FakeWandb(ModuleType):
    """`init` with the arguments that are used; runs remember what they were given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Any] = []

    def init(self, *, dir: str, name: str, id: str | None, resume: str) -> Any:
        assert Path(dir).is_dir() and resume == "allow"
        run = SimpleNamespace(id=id or f"made-{len(self.runs)}", name=name, logged={}, summary={}, finished=False)
        run.log = lambda values, step: run.logged.setdefault(step, {}).update(values)
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


class FakeMLflow(ModuleType):
    """A client on a store in memory."""

    def __init__(self, served: bool = False) -> None:
        super().__init__("mlflow")
        self.logged: dict[tuple[str, int, str], float] = {}
        self.texts: dict[str, str] = {}
        self.runs: list[str] = []
        self.ended: list[str] = []
        self.uris: list[str | None] = []
        self.entities = SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))
        self.is_tracking_uri_set = lambda: served

    def MlflowClient(self, tracking_uri: str | None) -> Any:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str, place: str | None) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.runs.append(f"{experiment}-{run_name}-{len(self.runs)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.runs[-1]))

    def log_batch(self, run: str, metrics: list[tuple[str, float, int]]) -> None:
        self.logged |= {(run, step, key): value for key, value, step in metrics}

    def log_text(self, run: str, text: str, name: str) -> None:
        self.texts[name] = text

    def set_terminated(self, run: str) -> None:
        self.ended.append(run)


def record(folder: Path, loggers: list[str], resumed_at: int | None = None) -> None:
    metrics = Metrics(folder, resumed_at, loggers)
    metrics.write("decision", 0, wire={"gradient": {"bits": 4}}, seconds=0.5)
    metrics.write("step", 1, **STEP)
    metrics.write("note", 1, text="measured again")
    metrics.close()


def test_weights_and_biases(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    record(tmp_path, ["wandb"])
    (run,) = fake.runs
    assert run.name == tmp_path.name and run.finished
    assert NUMBERS.items() <= run.logged[1].items() and "step/hit_rate" not in run.logged[1]
    assert run.logged[0] == {"decision/seconds": 0.5, "decision/wire/gradient/bits": 4}
    assert json.loads(run.summary["decision"]) == {"gradient": {"bits": 4}}
    assert run.summary["note"] == "measured again"
    record(tmp_path, ["wandb"], resumed_at=1)
    assert fake.runs[1].id == "made-0", "a resumed run goes on in its run"
    record(tmp_path, ["wandb"])
    assert fake.runs[2].id != "made-0", "a new run in the same folder is a new one"


@pytest.mark.parametrize("served", [False, True])
def test_mlflow(tmp_path, monkeypatch, served):
    fake = FakeMLflow(served)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    record(tmp_path, ["mlflow"])
    (run,) = fake.runs
    assert fake.uris == [None if served else f"sqlite:///{tmp_path.resolve()}/mlflow.db"]
    assert all(fake.logged[run, 1, name] == value for name, value in NUMBERS.items())
    assert json.loads(fake.texts["decision-0.txt"]) == {"gradient": {"bits": 4}} and fake.ended == [run]
    record(tmp_path, ["mlflow"], resumed_at=1)
    assert fake.runs == [run]


def test_tensorboard_by_default_and_none_by_an_empty_list(tmp_path):
    record(tmp_path / "default", None)
    assert list((tmp_path / "default" / "tensorboard").iterdir())
    record(tmp_path / "none", [])
    assert not (tmp_path / "none" / "tensorboard").exists()
    assert read_events(tmp_path / "none" / "metrics.jsonl") == read_events(tmp_path / "default" / "metrics.jsonl")


def test_what_run_toml_may_say(tmp_path):
    def written(line: str) -> Path:
        path = tmp_path / "run.toml"
        text = init_text()
        assert '# loggers = ["wandb"]' in text
        path.write_text(text.replace('# loggers = ["wandb"]', line))
        return path

    assert load(written("")).run.loggers is None
    assert load(written('loggers = ["mlflow", "wandb"]')).run.loggers == ("mlflow", "wandb")
    with pytest.raises(
        UsageError, match=r"\[run\] loggers = \['comet'\]: allowed is a list of values, each tensorboard"
    ):
        load(written('loggers = ["comet"]'))


def test_a_missing_package_is_one_line_before_anything_starts(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text(init_text().replace('# loggers = ["wandb"]', 'loggers = ["wandb"]'))
    monkeypatch.setattr("thinwire.installed.importlib.util.find_spec", lambda name: None if name == "wandb" else name)
    assert main(["train", str(path), "--local", "4"]) == 2
    said = capsys.readouterr().err
    assert said.startswith('thinwire: [run] loggers = ["wandb"] needs wandb: pip install') and said.count("\n") == 1
    check_loggers(None)


def test_a_full_disk_is_raised_once_and_not_printed_by_the_thread(tmp_path, capfd, monkeypatch):
    """TensorBoard writes in a thread of its own, whose traceback would come before the line that says why."""
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer import record_writer

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    logger = TensorBoard(tmp_path, None)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        logger.numbers(1, {"loss": 1.0})
        logger.close()
    assert "Traceback" not in capfd.readouterr().err
