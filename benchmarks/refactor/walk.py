"""How far a reader has to go: the files that one gradient and one activation pass through, in order.

python benchmarks/refactor/walk.py                 # the two walks, file by file, and how often a file is returned to
python benchmarks/refactor/walk.py --functions     # with the functions

Traced on real ranks (Gloo, the lab) in a step whose state is warm: the gradient on rank 0 of a DDP model of one unit,
from DDP's hook to the mean in its bucket; the activation from the first stage's send to the second stage's decoding
of it (stage.step's bracket included, torch's own files left out). A function counts once, where it is first entered: a
reader reads it once. A return is an entry into a file that had been left before.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

Entry = tuple[float, str, str]  # when, file, function


class Tracer:
    """Calls into thinwire's own files while a block runs, by every thread started after it was made."""

    def __init__(self, package: Path) -> None:
        self.package, self.entries, self.on = str(package), list[Entry](), False
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def __enter__(self) -> Tracer:
        self.entries, self.on = [], True
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False

    def _look(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if not self.on or event != "call":
            return
        if code.co_filename.startswith(self.package) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(self.package + "/")
            if not file.startswith(("kernels/cpu/", "kernels/gpu/")):
                self.entries.append((time.monotonic(), file, code.co_qualname))


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
    ends = [i for i, (_, _, name) in enumerate(tracer.entries) if "bwd" in name or "backward" in name]
    return tracer.entries[: ends[0] if ends else None]


def walk(entries: list[Entry], functions: bool) -> None:
    seen: set[tuple[str, str]] = set()
    path: list[tuple[str, list[str]]] = []
    for _, file, name in entries:
        if (file, name) in seen:
            continue
        seen.add((file, name))
        if not path or path[-1][0] != file:
            path.append((file, []))
        path[-1][1].append(name)
    files = {file for file, _ in path}
    for file, names in path:
        print(f"  {file}" + (f": {', '.join(names)}" if functions else ""))
    print(f"  {len(files)} files, {len(path) - len(files)} returns, {len(seen)} functions")


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
