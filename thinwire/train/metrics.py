"""What a run records: one JSON line an event (metrics.jsonl), and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class Metrics:
    """Written by one rank. Lines after `resumed_at` belong to steps that will be done again, and are dropped."""

    def __init__(self, folder: str | Path, resumed_at: int | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / METRICS
        kept = [] if resumed_at is None else [e for e in read_events(self.path) if e.get("step", 0) <= resumed_at]
        self.path.write_text("".join(json.dumps(event) + "\n" for event in kept))
        self.file = self.path.open("a", buffering=1)
        self.board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=resumed_at)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One event; numbers also go to TensorBoard as kind/name."""
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines; the last may be cut off where a run was killed."""
    target = Path(path)
    if not target.exists():
        return []
    events = []
    for line in target.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events
