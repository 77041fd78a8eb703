"""What the lab's tests run in ranks: functions of a module, so that a rank can import them."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path


def whoami(greeting: str) -> dict[str, str]:
    print(f"{greeting} from {socket.gethostname()}")
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    return {name: os.environ[name] for name in (*names, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def fail_on(rank: int) -> None:
    """One rank fails with a last word; the others would sleep for minutes."""
    if os.environ["RANK"] == str(rank):
        print("about to fail")
        raise RuntimeError("no such luck")
    time.sleep(300)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def reach() -> dict[str, str]:
    """What a host can reach: nothing but its network. Each attempt's error, or "reached"."""
    outside = {
        "a public address": ("192.0.2.1", 80),
        "a private one": ("10.0.0.1", 80),
        "a test net": ("198.51.100.7", 53),
    }
    found = {"devices": ",".join(sorted(path.name for path in Path("/sys/class/net").iterdir()))}
    for name, address in outside.items():
        try:
            socket.create_connection(address, timeout=2.0).close()
            found[name] = "reached"
        except OSError as error:
            found[name] = type(error).__name__ + ": " + str(error)
    return found


def tcp_settings() -> dict[str, int]:
    """Each setting's last number: of the windows, what they may grow to."""
    names = ("tcp_rmem", "tcp_wmem", "tcp_slow_start_after_idle")
    return {name: int(Path("/proc/sys/net/ipv4", name).read_text().split()[-1]) for name in names}


def congestion_control() -> str:
    """What a new connection's TCP goes by."""
    with socket.socket() as one:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def connect_to(port: int) -> str:
    """Whether a port of the machine's own loopback can be reached from inside."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
        return "reached"
    except OSError as error:
        return type(error).__name__


def round_trip(count: int) -> float:
    """The shortest of some round trips between ranks 0 and 1, in seconds."""
    from thinwire.bench.link.accuracy import connect

    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], 5002)) as server:
            server.settimeout(20)
            peer, _ = server.accept()
            for _ in range(count):
                peer.sendall(peer.recv(1))
            return 0.0
    with connect((os.environ["MASTER_ADDR"], 5002)) as peer:
        peer.settimeout(20)
        best = float("inf")
        for _ in range(count):
            began = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            best = min(best, time.perf_counter() - began)
        return best


def whole_packet(size: int) -> int:
    """Bytes that arrive of a packet of the other rank's that must not be cut; 0 where the device refuses it."""
    other = ("host0" if os.environ["RANK"] == "1" else "host1", 5003)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.settimeout(0.2)
        port.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: never cut
        port.bind(("", 5003))
        for _ in range(50):  # until the other one is there
            try:
                port.sendto(bytes(size), other)
                came = len(port.recv(1 << 16))
                port.sendto(bytes(size), other)  # it may not have been there for the first
                return came
            except TimeoutError:
                continue
            except OSError as error:
                assert error.errno == errno.EMSGSIZE
                return 0
    raise TimeoutError(f"no packet of {size} bytes in ten seconds")


def all_reduce(numbers: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(numbers)
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor[-1])


def all_reduce_for_ever(numbers: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("ready")
    while True:
        dist.all_reduce(torch.ones(numbers))


def drip(manner: str) -> None:
    """Rank 0 sends to rank 1 for ever, by plain TCP; a stubborn one sleeps on errors."""
    from thinwire.bench.link.accuracy import connect

    address = (os.environ["MASTER_ADDR"], 5003)
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            peer, _ = server.accept()
            try:
                while True:
                    peer.sendall(bytes(1 << 16))
            except OSError:
                if manner != "stubborn":
                    raise
                time.sleep(300)
    with connect(address) as peer:
        while peer.recv(1 << 20):
            pass


def tcp_between(source: int, target: int, size: int) -> float:
    """One rank sends to another while the rest do nothing; the target returns its seconds."""
    from thinwire.bench.link.accuracy import connect

    rank, port = int(os.environ["RANK"]), 5004
    if rank == target:
        with socket.create_server(("", port)) as server:
            server.settimeout(20)
            peer, _ = server.accept()
        peer.settimeout(20)
        began, left = time.perf_counter(), size
        while left:
            left -= len(peer.recv(left))
        peer.sendall(b"x")
        return time.perf_counter() - began
    if rank == source:
        names = [line.split() for line in Path("/etc/hosts").read_text().splitlines()]
        address = f"10.77.0.{target + 1}"
        assert address in [words[0] for words in names]
        with connect((address, port)) as peer:
            peer.sendall(bytes(size))
            peer.recv(1)
    return 0.0


def everyone_greets_the_next() -> str:
    """A datagram from each host to the next; who greeted this one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as box:
        box.bind(("", 5005))
        box.settimeout(0.2)
        for _ in range(100):
            box.sendto(f"hello from {rank}".encode(), (f"host{(rank + 1) % world}", 5005))
            try:
                greeting = box.recv(100).decode()
            except TimeoutError:
                continue
            time.sleep(0.5)  # the next may not be listening yet
            box.sendto(f"hello from {rank}".encode(), (f"host{(rank + 1) % world}", 5005))
            return greeting
    raise TimeoutError("nobody greets me")
