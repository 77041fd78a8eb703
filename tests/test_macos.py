"""macOS: what needs no namespaces of Linux imports and runs. There is no Mac here, so Python is told that it is one:
what only Linux has is taken out of the standard library, and /proc and /sys are not there."""

from __future__ import annotations

import subprocess
import sys

PRETEND = """
import fcntl, os, select, signal, socket, sys
import numba, torch, torch.distributed.fsdp, torch.distributed.pipelining  # as they are here

ONLY_LINUX = {
    os: ("sched_getaffinity sched_setaffinity sched_setscheduler pidfd_open setns unshare memfd_create eventfd splice "
         "posix_fadvise posix_fallocate copy_file_range getrandom O_DIRECT O_PATH"),
    select: "epoll",
    signal: "pidfd_send_signal sigtimedwait SIGPWR",
    socket: ("AF_NETLINK AF_PACKET AF_ALG TCP_INFO TCP_CONGESTION TCP_USER_TIMEOUT TCP_QUICKACK SO_BINDTODEVICE "
             "SOCK_CLOEXEC SOCK_NONBLOCK SO_DOMAIN SO_PROTOCOL"),
    fcntl: "F_SETPIPE_SZ F_ADD_SEALS F_OFD_SETLK",
}
for module, names in ONLY_LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)


def refuse(event, values):
    if event in ("open", "os.listdir", "os.scandir") and str(values[0]).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(values[0])


sys.addaudithook(refuse)
sys.platform = "darwin"
"""
TRY = """
import importlib, pkgutil, tempfile
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import thinwire as tw

for module in pkgutil.walk_packages(tw.__path__, "thinwire."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

torch.set_num_threads(2)
from thinwire.doctor.command import check_numba
finding, = check_numba()
assert finding.ok and "one thread" in finding.detail, finding

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(8, 8))
    handle = tw.parallel.compress_ddp(model, "max")
    model(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()

from thinwire.cli import main
assert main(["lab", "run", "--hosts", "2", "--", "true"]) != 0
print("ran to its end")
"""


def test_what_needs_no_namespaces_runs() -> None:
    done = subprocess.run([sys.executable, "-c", PRETEND + TRY], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("ran to its end"), done.stderr[-2000:]
    assert "the lab needs Linux network namespaces; this is darwin" in done.stderr
