"""How far a reader has to go: the files that one gradient and one activation pass through, in order.

python benchmarks/refactor/walk.py                 # the main path of the two walks, file by file, and both counts
python benchmarks/refactor/walk.py --functions     # every function instead

Traced on real ranks (Gloo, the lab) in a step whose state is warm: the gradient on rank 0 of a DDP model of one unit,
from DDP's hook to the mean in its bucket; the activation from the first stage's send to the second stage's decoding
of it (stage.step's bracket included, torch's own files left out). A function counts once, where it is first entered: a
reader reads it once. A return is an entry into a file that had been left before. They are counted twice:

- every function: whatever is called, down to the look-up of a size or a key;
- the main path: without look-ups, which are functions in a file read before that call no other file. Their names and
  docstrings say what they give, and a reader goes on without opening them.

Neither is the count of the reader whose 47 returns (activation) and 24 (gradient) began this: that was made by hand.
"""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Entry:
    """A call into `function` of `file`; goes_on: into another file from there, directly or not."""

    file: str
    function: str
    goes_on: bool = False


class Tracer:
    """Calls into thinwire's own files while a block runs, by every thread started after it was made."""

    def __init__(self, package: Path) -> None:
        self.package, self.entries, self.on = str(package), list[Entry](), False
        self.calls = threading.local()  # .open: entries that have not returned, of this thread
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def __enter__(self) -> Tracer:
        self.entries, self.on = [], True
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False

    def _look(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if not self.on or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(self.package) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(self.package + "/")
        if file.startswith(("kernels/cpu/", "kernels/gpu/")):
            return
        callers: list[Entry] = self.calls.__dict__.setdefault("open", [])
        if event == "return":
            if callers:  # none, where it was called before the block
                callers.pop()
            return
        entry = Entry(file, code.co_qualname)
        for caller in callers:
            caller.goes_on |= caller.file != file
        callers.append(entry)
        self.entries.append(entry)


def gradient() -> list[Entry]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tracer = Tracer(Path(tw.__file__).parent)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    tw.parallel.compress_ddp(model, "max")
    for _ in range(3):
        loss = model(torch.randn(8, 64)).square().mean()
        with tracer:
            loss.backward()
    return tracer.entries


def activation() -> list[Entry]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import ScheduleGPipe

    import thinwire as tw

    dist.init_process_group("gloo")
    rank, tracer = dist.get_rank(), Tracer(Path(tw.__file__).parent)
    torch.manual_seed(rank)
    stage = tw.parallel.CompressedStage(nn.Linear(128, 128), rank, 2, torch.device("cpu"), wire="max")
    schedule = ScheduleGPipe(stage, 1, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 128)
    for _ in range(4):
        with tracer, stage.step(ids=[1, 2, 3, 4]):
            schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
    # of the two directions only forward: up to the first function of backward
    ends = [i for i, one in enumerate(tracer.entries) if "bwd" in one.function or "backward" in one.function]
    return tracer.entries[: ends[0] if ends else None]


def walk(entries: list[Entry], functions: bool) -> None:
    """Print the walk through these entries, and both counts; functions: the walk with every function."""
    goes_on = {(one.file, one.function) for one in entries if one.goes_on}
    every: list[tuple[str, list[str]]] = []  # (file, functions first entered there)
    main: list[str] = []  # files
    seen: set[tuple[str, str]] = set()
    for one in entries:
        place = (one.file, one.function)
        if place in seen:
            continue
        seen.add(place)
        if not every or every[-1][0] != one.file:
            every.append((one.file, []))
        every[-1][1].append(one.function)
        if (place in goes_on or one.file not in main) and main[-1:] != [one.file]:
            main.append(one.file)
    for file, names in every if functions else ():
        print(f"  {file}: {', '.join(names)}")
    for file in () if functions else main:
        print(f"  {file}")
    files = len(set(main))
    print(f"  every function: {files} files, {len(every) - files} returns, {len(seen)} functions")
    print(f"  the main path: {files} files, {len(main) - files} returns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="name the functions")
    options = parser.parse_args()
    from thinwire.lab import Network

    with Network(hosts=2) as net:
        print("a gradient")
        walk(net.run(gradient, timeout=100, echo=False)[0], options.functions)
        sender, receiver = net.run(activation, timeout=100, echo=False)
        print("an activation: the sender")
        walk(sender, options.functions)
        print("an activation: both ends")
        walk([*sender, *receiver], options.functions)


if __name__ == "__main__":
    main()
