"""`thinwire doctor`: what this machine can do, found by trying, and what to do where it cannot.

A missing optional part is not a failure: the exit status is 1 only where the library itself would not work.
With `--listen` and `--peers` it looks at the way to other machines instead (peers.py).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict

import thinwire
from thinwire import cpu_features
from thinwire.doctor import peers as doctor_peers
from thinwire.doctor.pipeline import check_pipeline
from thinwire.installed import ADAPTERS, MODELS, THEORY, missing, remedy
from thinwire.lab.probe import Finding
from thinwire.lab.probe import check as check_lab
from thinwire.terminal import progress, table, write_json
from thinwire.torch_private.versions import RANGE, REQUIREMENT, is_tried


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire doctor`."""
    parser.add_argument("--json", metavar="PATH", help="write the findings to PATH")
    doctor_peers.configure(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire doctor` as `args` says; the exit status."""
    if args.peers or args.listen:
        return doctor_peers.run(args)
    findings: list[Finding] = []
    with progress("doctor", len(CHECKS)) as advance:
        for check in CHECKS:
            findings += check()
            advance(findings[-1].name, 1)
    marks = {True: "yes", False: "no"}
    rows = [[f.name, "MISSING" if f.needed and not f.ok else marks[f.ok], f.detail, f.remedy] for f in findings]
    table("What this machine can do", ["part", "works", "detail", "what to do"], rows)
    write_json(args.json, [asdict(f) for f in findings])
    return 1 if any(f.needed and not f.ok for f in findings) else 0


def check_python() -> list[Finding]:
    """The version of Python."""
    ok = sys.version_info >= (3, 11)
    remedy = "" if ok else "install Python 3.11 or later"
    return [Finding("python", ok, f"{platform.python_version()}, {os.cpu_count()} cores", remedy, needed=True)]


def check_torch() -> list[Finding]:
    """The version of torch, its backends, and a GPU."""
    import torch
    import torch.distributed as dist

    tried = is_tried(torch.__version__)
    detail = f"{torch.__version__}, {'one' if tried else 'none'} of the versions that work, {RANGE}"
    backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    card = torch.cuda.get_device_name(0) if gpus else "none visible"
    return [
        Finding("torch", tried, detail, "" if tried else f"pip install '{REQUIREMENT}'", needed=True),
        Finding("backends", bool(backends), ", ".join(backends) or "none",
                "" if backends else "this torch has no torch.distributed: install an official build", needed=True),
        Finding("gpu", gpus > 0, f"{gpus} × {card}" if gpus else card,
                "" if gpus else "not needed: everything runs on CPUs over Gloo; NCCL and Triton need a CUDA build"),
    ]  # fmt: skip


def check_bf16() -> list[Finding]:
    """A product in a child process, with the limits that this process has: some processors' AMX dies of it."""
    lived, why = cpu_features.survives_in_child(dict(os.environ))
    if lived:
        return [Finding("bf16 on the CPU", True, thinwire.bf16_guard)]
    return [Finding("bf16 on the CPU", False, f"{why[:80]}; {thinwire.bf16_guard}", cpu_features.REMEDY)]


def check_gloo() -> list[Finding]:
    """A process group of one on loopback: does Gloo find an interface and resolve this host?"""
    import torch
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return [Finding("gloo", False, "not in this torch", "install an official build of torch")]
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            dist.all_reduce(torch.ones(4))
            dist.destroy_process_group()
        return [Finding("gloo", True, "a group of one reduced")]
    except RuntimeError as error:
        remedy = "set GLOO_SOCKET_IFNAME to the interface that reaches the other machines (ip addr lists them)"
        return [Finding("gloo", False, str(error).splitlines()[0][:80], remedy)]


def check_numba() -> list[Finding]:
    """A compiled kernel beside its reference, bit for bit."""
    try:
        import numba
        import torch

        from thinwire.kernels import quantize
        from thinwire.kernels.cpu.compile import CACHE_DIRECTORY, kernel_threads

        x = torch.linspace(-1, 1, 200_000)  # enough for several threads
        same = torch.equal(quantize.quantize(x, 4, 128, impl="cpu"), quantize.quantize(x, 4, 128, impl="reference"))
        layer = f"{numba.threading_layer()} threads" if kernel_threads() > 1 else "one thread"
    except (ImportError, ValueError, OSError) as error:
        remedy = "pip install numba; on Linux the OpenMP layer needs libgomp (apt install libgomp1)"
        return [Finding("numba", False, str(error).splitlines()[0][:80], remedy, needed=True)]
    detail = f"{numba.__version__}, {layer}, kernels kept in {_short(CACHE_DIRECTORY)}"
    remedy = "" if same else "the compiled kernel gives other bits than the reference: please report this"
    return [Finding("numba", same, detail, remedy, needed=True)]


def check_triton() -> list[Finding]:
    """Whether Triton is there, and for what."""
    import torch

    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        return [Finding("triton", False, "not installed", "needed on GPUs only: it comes with CUDA builds of torch")]
    where = "compiles for the GPU" if torch.cuda.is_available() else "no GPU: its kernels run in the interpreter only"
    return [Finding("triton", True, f"{version}, {where}")]


def check_train() -> list[Finding]:
    """What `thinwire train` needs."""
    lacking = missing(MODELS + ADAPTERS)
    detail = f"{', '.join(lacking)} not installed" if lacking else "transformers, safetensors, peft"
    todo = f"for `thinwire train` and `thinwire demo` only: {remedy('train')}" if lacking else ""
    return [Finding("training", not lacking, detail, todo)]


def check_theory() -> list[Finding]:
    """What figures and the theory bench need."""
    lacking = missing(THEORY)
    detail = f"{', '.join(lacking)} not installed" if lacking else "scikit-learn, matplotlib"
    todo = f"for figures, `thinwire convex` and the examples only: {remedy('theory')}" if lacking else ""
    return [Finding("figures, data sets", not lacking, detail, todo)]


def check_optional() -> list[Finding]:
    """Rivals that `thinwire bench codecs` measures beside ours."""
    out = []
    for module, package in (("piquant", "pypiquant"), ("bitsandbytes", "bitsandbytes")):
        found = importlib.util.find_spec(module) is not None
        remedy = "" if found else f"for `thinwire bench codecs` only: pip install {package}"
        out.append(Finding(package, found, "installed" if found else "not installed", remedy))
    return out


def _short(folder: str) -> str:
    """A folder's last parts: enough to recognise it."""
    parts = folder.split(os.sep)
    return os.sep.join(["…", *parts[-3:]]) if len(parts) > 4 else folder


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python, check_torch, check_bf16, check_gloo, check_pipeline, check_numba, check_triton, check_train,
    check_theory, check_lab,
    check_optional,
)  # fmt: skip
