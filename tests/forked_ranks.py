"""Scripts on ranks of this machine, with the variables that torchrun sets; the ranks are forked from one process.

    python tests/forked_ranks.py '[["examples/three_d.py", 4, ["--wire", "off"]], …]'   # JSON: what each script printed

torchrun, and every rank that it starts, import torch and scikit-learn anew, which takes longer than the examples run.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

Program = tuple[str, int, Sequence[str]]  # a script, its ranks, its words


def printed(*programs: Program, timeout: float = 200.0) -> list[str]:
    """What all ranks of each script print; an error where a rank fails."""
    command = [sys.executable, __file__, json.dumps(programs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout)
    return found


def _run(script: str, ranks: int, words: Sequence[str]) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryFile() as out:
        port = free.getsockname()[1]
        free.close()
        running = {_fork(script, words, rank, ranks, port, out.fileno()) for rank in range(ranks)}
        while running:
            process, status = os.wait()
            running.discard(process)
            if status:
                for other in running:
                    os.kill(other, signal.SIGKILL)
                sys.exit(f"{script}: a rank ended with {os.waitstatus_to_exitcode(status)}")
        out.seek(0)
        return out.read().decode()


def _fork(script: str, words: Sequence[str], rank: int, ranks: int, port: int, out: int) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.dup2(out, 1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        sys.argv, sys.path[0] = [script, *words], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    import sklearn.datasets  # noqa: F401
    import warm  # noqa: F401

    print(json.dumps([_run(*program) for program in json.loads(sys.argv[1])]))
