"""`thinwire lab run` and `thinwire bench link` as a user meets them."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab_support import require_network

from thinwire import cli

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]
require_network()

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    tensor = torch.ones(500_000)
    dist.all_reduce(tensor)
    print(f"rank {dist.get_rank()} has {tensor[0].item():g} {sys.argv[1:]}")
    dist.destroy_process_group()
    if "fail" in sys.argv and os.environ["RANK"] == "1":
        sys.exit(9)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def test_run_shows_output_table_and_json(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "out" / "run.json"
    words = ["lab", "run", "--hosts", "2", "--rate", "100mbit", "--mtu", "9000"]
    words += ["--preload", "torch", "--json", str(record)]
    assert cli.main([*words, "--", "python", program, "--flag", "x"]) == 0
    said = capsys.readouterr().out
    assert "host0 | rank 0 has 2 ['--flag', 'x']" in said and "host1 | rank 1 has 2" in said
    assert "100mbit" in said and "MB" in said
    result = json.loads(record.read_text())
    assert result["status"] == 0 and [rank["status"] for rank in result["ranks"]] == [0, 0]
    for link in result["links"]:
        assert 2_000_000 <= link["sent"] <= 2_000_000 * 1.05 + 65536
    assert result["mtu"] == 9000
    assert result["links"][1]["address"] == "10.77.0.2" and result["links"][0]["up"] == 1e8


def test_a_failing_rank_gives_its_status(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lab", "run", "--hosts", "2", "--per-host", "1", "--preload", "torch"]
    assert cli.main([*words, "--", "python", program, "fail"]) == 9
    shown = capsys.readouterr()
    assert "rank 1 on host1 exited with status 9" in shown.err and "rank 1 has 2" in shown.err


def test_a_killed_rank_gives_the_shells_status() -> None:
    assert cli.main(["lab", "run", "--", "sh", "-c", "kill -9 $$"]) == 128 + 9


def test_a_time_limit_gives_124(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "run", "--timeout", "300ms", "--", "sleep", "60"]) == 124
    assert "still running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--hosts", "0", "--", "true"], "hosts '0'"),
        (["--hosts", "many", "--", "true"], "hosts 'many'"),
        (["--hosts", "400", "--", "true"], "254 addresses"),
        (["--mtu", "10", "--", "true"], "mtu 10: allowed is a whole number from 576 to 9216"),
        (["--mtu", "jumbo", "--", "true"], "mtu 'jumbo': allowed is a whole number from 576 to 9216"),
        (["--hosts", "9", "--subnet", "10.9.0.0/29", "--", "true"], "6 addresses"),
        (["--subnet", "home", "--", "true"], "subnet 'home'"),
        (["--rate", "100", "--", "true"], "rate '100'"),
        (["--rate", "3MB/s", "--", "true"], "rate '3MB/s'"),
        (["--up", "fast", "--", "true"], "up 'fast'"),
        (["--latency", "10", "--", "true"], "latency '10'"),
        (["--loss", "200%", "--", "true"], "loss '200%'"),
        (["--timeout", "never", "--", "true"], "timeout 'never'"),
        (["--patience", "great", "--", "true"], "patience 'great'"),
        (["--mtu", "200", "--", "true"], "mtu 200: allowed is a whole number from 576 to 9216"),
        (["--mtu", "large", "--", "true"], "mtu 'large'"),
        (["--per-host", "0", "--", "true"], "per-host '0'"),
        (["--hosts", "2"], "no program"),
        (["--", "no-such-program"], "no such command: no-such-program"),
        (["--preload", "torch", "--", "ls"], "--preload runs"),
        (["--preload", "torch", "--", "python", "absent.py"], "no such program: absent.py"),
        (["--preload", "no_such_module", "--", "python", __file__], "cannot preload 'no_such_module'"),
        (["--topology", "absent.toml", "--", "true"], "cannot read topology absent.toml"),
        (["--topology", "absent.toml", "--rate", "1mbit", "--", "true"], "leave out --rate"),
        (["--congestion", "none-such", "--", "true"], "congestion 'none-such': this machine allows reno"),
        (["--reorder", "2", "--", "true"], "reorder '2'"),
        (["--window", "wide", "--", "true"], "window 'wide'"),
        (["--topology", "a.toml", "--no-slow-start-after-idle", "--", "true"], "leave out --no-slow-start-after-idle"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "run", *words]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err and shown.err.count("\n") == 1 and shown.err.startswith("thinwire: ")


def test_bench_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "link.json"
    assert cli.main(["bench", "link", "--rates", "100mbit", "--seconds", "0.2s", "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["test"] for row in rows] == ["raw TCP", "Gloo all-reduce", "Gloo send"]
    assert all(0.6 < row["of_nominal"] < 1.1 for row in rows)
    assert "of nominal" in capsys.readouterr().out


def test_bench_link_by_combinations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, figure = tmp_path / "grid.json", tmp_path / "grid.png"
    words = ["--rate", "50mbit,100mbit", "--latency", "5ms", "--streams", "1,3", "--congestion", "reno"]
    files = ["--json", str(record), "--figure", str(figure)]
    assert cli.main(["bench", "link", *words, "--size", "500kB", *files]) == 0
    rows = json.loads(record.read_text())["rows"]
    asked = [(row["rate"], row["streams"], row["congestion"], row["bytes"]) for row in rows]
    assert asked == [(rate, k, "reno", 500_000) for rate in (5e7, 1e8) for k in (1, 3)]
    for row in rows:
        assert all(0.1 < row[name] < 1.05 for name in ("share", "share_both", "share_first"))
        assert 0.010 <= row["round_trip"] < 0.1
    assert figure.stat().st_size > 0 and "both ways" in capsys.readouterr().out


def test_bench_link_says_what_did_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "grid.json"
    words = ["--rate", "100kbit", "--size", "10MB", "--limit", "3s", "--json", str(record)]
    assert cli.main(["bench", "link", *words]) == 0
    (row,) = json.loads(record.read_text())["rows"]
    assert row["share"] is None and row["share_both"] is None and row["round_trip"] is None
    assert "no end" in capsys.readouterr().out


def test_a_terminal_gets_a_live_line() -> None:
    ours, theirs = pty.openpty()
    code = """
import argparse
from thinwire.lab import command
parser = argparse.ArgumentParser()
command.configure(parser)
raise SystemExit(command.run(parser.parse_args(["run", "--hosts", "2", "--", "sleep", "2.5"])))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, until = b"", time.monotonic() + 30
    while time.monotonic() < until:
        ready, _, _ = select.select([ours], [], [], 1.0)
        try:
            said += os.read(ours, 4096) if ready else b""
        except OSError:  # the terminal's end: the program has closed it
            break
    os.close(ours)
    assert child.wait(10) == 0
    assert "Mb/s: host0 ↑0.0 ↓0.0" in said.decode()
