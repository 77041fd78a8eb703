"""The live page beside something else: served by a thread of this process, told about on the terminal."""

from __future__ import annotations

import getpass
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from thinwire.watch.page import LivePage
from thinwire.watch.server import PageServer

POLL = 0.1  # seconds until a request to end is heeded
LAST_LOOK = 5.0  # seconds that a reader gets to see how the run ended


@contextmanager
def serving(folders: Sequence[Path], address: str = "127.0.0.1", port: int = 0) -> Iterator[PageServer]:
    """Serve the page about the runs in `folders` while the block runs, and print where.

    address, port: of this machine; port 0 takes any that is free."""
    server = PageServer(LivePage(folders), address, port)
    thread = Thread(target=server.serve_forever, args=(POLL,), daemon=True)
    thread.start()
    for line in told(server):
        print(line, file=sys.stderr, flush=True)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def beside(folders: Sequence[Path]) -> Iterator[None]:
    """Serve the page while a run goes on in the block; whoever looks sees the run's end before the page ends."""
    with serving(folders) as server:
        yield
        _wait_for_last_look(server.page)


def _wait_for_last_look(page: LivePage) -> None:
    """Until the parts are asked for once more, where they have been asked for at all."""
    asked, limit = page.asked, time.monotonic() + LAST_LOOK
    while asked and page.asked == asked and time.monotonic() < limit:
        time.sleep(POLL)


def told(server: PageServer) -> list[str]:
    """Where the page is, and how to reach it from elsewhere."""
    lines = [f"watch: {server.url}"]
    if server.bound.is_loopback:
        at, port = str(server.bound), server.server_port
        inside = f"[{at}]" if ":" in at else at
        lines.append(
            f"from another machine: ssh -N -L {port}:{inside}:{port} {getpass.getuser()}@{socket.gethostname()}, "
            "then the same address there"
        )
    else:
        lines.append("not encrypted: whoever sees this address on the network can read the page")
    return lines
