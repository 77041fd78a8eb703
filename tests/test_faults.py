"""`thinwire bench faults`: its quickest cells end well, and its verdicts tell good endings from bad ones."""

from __future__ import annotations

import json

import pytest

from thinwire.bench.faults.cells import DDP, FAULTS, PIPELINE, RUNS, TRAIN, Cell, chosen
from thinwire.bench.faults.command import counts, judged, report
from thinwire.bench.faults.damaged import as_toml
from thinwire.bench.faults.injury import KINDS
from thinwire.bench.faults.trainer import configured
from thinwire.bench.faults.verdict import (
    GOES_ON,
    HANG,
    NO_WORD,
    ONE_LINE,
    ROLLED_BACK,
    TRACEBACK,
    WRONG,
    Verdict,
    bad_ending,
    compared,
)  # fmt: skip
from thinwire.bench.faults.watched import RESULT, Ended
from thinwire.cli import main
from thinwire.lab import check
from thinwire.train.config.sections import load

SAID = ["thinwire: lost rank 1"]
needs_network = pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces")


def ended(status: int = 0, lines: list[str] | None = None, stuck: bool = False, at: float = 1.0) -> Ended:
    return Ended(status, lines or [], at, stuck)


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([ended(), ended()], None),
        ([ended(1, SAID), ended(-9)], ONE_LINE),
        ([ended(1, SAID), ended(-9, stuck=True)], HANG),
        ([ended(1, ["Traceback (most recent call last):", "KeyError: 1", *SAID]), ended(-9)], TRACEBACK),
        ([ended(1), ended(-9)], NO_WORD),
        ([ended(-6, ["terminate called"]), ended(-9)], NO_WORD),
        ([ended(0), ended(-9)], WRONG),
    ],
)
def test_a_bad_ending_is_told_by_its_kind(ranks, word):
    verdict = bad_ending(ranks, 1, 2.0)
    assert (verdict and verdict.word) == word


def test_the_line_is_of_the_rank_that_ended_first():
    verdict = bad_ending([ended(1, ["thinwire: second"], at=2.0), ended(1, ["thinwire: first"], at=1.0)], None, 2.0)
    assert verdict is not None and verdict.said == "thinwire: first"


def results(*ranks: dict) -> list[Ended]:
    return [ended(0, ["a line", RESULT + json.dumps(rank)]) for rank in ranks]


PLAIN = {"losses": ["1", "2", "3"], "weights": ["a", "b", "c"], "dropped": []}
DROPPED = {"losses": ["1", "2", "9"], "weights": ["a", "a", "d"], "dropped": [2]}


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([PLAIN, PLAIN], GOES_ON),
        ([DROPPED, DROPPED], ROLLED_BACK),
        ([DROPPED, PLAIN], WRONG),  # one rank only
        ([{**PLAIN, "losses": ["1", "2", "4"]}, PLAIN], WRONG),
        ([{**DROPPED, "weights": ["a", "x", "d"]}] * 2, WRONG),  # the step that was dropped moved the weights
        ([{**DROPPED, "weights": ["x", "x", "d"]}] * 2, WRONG),  # they were wrong before
        ([DROPPED, {**DROPPED, "weights": ["a", "a", "e"]}], WRONG),  # replicas differ
    ],
)
def test_results_are_compared_bit_for_bit(ranks, word):
    assert compared(results(*ranks), [PLAIN, PLAIN], [(0, 1)], 1.0).word == word


def test_the_matrix_is_large_and_names_injuries_that_exist():
    cells = chosen("", False, 1)
    assert len(cells) >= 40 and {cell.run for cell in cells} == set(RUNS)
    assert {fault.kind for fault in FAULTS} - {""} == set(KINDS)
    assert all(set(fault.quick) <= set(fault.runs) for fault in FAULTS)
    assert [cell.name for cell in chosen("CABLE ddp 1, kill train", False, 2) if cell.turn] == [
        "kill -9 of a rank, train", "cable pulled for 1 s, DDP", "cable pulled for 10 s, DDP",
    ]  # fmt: skip


def test_what_is_reported_counts_every_cell():
    rows = [(Cell(FAULTS[0], DDP), Verdict(ONE_LINE, 1.234, "x")), (Cell(FAULTS[0], TRAIN), Verdict(HANG, 9.0, "y"))]
    assert counts(rows) == {ONE_LINE: 1, HANG: 1}
    assert report(rows, 5.0, 3)["cells"][0] == {
        "fault": "kill -9 of a rank", "run": DDP, "turn": 0, "verdict": ONE_LINE, "seconds": 1.23, "said": "x",
    }  # fmt: skip


def test_the_file_for_the_command_says_what_the_ranks_are_given(tmp_path):
    (tmp_path / "run.toml").write_text(as_toml(tmp_path / "out"))
    assert load(tmp_path / "run.toml") == configured(tmp_path / "out", {"preset": "max"})


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--repeat", "0"], "--repeat 0"), (["--patience", "1"], "--patience 1"), (["--only", "fire"], "--only 'fire'")],
)
def test_options_that_are_not_allowed_get_one_line(words, said, capsys):
    assert main(["bench", "faults", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.lab
@needs_network
@pytest.mark.timeout(240)
def test_the_quickest_cells_end_well():
    """A rank is killed, a clock jumps, frames are damaged, memory runs out."""
    expected = {
        ("kill -9 of a rank", PIPELINE): ONE_LINE,
        ("a bit in an activation's frame", PIPELINE): ROLLED_BACK,
        ("a bit in a gradient's frame", PIPELINE): ROLLED_BACK,
        ("clock a day ahead", PIPELINE): GOES_ON,
        ("no memory in a step", PIPELINE): ONE_LINE,
    }
    cells = [Cell(fault, run) for fault in FAULTS for run in RUNS if (fault.name, run) in expected]
    rows = list(judged(cells, patience=30.0, seed=0))
    found = {(cell.fault.name, cell.run): verdict.word for cell, verdict in rows}
    assert found == expected, "\n".join(f"{cell.name}: {verdict}" for cell, verdict in rows)
