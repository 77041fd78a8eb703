"""One rank of a run from start to end: join the others, train, leave; if another rank is lost, the error names it."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import RunFailed, UsageError
from thinwire.terminal import progress
from thinwire.torch_private.groups import default_store
from thinwire.train.build import check
from thinwire.train.checkpoint import refuse_second_run
from thinwire.train.config.sections import TrainConfig
from thinwire.train.loop import Trainer
from thinwire.train.mesh import SITE_PATIENCE
from thinwire.train.metrics import METRICS, read_events
from thinwire.train.show import closing, describe

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # on a card, what is small and on the host still takes Gloo
MOST_SOCKETS = 8  # of one of NCCL's threads
BEAT = 1.0  # seconds between heartbeats
SILENCE = 5.0  # seconds without one after which a rank counts as lost


def train_rank(
    config: TrainConfig,
    resume: bool,
    *,
    local_rank: int = 0,
    alone: bool = False,
    patience: float = 120.0,
    rate: float | None = None,
    show: bool = True,
) -> int:
    """Train as this rank of torchrun's (or the lab's) world; returns 0. RunFailed, in one line, where the run cannot
    go on: another rank was lost, or a disk is full.

    resume: go on from the newest checkpoint.
    local_rank: this rank's number on its machine.
    alone: there is no other rank, and no variables of torchrun.
    patience: seconds that this rank waits for the others of its site; for other sites SITE_PATIENCE times as long.
    rate: of the links in bit/s, where it is known; it is only recorded.
    show: print progress on rank 0, and at the end what was sent and saved.
    """
    try:
        checked = check(config)
    except OSError as error:
        raise RunFailed(f"{error.filename or 'reading what the run needs'}: {error.strerror or error}") from error
    if config.run.device == "cuda":
        take_card(local_rank)
        for name, value in nccl_flows(config.wire.get("streams", 1)).items():
            os.environ.setdefault(name, value)
    longest = patience * (SITE_PATIENCE if config.mesh.sites > 1 else 1)
    _make_group(BACKENDS[config.run.device], alone, timedelta(seconds=longest))
    heartbeat = Heartbeat()
    try:
        trainer = Trainer(config, resume=resume, local_rank=local_rank, say=_say, rate=rate, checked=checked)
        if show and trainer.rank == 0:
            _fit_shown(trainer)
        else:
            trainer.fit()
    except RunFailed:
        raise
    except (RuntimeError, OSError, MemoryError) as error:
        reason = _reason(error, config.run.out, heartbeat)
        if reason is None:
            raise
        raise RunFailed(reason) from error
    finally:
        heartbeat.close()
    dist.destroy_process_group()
    return 0


def _make_group(backend: str, alone: bool, limit: timedelta) -> None:
    """The default process group: of this rank alone, or the one that torchrun's variables describe."""
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    else:
        join(backend, limit)


def _reason(error: Exception, out: str, heartbeat: Heartbeat) -> str | None:
    """One line for an error that is not the program's own fault: a disk, memory, a lost rank; None for any other."""
    rank = dist.get_rank()
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        where = error.filename or out
        return f"rank {rank}: {os.fsdecode(where) if isinstance(where, bytes) else where}: {error.strerror}"
    if _is_out_of_memory(error):
        return f"rank {rank} is out of memory: {text}"
    lost = heartbeat.lost()
    if lost:
        return f"lost rank {', '.join(map(str, lost))}: {text}"
    return f"rank {rank} lost its connections: {text}" if is_broken_connection(error) else None


def _is_out_of_memory(error: Exception) -> bool:
    """On a card torch has an exception for it; its allocator on the CPU says so in a RuntimeError's text."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def is_broken_connection(error: Exception) -> bool:
    """Gloo and the store report it by RuntimeErrors with one of these texts; errors of the program have none."""
    text = str(error).lower()
    known = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout")
    return isinstance(error, (ConnectionError, dist.DistNetworkError)) or any(words in text for words in known)


def _fit_shown(trainer: Trainer) -> None:
    """Train with a bar, or a line every few seconds."""
    with progress("train", trainer.steps, trainer.step) as advance:

        def show(event: dict[str, Any]) -> None:
            if event["kind"] in ("step", "eval"):
                advance(describe(event), int(event["kind"] == "step"))

        trainer.on_event = show
        trainer.fit()
    if trainer.step == trainer.steps:
        _say(closing(trainer.config.run.out, read_events(trainer.out / METRICS)))


def join(backend: str, limit: timedelta) -> None:
    """Join the process group that torchrun's variables describe; `limit`: how long this rank waits for the others.

    After a restart by torchrun the store that its agent keeps still holds the last attempt's addresses. A rank that
    reads them before the others have written new ones would connect to ranks that have ended. So every attempt has keys
    of its own. Agents of several machines count attempts differently; there only a store of the ranks' own is new at
    every attempt.
    """
    variable = os.environ.get
    attempts = int(variable("TORCHELASTIC_MAX_RESTARTS", "0"))
    if variable("TORCHELASTIC_USE_AGENT_STORE") != "True" or attempts == 0:
        try:
            dist.init_process_group(backend, timeout=limit)
        except (RuntimeError, OSError) as error:  # a port in use, nobody there, some never came, no descriptors left
            place = f"{variable('MASTER_ADDR')}:{variable('MASTER_PORT')}"
            reason = str(error).splitlines()[0]
            raise UsageError(f"rank {variable('RANK')} cannot meet the others at {place}: {reason}") from None
        return
    if variable("GROUP_WORLD_SIZE") != "1":
        raise UsageError(
            f"torchrun --max-restarts {attempts} on several machines would hand restarted ranks the addresses of dead "
            "ones: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, with --rdzv-backend c10d, or restart by hand"
        )
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    names = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=names, rank=rank, world_size=size, timeout=limit)


def nccl_flows(streams: object) -> dict[str, str]:
    """NCCL's own settings for at least so many flows, read when its groups are made; none for 1 and "auto"."""
    if not isinstance(streams, int) or streams == 1:
        return {}
    threads = math.ceil(streams / MOST_SOCKETS)
    return {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(math.ceil(streams / threads))}


def take_card(local_rank: int) -> None:
    """Choose this rank's GPU; with fewer GPUs than ranks they are shared (NCCL then needs NCCL_HOSTID set).

    torch's own kernels are loaded now, unless the user says otherwise: one that is loaded in a step waits for kernels
    of NCCL, which wait for another rank (kernels/gpu/launch.py).
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if not torch.cuda.is_available():
        raise UsageError('[run] device = "cuda": torch sees no CUDA device here; allowed is cpu')
    torch.cuda.set_device(local_rank % torch.cuda.device_count())


class Heartbeat:
    """Every rank increments a counter in the rendezvous store once per second; a rank whose counter stops is lost."""

    def __init__(self) -> None:
        self.store: Any = dist.PrefixStore("thinwire/alive", default_store())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def lost(self) -> list[int]:
        """Ranks whose counter has not changed for SILENCE seconds; rank 0, which holds the store, where the store does
        not answer.

        The store is read in a thread that is waited for a limited time: a store behind a dead link blocks.
        """
        answers: list[list[int]] = []
        asking = threading.Thread(target=self._ask_twice, args=(answers,), daemon=True)
        asking.start()
        asking.join(3 * SILENCE)
        if len(answers) < 2:
            return [0] if self.rank else []
        before, after = answers
        return [rank for rank in range(self.size) if rank != self.rank and before[rank] == after[rank]]

    def _ask_twice(self, answers: list[list[int]]) -> None:
        with suppress(RuntimeError, ConnectionError):
            answers.append(self._counts())
            time.sleep(SILENCE)
            answers.append(self._counts())

    def close(self) -> None:
        self.stop.set()

    def _counts(self) -> list[int]:
        return [self.store.add(str(rank), 0) for rank in range(self.size)]

    def _beat(self) -> None:
        with suppress(RuntimeError, ConnectionError):  # the store is gone: the run is over
            while not self.stop.wait(BEAT):
                self.store.add(str(self.rank), 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def record(config: TrainConfig, given: str, resume: bool = False) -> None:
    """Write the configuration into the run's folder, as it was given (a copy of the file `given`) and as it was read.

    The folder exists already. One that holds another run is refused before anything in it is changed, unless `resume`.
    """
    out = Path(config.run.out)
    refuse_second_run(out, resume)
    if Path(given).resolve() != (out / "run.toml").resolve():
        shutil.copyfile(given, out / "run.toml")
    (out / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
