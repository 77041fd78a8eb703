"""The live page's server: Python's own http.server, since one reader on this machine is all it is for.

It only reads, and only what it was told at its start: an address is looked up in a table, never in the file system. Who
does not know the token in the address gets nothing, nor does a page of another site whose name was made to point here
(the Host header must be an address or this machine's name). Requests are bounded in size, time and number.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import json
import secrets
import socket
import socketserver
import sys
from collections.abc import Callable
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, BinaryIO

import thinwire.report
from thinwire.errors import UsageError
from thinwire.watch.page import LivePage

REQUEST = 16 * 1024  # bytes of a request, its headers included
SECONDS = 10.0  # that a connection may be silent
CONNECTIONS = 32  # at the same time
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Answer = tuple[str, bytes]  # its type and its body


class PageServer(ThreadingHTTPServer):
    """Serves `page` at `address` of this machine. `port`: 0 takes any that is free."""

    daemon_threads = True
    request_queue_size = CONNECTIONS
    block_on_close = False  # a browser that keeps a connection open does not hold up the end

    def __init__(self, page: LivePage, address: str = "127.0.0.1", port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(24)
        self.bound = _address(address)
        self.address_family = socket.AF_INET6 if self.bound.version == 6 else socket.AF_INET
        self.free = BoundedSemaphore(CONNECTIONS)
        self.files = _files()
        try:
            super().__init__((str(self.bound), port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot serve at {self.bound}, port {port}: {reason}; give another --port") from None

    @property
    def url(self) -> str:
        """The page's address, its token included."""
        host = str(self.bound) if not self.bound.is_unspecified else socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Without http.server's look-up of this machine's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.bound), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, unless too many are busy."""
        if not self.free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # this process has too many threads for now
            self.free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's work."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has left is no error; anything else is shown on the terminal."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def knows(self, host: str | None) -> bool:
        """Is that the Host header of somebody who means this machine?

        Any address is: names are what another site can make point here. Of names, localhost; and this machine's own
        where it serves others."""
        if host is None:
            return False
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if name.lower() == "localhost" or _is_address(name.strip("[]")):
            return True
        return not self.bound.is_loopback and name.lower() == socket.gethostname().lower()

    def answer(self, path: str) -> Answer | None:
        """What lies at that path under the token; None where nothing does."""
        makers: dict[str, Callable[[], Answer]] = {
            "": lambda: ("text/html; charset=utf-8", self.page.frame().encode()),
            "parts": lambda: ("application/json", json.dumps(self.page.parts()).encode()),
        }
        if path in makers:
            return makers[path]()
        if path.startswith("figure/"):
            picture = self.page.picture(path.removeprefix("figure/"))
            return None if picture is None else ("image/svg+xml", picture)
        return self.files.get(path)


class Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it."""

    server: PageServer
    timeout = SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Bounded(self.rfile)

    def do_GET(self) -> None:
        """The page, a part of it, or a refusal."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.knows(hosts[0]):
            self._send(403, "text/plain", b"This Host is not known here: use the address that was printed.\n")
            return
        token, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        right = hmac.compare_digest(token.encode(), self.server.token.encode())
        found = self.server.answer(path) if right and slash else None
        if found is None:
            self._send(404, "text/plain", b"Nothing here: use the whole address that was printed.\n")
        else:
            self._send(200, *found)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A request that cannot be read, or another method than GET and HEAD."""
        self.close_connection = True
        self._send(code, "text/plain", f"{code}\n".encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        headers = getattr(self, "headers", None)
        packs = headers is not None and "gzip" in headers.get("Accept-Encoding", "")
        data = gzip.compress(body, 5) if packs else body
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if packs:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        """Nothing about versions."""
        return "thinwire"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: their addresses hold the token."""


class _Bounded:
    """A request as http.server reads it, cut off after REQUEST bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.left = REQUEST

    def readline(self, size: int) -> bytes:
        if self.left <= 0:
            raise HTTPException(f"longer than {REQUEST} bytes")
        line = self.file.readline(min(size, self.left))
        self.left -= len(line)
        return line

    def close(self) -> None:
        self.file.close()

    @property
    def closed(self) -> bool:
        return self.file.closed


def _files() -> dict[str, Answer]:
    """The files of the page itself, read once."""
    here, report = Path(__file__).parent, Path(thinwire.report.__file__).parent
    style = (report / "page.css").read_bytes() + (here / "watch.css").read_bytes()
    return {
        "page.css": ("text/css; charset=utf-8", style),
        "watch.js": ("text/javascript; charset=utf-8", (here / "watch.js").read_bytes()),
    }


def _address(given: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address("127.0.0.1" if given == "localhost" else given)
    except ValueError:
        raise UsageError(
            f"--bind {given}: must be an address of this machine, such as 127.0.0.1, ::1 or 0.0.0.0 for all of them"
        ) from None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
