"""AMX that is shown but ends the process: found by a child that dies, remembered, avoided; nothing where none is shown.

No machine with such a processor is needed: /proc/cpuinfo and the program of the trial are stood in for.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import thinwire
from thinwire import cpu_features
from thinwire.cpu_features import VARIABLES, WITHOUT_AMX, guard_bf16
from thinwire.doctor.command import check_bf16
from thinwire.lab.network import _variables

AMX = "model name\t: Fake\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n\nprocessor\t: 1\nflags\t\t: none\n"
DEATH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
LIMITED = f"AMX code dies here: oneDNN limited by {VARIABLES[0]}={WITHOUT_AMX}"


class Machine:
    """A processor with AMX whose trials run `program`, and a log with one line per trial."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpuinfo, self.trial, self.log = folder / "cpuinfo", folder / "trial.py", folder / "log"
        self.cpuinfo.write_text(AMX)
        self.runs(DEATH)
        self.log.touch()
        monkeypatch.setattr(cpu_features, "CPUINFO", self.cpuinfo)
        monkeypatch.setattr(cpu_features, "TRIAL", self.trial)
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        monkeypatch.setenv("HOME", str(folder / "home"))
        self.kept = folder / "home" / ".cache" / "thinwire" / "processor"
        for name in VARIABLES:
            monkeypatch.setenv(name, "")  # so that it is put back as it was
            monkeypatch.delenv(name)

    def runs(self, program: str) -> None:
        seen = f"[n for n in {VARIABLES} if n in os.environ]"
        self.trial.write_text(f"import os; print({seen}, file=open({str(self.log)!r}, 'a'))\n{program}\n")

    @property
    def trials(self) -> int:
        lines = self.log.read_text().splitlines()
        assert all(line == "[]" for line in lines), "a trial must run without a limit"
        return len(lines)

    def limit(self) -> str | None:
        """The variable as guard_bf16 left it, which is then taken back."""
        return os.environ.pop(VARIABLES[0], None)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    was = torch.backends.mkldnn.enabled
    yield Machine(tmp_path, monkeypatch)
    torch.backends.mkldnn.enabled = was


def test_without_amx_nothing_is_tried(machine):
    for text in ("", AMX.replace(" amx_bf16 amx_tile", ""), "processor\t: 0\n"):
        machine.cpuinfo.write_text(text)
        assert guard_bf16() == "this processor shows no AMX"
    machine.cpuinfo.unlink()
    assert guard_bf16() == "this processor shows no AMX"
    assert machine.trials == 0 and machine.limit() is None and not machine.kept.exists()


def test_amx_that_works_is_left_alone_and_tried_once(machine):
    machine.runs("")
    assert [guard_bf16() for _ in range(2)] == ["AMX works"] * 2
    assert machine.trials == 1 and machine.limit() is None


def test_a_death_by_sigill_limits_onednn_and_is_remembered(machine):
    for _ in range(2):
        assert guard_bf16() == LIMITED and machine.limit() == WITHOUT_AMX
    assert machine.trials == 1 and torch.backends.mkldnn.enabled
    machine.runs("raise SystemExit(128 + 4)")  # as a shell's script that was `python` would end
    machine.cpuinfo.write_text(AMX.replace("Fake", "Other"))
    assert guard_bf16() == LIMITED and machine.trials == 2


@pytest.mark.parametrize("name", VARIABLES)
def test_the_user_s_own_limit_stays(machine, monkeypatch, name):
    monkeypatch.setenv(name, "AVX2")
    assert guard_bf16() == f"oneDNN limited by {name}=AVX2"
    assert machine.trials == 0 and [os.environ.get(n) for n in VARIABLES].count("AVX2") == 1


def test_what_is_remembered_is_of_this_processor_kernel_and_torch(machine, monkeypatch):
    guard_bf16(), machine.limit()
    machine.cpuinfo.write_text(AMX.replace("avx512f", "avx512f avx512_fp16"))
    guard_bf16(), machine.limit()
    monkeypatch.setattr("platform.release", lambda: "another kernel")
    guard_bf16(), machine.limit()
    other = machine.trial.parent / "torch" / "__init__.py"
    other.parent.mkdir()
    other.with_name("version.py").write_text("__version__ = '9.9'\n")
    spec = torch.__spec__.__class__("torch", None, origin=str(other))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    guard_bf16(), machine.limit()
    assert machine.trials == 4 == len(list(machine.kept.iterdir()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert guard_bf16() == "AMX works" and machine.trials == 4, "no torch, no product"


def test_the_folder_is_the_user_s_own(machine):
    """Nobody else can have written what is read; a link or an open folder is not used, nor is a torn file believed."""
    guard_bf16(), machine.limit()
    assert stat.S_IMODE(machine.kept.stat().st_mode) == 0o700
    (file,) = machine.kept.iterdir()
    file.write_bytes(b"\xff\x00wor")
    assert guard_bf16() == LIMITED and machine.limit() and machine.trials == 2
    file.write_text("works\n")
    assert guard_bf16() == "AMX works"
    machine.kept.chmod(0o777)
    assert guard_bf16() == LIMITED and machine.limit() and machine.trials == 3
    (second,) = Path(tempfile.gettempdir()).iterdir()
    assert second.name == f"thinwire-processor-{os.getuid()}" and len(list(second.iterdir())) == 1
    second.rename(second.with_name("elsewhere"))
    second.symlink_to(second.with_name("elsewhere"))
    assert guard_bf16() == LIMITED and machine.trials == 4, "nowhere to keep it: tried again"


def test_another_owner_s_folder_is_not_used(machine, monkeypatch):
    machine.kept.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: machine.kept.stat().st_uid + 1)
    assert cpu_features.own_folder() is None


def test_a_trial_that_fails_otherwise_is_no_evidence(machine, monkeypatch):
    machine.runs("raise ImportError('libgomp is missing')")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="could not try bf16 products.*libgomp is missing"):
            assert guard_bf16() == "AMX works"
    assert machine.trials == 2 and machine.limit() is None
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.warns(RuntimeWarning, match="/nowhere/python"):
        guard_bf16()


def test_torch_that_used_onednn_before_has_it_switched_off(machine, monkeypatch):
    """The fork stands where this process stands: if it dies, the variable comes too late."""
    monkeypatch.setattr(cpu_features, "multiply", lambda: os.kill(os.getpid(), signal.SIGILL))
    with pytest.warns(RuntimeWarning, match=f"switched off.*{VARIABLES[0]}={WITHOUT_AMX}"):
        assert guard_bf16() == "AMX code dies here: oneDNN switched off"
    assert not torch.backends.mkldnn.enabled and machine.limit() == WITHOUT_AMX, "what it starts will be well"


def test_a_fork_lives_after_parallel_products_and_a_stuck_one_is_ended(monkeypatch):
    x = torch.ones(512, 512)
    torch.mm(x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu_features.survives_in_fork()
        monkeypatch.setattr(cpu_features, "multiply", lambda: 1 / 0)
        assert not cpu_features.survives_in_fork()
        monkeypatch.setattr(cpu_features, "PATIENCE_FORKED", 0.05)
        monkeypatch.setattr(cpu_features, "multiply", lambda: signal.pause())
        assert not cpu_features.survives_in_fork()


IMPORTING = """
import importlib.util, os, pathlib, signal, subprocess, sys, warnings
{before}
spec = importlib.util.spec_from_file_location("thinwire.cpu_features", {file!r})
guard = sys.modules["thinwire.cpu_features"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
guard.CPUINFO, guard.TRIAL = pathlib.Path({cpuinfo!r}), pathlib.Path({trial!r})
{patch}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import thinwire, thinwire.cli
print("torch" in sys.modules, os.environ.get("ONEDNN_MAX_CPU_ISA"), len(caught))
"""


@pytest.mark.parametrize(
    "before, patch, said",
    [
        ("", "", f"False {WITHOUT_AMX} 0"),
        ("import torch", "", f"True {WITHOUT_AMX} 0"),
        ("import torch", "guard.multiply = lambda: os.kill(os.getpid(), signal.SIGILL)", f"True {WITHOUT_AMX} 1"),
    ],
    ids=["before torch", "after torch", "after oneDNN"],
)
def test_importing_thinwire_is_enough(machine, before, patch, said):
    """And imports no torch of its own, as the commands do not before they need it."""
    code = IMPORTING.format(
        before=before, patch=patch, file=cpu_features.__file__, cpuinfo=str(machine.cpuinfo), trial=str(machine.trial)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == said and machine.trials == 1


def test_ranks_of_the_lab_get_the_limit(machine):
    guard_bf16()
    assert _variables({})[VARIABLES[0]] == WITHOUT_AMX


def test_doctor_says_so_in_a_line(monkeypatch):
    """The product is tried as this process would do it: it must live here, whatever the processor."""
    (found,) = check_bf16()
    assert found.ok and found.detail == thinwire.bf16_guard
    monkeypatch.setattr(cpu_features, "survives_in_child", lambda environment: (False, "illegal instruction"))
    (found,) = check_bf16()
    assert not found.ok and "illegal instruction" in found.detail and WITHOUT_AMX in found.remedy
