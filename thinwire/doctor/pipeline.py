"""`thinwire doctor`'s own pipeline: two stages in two processes on loopback, everything compressed.

Torch's pipelining is an alpha of torch's, and its inside changes between minor versions: only a step that was run tells
that this torch and this thinwire go together. Run as a program (`python -m thinwire.doctor.pipeline FOLDER`) it is both
processes: it forks before anything is compiled, so torch is imported once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta

from thinwire.lab.probe import Finding

LIMIT = 60.0  # seconds, for both processes with their imports and compilations
ROWS, WIDTH, STEPS = 8, 256, 2  # of a batch, of an activation; the first step is cold, the second warm
NAME = "pipeline"
REMEDY = "pipelines do not work here; `python -m thinwire.doctor.pipeline $(mktemp -d)` shows the whole error"


def check_pipeline() -> list[Finding]:
    """A compressed pipeline of two stages, forward and backward, in at most LIMIT seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "thinwire.doctor.pipeline", folder]
        program = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        try:
            said, complaints = program.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
            return [
                Finding(NAME, False, f"not done after {LIMIT:.0f} s", f"try again on an idle machine, else {REMEDY}")
            ]
    if program.returncode:
        last = complaints.strip().splitlines()[-1:] or [f"status {program.returncode}"]
        return [Finding(NAME, False, last[0][:160], REMEDY, needed=True)]
    return [Finding(NAME, True, said.strip(), needed=True)]


def main(folder: str) -> int:
    """Both ranks; the exit status is 0 where both have trained."""
    from thinwire.parallel import CompressedStage  # noqa: F401  (imported once, before the fork)

    child = os.fork()
    if not child:
        status = 1
        try:
            _train(1, folder)
            status = 0
        finally:
            os._exit(status)
    detail = _train(0, folder)
    _, status = os.waitpid(child, 0)
    if status:
        print("the second stage's process failed", file=sys.stderr)
        return 1
    print(detail)
    return 0


def _train(rank: int, folder: str) -> str:
    """One rank's part; what was done, in words."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B

    from thinwire.pipeline.pipeline import Pipeline
    from thinwire.pipeline.stage import CompressedStage

    limit = timedelta(seconds=LIMIT / 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    torch.manual_seed(rank)
    module = torch.nn.Linear(WIDTH, WIDTH)
    stage = CompressedStage(module, rank, 2, torch.device("cpu"), wire="max")
    pipe = Pipeline([stage])
    schedule = Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    x = torch.randn(ROWS, WIDTH)
    for _ in range(STEPS):
        with pipe.step(ids=range(ROWS)):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x)
    stats = pipe.stats
    gradient = module.weight.grad
    if stats.skips or gradient is None or not gradient.isfinite().all() or not gradient.any():
        raise RuntimeError(f"rank {rank}: two steps left no usable gradient: {stats}")
    dist.destroy_process_group()
    sent = stats.forward_bytes + stats.backward_bytes
    return f"two stages, 1F1B, preset max: {STEPS} steps, {stats.raw_bytes / sent:.1f} times fewer bytes forward"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
