"""A member is killed in the middle of a message: how long does the one who receives it wait?

    python benchmarks/data_parallel/elastic/mid_message.py [--times 5] [--timeout 5]

Two processes on loopback, one sends a message that takes about a second, and is killed after a tenth of it. Printed as
one line of JSON per kind of connection: seconds from the kill to the receiver's error, of every time. Gloo's are those
of its time-out; with ours (thinwire/elastic/line.py) it is what was still on its way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from thinwire.elastic.mesh import Mesh

NBYTES = 1 << 30


def connect(kind: str, port: int, rank: int, timeout: float) -> dist.ProcessGroupGloo | Mesh:
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))
    return Mesh(store, rank, 2, "127.0.0.1", timeout)


def send(kind: str, port: int, timeout: float) -> None:
    group, message = connect(kind, port, 1, timeout), torch.zeros(NBYTES, dtype=torch.uint8)
    (group.isend(message, 0) if isinstance(group, Mesh) else group.send([message], 0, 0)).wait()
    time.sleep(timeout)


def receive(kind: str, port: int, timeout: float, told: Connection) -> None:
    group, message = connect(kind, port, 0, timeout), torch.zeros(NBYTES, dtype=torch.uint8)
    work = group.irecv(message, 1) if isinstance(group, Mesh) else group.recv([message], 1, 0)
    told.send("receiving")
    try:
        work.wait()
        told.send(("it came whole", time.monotonic()))
    except RuntimeError as error:
        told.send((str(error), time.monotonic()))


def once(kind: str, timeout: float) -> float | None:
    """Seconds; None where the message was through before the kill."""
    processes = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here, there = processes.Pipe()
    receiver = processes.Process(target=receive, args=(kind, port, timeout, there))
    sender = processes.Process(target=send, args=(kind, port, timeout))
    receiver.start()
    sender.start()
    here.recv()
    time.sleep(0.1)
    assert sender.pid is not None
    os.kill(sender.pid, signal.SIGKILL)
    killed = time.monotonic()
    said, at = here.recv()
    for process in (sender, receiver):
        process.kill()
        process.join()
    return None if said == "it came whole" else at - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=5.0)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for kind in ("gloo", "thinwire"):
        seconds = [once(kind, options.timeout) for _ in range(options.times)]
        print(json.dumps({"kind": kind, "timeout": options.timeout, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
