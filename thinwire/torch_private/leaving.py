"""Leaving Python while threads of Gloo still let go of tensors.

Gloo's threads drop the tensors of their last collective a little after the rank that waited for it goes on. Each tensor
that Python knows needs the interpreter for that. Where the interpreter is being left by then, it ends the thread in the
midst of C++ code, and the process aborts: "terminate called without an active exception". torch.distributed has this
with and without thinwire, the more often the busier the machine is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

THREADS = "pt_gloo_runloop"  # the name that torch gives them
TASKS = Path("/proc/self/task")
LONGEST = 2.0  # seconds; a thread that runs for longer does not end by itself
PAUSE = 0.005  # seconds, in which a thread that waits for the interpreter gets it


def wait_for_gloo() -> None:
    """Return when no thread of Gloo has run for two looks, so none holds a tensor of a collective that has ended."""
    deadline = time.monotonic() + LONGEST
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(PAUSE)
        quiet = 0 if _is_running() else quiet + 1


def _is_running() -> bool:
    """Does a thread of Gloo compute, or want to?

    Where that cannot be read (no /proc, no descriptor left) nothing is known, and the pauses must do.
    """
    try:
        tasks = os.listdir(TASKS)
    except OSError:
        return False
    for task in tasks:
        try:
            name, _, rest = (TASKS / task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has just ended
            continue
        if name == THREADS and rest.split()[0] in "RD":
            return True
    return False
