"""`thinwire bench link --rates …`: does an emulated link do what it says? Raw TCP, Gloo all-reduce, Gloo send."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from thinwire.bench.link.options import read_rates
from thinwire.lab.network import Network
from thinwire.quantities import parse_time, show_bytes, show_rate
from thinwire.terminal import progress, table, write_json

SMALLEST = 1_000_000  # bytes; below, what TCP and the rank's start cost would show
PORT = 5001
LIMIT = 120.0  # seconds for one transfer
_WELCOME = b"ready"


def run(args: argparse.Namespace) -> int:
    """Measure at every one of `args.rates`; the exit status."""
    rates = read_rates(args.rates)
    seconds = parse_time(args.seconds, "seconds")
    tests: dict[str, Callable[[int], float]] = {
        "raw TCP": tcp,
        "Gloo all-reduce": gloo_all_reduce,
        "Gloo send": gloo_send,
    }
    rows: list[dict[str, Any]] = []
    with (
        Network(hosts=2, latency=args.latency, preload=("torch.distributed",)) as net,
        progress("link", len(rates) * len(tests)) as advance,
    ):
        for rate in rates:
            for host in net.hosts:
                net.set_rate(host.name, rate)
            size = max(SMALLEST, round(rate / 8 * seconds))
            for name, function in tests.items():
                rows.append(measure(net, name, function, rate, size))
                advance(f"{name} at {show_rate(rate)}", 1)
    _show(rows, args.latency)
    write_json(args.json, {"latency": args.latency, "delay": net.delay, "rows": rows})
    return 0


def measure(net: Network, name: str, function: Callable[[int], float], rate: float, size: int) -> dict[str, Any]:
    """One transfer of `size` bytes from host 0 to host 1 of `net` (the all-reduce: as much each way, at once).

    `name`: in the table. `function`: what both ranks run, given the size; their seconds. `rate`: nominal, in bit/s."""
    results = net.run(function, size, timeout=LIMIT)
    seconds = max(results)
    sent = results.traffic[net.hosts[0].name].sent
    return {
        "test": name,
        "rate": rate,
        "payload": size,
        "seconds": seconds,
        "measured": size * 8 / seconds,
        "of_nominal": size * 8 / seconds / rate,
        "counted": sent,
        "counted_of_payload": sent / size,
    }


def tcp(size: int) -> float:
    """Rank 0 sends `size` bytes to rank 1 by one connection; each returns its seconds."""
    address = (os.environ["MASTER_ADDR"], PORT)
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            server.settimeout(LIMIT)
            peer, _ = server.accept()
        with peer:
            peer.settimeout(LIMIT)
            peer.recv(len(_WELCOME))
            began = time.perf_counter()
            peer.sendall(bytes(size))
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # the other side's end: all has arrived
            return time.perf_counter() - began
    return _receive(address, size)


def _receive(address: tuple[str, int], size: int) -> float:
    with connect(address) as peer:
        peer.sendall(_WELCOME)
        began, left, buffer = time.perf_counter(), size, bytearray(1 << 20)
        while left:
            count = peer.recv_into(buffer)
            if not count:
                raise ConnectionError(f"the sender stopped {left} bytes early")
            left -= count
        return time.perf_counter() - began


def connect(address: tuple[str, int]) -> socket.socket:
    """A connection to `address`, tried for a while: the other rank may be a moment behind."""
    until = time.monotonic() + 10.0
    while True:
        try:
            return socket.create_connection(address, LIMIT)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def gloo_all_reduce(size: int) -> float:
    """Two ranks reduce `size` bytes: each sends and receives 2 (P − 1)/P = 1 times that."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(size // 4)
    with _Group():
        began = time.perf_counter()
        dist.all_reduce(tensor)
        return time.perf_counter() - began


def gloo_send(size: int) -> float:
    """Rank 0 sends `size` bytes to rank 1."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(size, dtype=torch.uint8)
    with _Group():
        began = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        return time.perf_counter() - began


class _Group:
    """A Gloo group whose connections are up, and which all leave together."""

    def __enter__(self) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
        dist.barrier()

    def __exit__(self, *failure: object) -> None:
        import torch.distributed as dist

        if failure[0] is None:
            dist.barrier()
        dist.destroy_process_group()


def _show(rows: list[dict[str, Any]], latency: str) -> None:
    cells = [
        (
            show_rate(row["rate"]),
            row["test"],
            show_bytes(row["payload"]),
            f"{row['seconds']:.2f}",
            f"{row['measured'] / 1e6:.2f}",
            f"{100 * row['of_nominal']:.1f} %",
            f"{100 * (row['counted_of_payload'] - 1):+.2f} %",
        )
        for row in rows
    ]
    columns = ("nominal", "test", "payload", "seconds", "Mb/s", "of nominal", "counted − payload")
    caption = "payload only; the rate itself includes 66 bytes of headers in every 1514, so 95.6 % is full"
    table(f"Two hosts, latency {latency}", columns, cells, caption)
