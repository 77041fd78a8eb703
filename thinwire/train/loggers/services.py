"""Three places where a run's numbers may go. Each library is imported when its logger is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """One place where numbers and texts of a run go."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Values by name, of that step."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text, such as a decision or a note."""

    def close(self) -> None:
        """Nothing follows."""


class TensorBoard:
    """Event files in `folder`/tensorboard."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _told_later(threading.excepthook)
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, text, step)

    def close(self) -> None:
        self.writer.flush()  # raises what its thread met
        self.writer.close()


def _told_later(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook that leaves out what a thread of TensorBoard could not write: its next call raises that in our thread."""

    def told(about: Any) -> None:
        writes = type(about.thread).__module__.startswith("tensorboard.")
        if not (writes and isinstance(about.exc_value, OSError)):
            hook(about)

    return told


class WeightsAndBiases:
    """A run of Weights & Biases, named after the folder. Its id is kept there: a resumed run goes on in it.

    Steps that are done again after a resume are not recorded again: its step never goes back.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        import wandb

        kept = folder / "wandb-id"
        given = kept.read_text() if resumed_at is not None and kept.exists() else None
        self.run = wandb.init(dir=str(folder), name=folder.name, id=given, resume="allow")
        kept.write_text(self.run.id)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.run.summary[name] = text

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, in the experiment "thinwire": on the server that it is set to, else in `folder`/mlflow.db."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        import mlflow

        own = None if mlflow.is_tracking_uri_set() else f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self.client = mlflow.MlflowClient(tracking_uri=own)
        self.Metric = mlflow.entities.Metric
        kept = folder / "mlflow-id"
        if resumed_at is not None and kept.exists():
            self.run = kept.read_text()
            return
        place = (folder / "mlflow").resolve().as_uri() if own else None
        known = self.client.get_experiment_by_name("thinwire")
        experiment = known.experiment_id if known else self.client.create_experiment("thinwire", place)
        self.run = self.client.create_run(experiment, run_name=folder.name).info.run_id
        kept.write_text(self.run)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.run, [self.Metric(name, value, now, step) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.run, text, f"{name}-{step}.txt")

    def close(self) -> None:
        self.client.set_terminated(self.run)
