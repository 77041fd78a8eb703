"""examples/slurm.sh with stand-ins for Slurm's commands; the compose file as far as it can be read here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).parent.parent / "examples"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_slurm_starts_one_torchrun_per_machine(tmp_path):
    """What srun is given, word by word; the rest of the variables as torchrun finds them."""
    program(tmp_path / "scontrol", '[ "$*" = "show hostnames a[1-2]" ] && printf "a1\\na2\\n"')
    program(
        tmp_path / "srun", 'printf "%s\\n" "$@" "IF $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME" "OMP $OMP_NUM_THREADS"'
    )
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "123456", "SLURM_GPUS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "16", "IFACE": "wg0",
    }  # fmt: skip
    done = subprocess.run(
        [EXAMPLES / "slurm.sh", "train.py", "--name", "two words"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "--kill-on-bad-exit=1", "torchrun", "--nnodes", "2", "--nproc-per-node", "4",
        "--rdzv-backend", "c10d", "--rdzv-id", "123456", "--rdzv-endpoint", "a1:23456",
        "-m", "thinwire", "run", "--wire", "max", "train.py", "--name", "two words", "IF wg0 wg0", "OMP 4",
    ]  # fmt: skip


def test_compose_has_two_ranks_of_one_run():
    services = yaml.safe_load((EXAMPLES / "docker" / "compose.yaml").read_text())["services"]
    assert {name: one["environment"]["NODE"] for name, one in services.items()} == {"rank0": "0", "rank1": "1"}
    for one in services.values():
        assert one["environment"]["RATE"] == "20mbit" and "tbf rate $$RATE" in one["command"][-1]
        script = one["command"][-1].split()[-2]
        assert (EXAMPLES.parent / script).is_file() and (EXAMPLES.parent / one["build"]["dockerfile"]).is_file()
