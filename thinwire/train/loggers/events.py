"""Where a run's numbers go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, by `[run] loggers`.

Each is imported when it is asked for. Accounts, servers and projects are theirs to configure, by their own variables
(WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, …).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.installed import check_installed, missing
from thinwire.train.loggers.services import Logger, MLflow, TensorBoard, WeightsAndBiases

EXTRAS = {"tensorboard": "train", "wandb": "wandb", "mlflow": "mlflow"}  # logger → extra; both are modules' names
SENT = ("forward_bytes", "backward_bytes", "gradient_bytes", "embedding_bytes", "site_bytes")


def check_loggers(names: Sequence[str] | None) -> None:
    """UsageError, in a line, where a logger that run.toml names is not installed."""
    for name in names or ():
        check_installed(f'[run] loggers = ["{name}"]', (name,), EXTRAS[name])


def open_loggers(names: Sequence[str] | None, folder: Path, resumed_at: int | None) -> list[Logger]:
    """The loggers of the run in `folder`.

    names: of EXTRAS; None: TensorBoard, where it is installed. resumed_at: the step from which the run goes on, None
    for a new one.
    """
    if names is None:
        names = () if missing(("tensorboard",)) else ("tensorboard",)
    makers: dict[str, Callable[[Path, int | None], Logger]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "mlflow": MLflow,
    }
    return [makers[name](folder, resumed_at) for name in names]


def send(loggers: Sequence[Logger], kind: str, step: int, values: Mapping[str, Any]) -> None:
    """One event to all of them: its numbers as kind/name, those of tables within as kind/table/name; a decision or a
    note as text."""
    if not loggers:
        return
    found = dict(_numbers(kind, {**values, **(_saved(values) if kind == "step" else {})}))
    for logger in loggers:
        if found:
            logger.numbers(step, found)
        if kind == "decision":
            logger.text(step, kind, json.dumps(values.get("wire"), indent=1))
        elif kind == "note":
            logger.text(step, kind, str(values["text"]))


def _saved(values: Mapping[str, Any]) -> dict[str, float]:
    """Bytes that were not sent, since the start, and how many times fewer than fp32."""
    sent, raw = sum(values.get(name, 0) for name in SENT), values.get("raw_bytes", 0)
    return {"saved_bytes": raw - sent, **({"times_fewer": raw / sent} if sent else {})}


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}/{name}", value
