"""bf16 products on processors whose AMX is shown but does not work.

On some virtual machines with Intel's AMX, torch's first bf16 matrix product ends the process with an illegal
instruction (SIGILL) in oneDNN's AMX code. Neither the processor's flags nor the kernel's permission tell: only a trial
does. `import thinwire` therefore calls `guard_bf16`, which does nothing unless /proc/cpuinfo shows AMX. Where it does:

1. a child process multiplies once (about 1.5 s), and the outcome is kept on disk;
2. where the child died, ONEDNN_MAX_CPU_ISA is set, for this process and those that it starts: oneDNN then leaves AMX
   alone. It reads the variable when torch first uses it, which is later than `import torch`;
3. where torch is imported already, a fork of this process multiplies. If that dies, oneDNN was used before and cannot
   be told any more: it is switched off, with a warning, and torch's products are slower.

A variable that the user has set is never changed.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import os
import platform
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is the name that oneDNN had before
WITHOUT_AMX = "AVX512_CORE_FP16"  # the highest that has none of it
REMEDY = f"set {VARIABLES[0]}={WITHOUT_AMX} in the environment"
CPUINFO = Path("/proc/cpuinfo")
IDENTITY = ("model name", "stepping", "microcode", "flags")  # of /proc/cpuinfo: what the outcome may depend on
PATIENCE = 120.0  # seconds for a child that imports torch; a machine may be busy
PATIENCE_FORKED = 20.0  # seconds for one that has it
TRIAL = Path(__file__)  # run as a program, this file multiplies once
WORDS = {"works": True, "dies": False}  # the outcome on disk


def guard_bf16() -> str:
    """Keep oneDNN from AMX code that would end this process, and say in a few words what was found."""
    limits = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if limits:
        return f"oneDNN limited by {limits[0]}"
    processor = read_processor(CPUINFO)
    if "amx_tile" not in processor.get("flags", "").split():
        return "this processor shows no AMX"
    if amx_works(processor):
        return "AMX works"
    os.environ[VARIABLES[0]] = WITHOUT_AMX
    if "torch" not in sys.modules or survives_in_fork():
        return f"AMX code dies here: oneDNN limited by {VARIABLES[0]}={WITHOUT_AMX}"
    _switch_off()
    return "AMX code dies here: oneDNN switched off"


def read_processor(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first processor in a file like /proc/cpuinfo; none where there is no such file."""
    fields: dict[str, str] = {}
    with suppress(OSError), cpuinfo.open() as lines:
        for line in lines:
            if not line.strip():
                break
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields


def amx_works(processor: dict[str, str]) -> bool:
    """Whether a bf16 product lives on this `processor`: as remembered, or as tried now.

    A trial that could not be made is no evidence: it counts as working, is not remembered, and is warned of.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:  # no torch, no product
        return True
    version = Path(torch.origin).with_name("version.py").read_text()
    about = [*(processor.get(name, "") for name in IDENTITY), platform.release(), version]
    name = f"bf16-{hashlib.blake2b(repr(about).encode(), digest_size=12).hexdigest()}"
    folder = own_folder()
    works = _recall(folder / name) if folder else None
    if works is not None:
        return works
    works, why = survives_in_child({k: v for k, v in os.environ.items() if k not in VARIABLES})
    if works is None:
        warnings.warn(f"could not try bf16 products on this processor: {why}", RuntimeWarning, stacklevel=4)
        return True
    if folder:
        _keep(folder / name, works)
    return works


def survives_in_child(environment: dict[str, str]) -> tuple[bool | None, str]:
    """Multiply in a new process with this `environment`: lived, died of SIGILL, or None (and why) for anything else."""
    environment = {**environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", TRIAL], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode in (-signal.SIGILL, 128 + signal.SIGILL):  # the second where `python` is a shell's script
        return False, "illegal instruction"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return (True, "") if done.returncode == 0 else (None, said[-1] if said else f"status {done.returncode}")


def survives_in_fork() -> bool:
    """Multiply in a fork of this process, which has all that oneDNN has settled here; False where it does not end."""
    with warnings.catch_warnings():  # of threads, which the fork does not need
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            leave_no_trace()
            multiply()
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + PATIENCE_FORKED
    while time.monotonic() < until:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def leave_no_trace() -> None:
    """In a child that may die: no core file, no report on the terminal."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def multiply() -> None:
    """The trial: one product, on one thread (OpenMP's others do not follow into a fork)."""
    import torch

    torch.set_num_threads(1)
    torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64, dtype=torch.bfloat16))


def _switch_off() -> None:
    sys.modules["torch"].backends.mkldnn.enabled = False
    warnings.warn(
        "bf16 products crash on this processor (SIGILL in oneDNN's AMX code), and torch used oneDNN before thinwire "
        f"was imported: oneDNN is switched off, and products are slower. Import thinwire first, or {REMEDY}",
        RuntimeWarning,
        stacklevel=4,
    )


def own_folder() -> Path | None:
    """Where outcomes are kept: a folder that nobody else can read or write. None where there can be none."""
    home = Path(os.path.expanduser("~")) / ".cache" / "thinwire" / "processor"
    for folder in (home, Path(tempfile.gettempdir()) / f"thinwire-processor-{os.getuid()}"):
        with suppress(OSError):  # cannot be made: the next
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077:
                return folder
    return None


def _recall(path: Path) -> bool | None:
    """The outcome in a file of one word; None where there is none, or where it is something else."""
    with suppress(OSError, UnicodeDecodeError):
        return WORDS.get(path.read_text().strip())
    return None


def _keep(path: Path, works: bool) -> None:
    """Whole or not at all. What cannot be written is tried again by the next process."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        fresh.write_text("works\n" if works else "dies\n")
        fresh.replace(path)


if __name__ == "__main__":
    leave_no_trace()
    multiply()
