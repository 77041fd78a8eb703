"""The connections between the members of a quorum: one between every two."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.members import Members, Message
from thinwire.elastic.fetching import read_line
from thinwire.elastic.line import Line, Receipt

MEETING = 2  # members that were told of a quorum connect within the time-out divided by this


class Mesh(Members):
    """store: where the members of this quorum, and no others, tell each other their addresses. rank, size: of this
    member in it. host: its own address. timeout: seconds until a member that is silent is given up; one that does not
    come is after half of them, since all were told at the same time.

    RuntimeError or OSError where one of them cannot be reached.
    """

    backends = "sockets"

    def __init__(self, store: dist.Store, rank: int, size: int, host: str, timeout: float) -> None:
        self.size, self.rank = size, rank
        self.lines: dict[int, Line] = {}
        try:
            for peer, connection in _connect(store, rank, size, host, timeout):
                self.lines[peer] = Line(connection, f"member {peer}", timeout)
        except BaseException:
            self.abort()
            raise

    def world(self) -> tuple[int, int]:
        return self.size, self.rank

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        receipt = Receipt(self.lines[peer], x, _bytes(x), leaves=True)
        receipt.line.send(receipt, tag)
        return cast(dist.Work, receipt)

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        held = _bytes(x) if x.device.type == "cpu" else torch.empty(x.nbytes, dtype=torch.uint8)
        receipt = Receipt(self.lines[peer], x, held, leaves=False)
        receipt.line.receive(receipt, tag)
        return cast(dist.Work, receipt)

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        return [self.irecv(x, peer) for x, peer in receives] + [self.isend(x, peer) for x, peer in sends]

    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        out[self.rank].copy_(x)
        self._exchange([(place, peer) for peer, place in enumerate(out)], [(x, peer) for peer in range(self.size)])

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Every member adds up a part of the values, in rank order, so that all have the same bits."""
        parts = [part.contiguous() for part in x.reshape(-1).tensor_split(self.size)]
        found = [torch.empty_like(parts[self.rank]) for _ in range(self.size)]
        found[self.rank].copy_(parts[self.rank])
        self._exchange([(place, peer) for peer, place in enumerate(found)], [(p, j) for j, p in enumerate(parts)])
        total = found[0]
        for other in found[1:]:
            total = torch.maximum(total, other) if op == dist.ReduceOp.MAX else total + other
        parts[self.rank] = total
        self._exchange([(p, j) for j, p in enumerate(parts)], [(total, peer) for peer in range(self.size)])
        x.copy_(torch.cat(parts).view_as(x))

    def broadcast(self, x: Tensor, source: int) -> None:
        if self.rank == source:
            self._exchange([], [(x, peer) for peer in range(self.size)])
        else:
            self.irecv(x, source).wait()

    def _exchange(self, receives: list[Message], sends: list[Message]) -> None:
        """Those of and to others."""
        there = ([(x, peer) for x, peer in found if peer != self.rank] for found in (receives, sends))
        for work in self.post(*there):
            work.wait()

    def abort(self) -> None:
        """Break all connections: whoever waits, here or at another end, stops waiting."""
        for line in self.lines.values():
            line.end("the connections to the other members were closed in this step")

    def close(self) -> None:
        """Leave, when all that was sent here has arrived; what was sent from here still does."""
        for line in self.lines.values():
            line.end("this member has left", lets_finish=True)


def _bytes(x: Tensor) -> Tensor:
    """Of x: its own memory where it is on the host, else a copy."""
    flat = x.detach().reshape(-1).cpu()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _connect(
    store: dist.Store, rank: int, size: int, host: str, timeout: float
) -> list[tuple[int, socket.socket]]:  # fmt: skip
    """A connection to every other member: to those of lower rank from here, from the others to here."""
    if size == 1:
        return []
    deadline = time.monotonic() + timeout / MEETING
    found: list[tuple[int, socket.socket]] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family, backlog=size) as listener:
            token = secrets.token_hex(16)
            store.set(f"thinwire/{rank}", json.dumps([host, listener.getsockname()[1], token]))
            for peer in range(rank):
                found.append((peer, _call(store, peer, rank, deadline)))
            expected = set(range(rank + 1, size))
            while expected:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = listener.accept()
                peer = _answered(connection, token, deadline)
                if peer in expected:
                    expected.discard(peer)
                    found.append((peer, connection))
                else:
                    connection.close()
    except BaseException:
        for _, connection in found:
            connection.close()
        raise
    return found


def _call(store: dist.Store, peer: int, rank: int, deadline: float) -> socket.socket:
    """Connect to a member, and say who calls."""
    store.wait([f"thinwire/{peer}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    host, port, token = json.loads(store.get(f"thinwire/{peer}"))
    connection = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
    connection.sendall(json.dumps({"token": token, "rank": rank}).encode() + b"\n")
    return connection


def _answered(connection: socket.socket, token: str, deadline: float) -> int:
    """Who called; −1: somebody who does not know the token."""
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        said = json.loads(read_line(connection))
        return int(said["rank"]) if secrets.compare_digest(str(said["token"]), token) else -1
    except (OSError, ValueError, KeyError, TypeError):
        return -1
