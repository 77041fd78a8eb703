"""Nothing that a stranger wrote is run: no pickles between ranks, no code in checkpoints, models and data."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import UsageError
from thinwire.parallel import read_state
from thinwire.pipeline.handshake import StageInfo, _read_infos
from thinwire.pipeline.shapes import _spec

ROOT = Path(__file__).parent.parent

# --- between ranks

INFO = {
    "stages": 2, "config": {"seed": "0"}, "inputs": ["(2, 8) torch.float32"], "outputs": None, "dropout": [],
    "first_tag": 7, "run": "0123abcd",
}  # fmt: skip


def test_a_stage_is_described_in_json() -> None:
    found = _read_infos([[1, INFO]], 0)
    assert found == {1: StageInfo(2, {"seed": "0"}, ("(2, 8) torch.float32",), None, [], 7, "0123abcd")}


@pytest.mark.parametrize(
    "said",
    [
        None, 7, "text", [[1]], [["one", INFO]], [[1, None]], [[1, []]], [[1, INFO | {"more": 1}]],
        [[1, {name: value for name, value in INFO.items() if name != "run"}]],
        *([[1, INFO | change]] for change in (
            {"run": "../../etc"}, {"run": 7}, {"stages": "2"}, {"stages": True}, {"stages": -1}, {"config": []},
            {"config": {"seed": 0}}, {"inputs": 3}, {"outputs": [3]}, {"dropout": None}, {"first_tag": 2**40},
        )),
    ],
    ids=lambda said: f"{said!r:.60}",
)  # fmt: skip
def test_a_stage_described_in_another_way_is_one_line(said: Any) -> None:
    with pytest.raises(UsageError, match="rank 3 of the pipeline describes its stages in another way") as caught:
        _read_infos(said, 3)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(("shape", "kind"), [([2, -1], "float32"), ([2], "load"), (["2"], "float32"), ([2], "none")])
def test_shapes_of_another_rank_are_checked(shape: list[int], kind: str) -> None:
    with pytest.raises(RuntimeError, match="another rank announces a tensor"):
        _spec(shape, kind)


class Hostile:
    """Pickled, it is a call."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.ran),)


def test_state_in_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(UsageError, match="may run code, and is not read"):
        read_state(tmp_path, "wire")
    assert not (tmp_path / "ran").exists()
