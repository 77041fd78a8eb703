"""One launch per folder: a second one would delete the first one's metrics and write the same checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.errors import UsageError

NAME = "run.lock"


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold the folder of a run while the block runs; UsageError where another launch holds it.

    The lock is the kernel's (flock), so it is released when the process that holds it ends, in whatever way. The file
    contains host, process and time of the holder, for the message of the launch that is refused.
    """
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = os.open(out / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"[run] out = {str(folder)!r}: cannot write there: {error.strerror}") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{out} is in use by {_holder(out)}: wait for it, or take another [run] out") from None
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(about).encode() + b"\n", 0)
        yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def _holder(out: Path) -> str:
    try:
        about = json.loads((out / NAME).read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another launch"
