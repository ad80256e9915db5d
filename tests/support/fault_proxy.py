"""A HTTP proxy on loopback that forwards to a real server, and does to chosen requests what
networks and servers do: errors, lost, cut and changed replies, silence.

    with FaultProxy("http://127.0.0.1:8333") as proxy:
        proxy.inject(status(503), times=3, method="PUT", path="deltas/")
        ...  # a client whose endpoint is proxy.url
        assert proxy.count("PUT") == 4

The Host header goes through unchanged, so that a request signed for the proxy's address stays valid
where the server takes the host from it. Bodies are held in memory.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Request:
    """A request that reached the proxy. ``path``: unquoted, with the query; the names in
    ``headers`` are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class Reply:
    """A server's reply. ``headers`` have no Content-Length; the body says it."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes = field(repr=False)


Fault = Callable[["Exchange"], None]
"""Does one exchange in its own way; ``Exchange`` has what it needs."""


def status(code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> Fault:
    """The proxy answers by itself; the server never sees the request."""

    def act(exchange: Exchange) -> None:
        exchange.reply(Reply(code, tuple((headers or {}).items()), body))

    return act


def lose_reply() -> Fault:
    """The server does what was asked, and the connection breaks before the reply."""

    def act(exchange: Exchange) -> None:
        exchange.forward()
        exchange.reset()

    return act


def refuse() -> Fault:
    """The connection breaks and the server never sees the request."""
    return lambda exchange: exchange.reset()


def drop(after: int = 0) -> Fault:
    """The connection breaks (reset) after that many bytes of the reply's body."""

    def act(exchange: Exchange) -> None:
        exchange.reply(exchange.forward(), stop=after)
        exchange.reset()

    return act


def truncate(after: int = 0) -> Fault:
    """The reply announces its whole length and ends in good order after that many bytes."""

    def act(exchange: Exchange) -> None:
        exchange.reply(exchange.forward(), stop=after)
        exchange.close()

    return act


def shorten(to: int = 0) -> Fault:
    """The reply has that many bytes of its body alone, and announces just these."""

    def act(exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.reply(Reply(reply.status, reply.headers, reply.body[:to]))

    return act


def flip(at: int = 0) -> Fault:
    """One bit of the reply's body is another; nothing else tells."""

    def act(exchange: Exchange) -> None:
        reply = exchange.forward()
        body = bytearray(reply.body)
        if body:
            body[at % len(body)] ^= 1
        exchange.reply(Reply(reply.status, reply.headers, bytes(body)))

    return act


def flip_request(at: int = 0) -> Fault:
    """One bit of the request's body is another when the server gets it."""

    def act(exchange: Exchange) -> None:
        body = bytearray(exchange.request.body)
        if body:
            body[at % len(body)] ^= 1
        exchange.reply(exchange.forward(bytes(body)))

    return act


def trickle(pause: float = 0.05, piece: int = 1) -> Fault:
    """The reply's body comes ``piece`` bytes at a time, with ``pause`` seconds between."""

    def act(exchange: Exchange) -> None:
        exchange.reply(exchange.forward(), piece=piece, pause=pause)

    return act


def hang() -> Fault:
    """No reply, and the connection stays open until the proxy is closed."""
    return lambda exchange: exchange.wait_for_the_end()


@dataclass
class _Rule:
    fault: Fault
    times: int | None
    method: str | None
    path: str
    skip: int


class FaultProxy:
    """``inject`` says what goes wrong; without it everything passes. Use it as a context."""

    def __init__(self, upstream: str) -> None:
        target = urlsplit(upstream)
        assert target.hostname is not None and target.port is not None
        self.upstream = (target.hostname, target.port)
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []
        self._server = _Server(("127.0.0.1", 0), Exchange)
        self._server.proxy = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self) -> str:
        """The endpoint to give to a client."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def inject(
        self,
        fault: Fault,
        *,
        times: int | None = None,
        method: str | None = None,
        path: str = "",
        skip: int = 0,
    ) -> None:
        """Do ``fault`` to requests of ``method`` whose unquoted path (query included) contains
        ``path``: ``times`` of them, or all, after the first ``skip``. The first rule that fits
        is taken."""
        with self._lock:
            self._rules.append(_Rule(fault, times, method, path, skip))

    def clear(self) -> None:
        """Forget all faults and what was seen."""
        with self._lock:
            self._rules.clear()
            self._requests.clear()

    @property
    def requests(self) -> list[Request]:
        """What came, in order of arrival."""
        with self._lock:
            return list(self._requests)

    def count(self, method: str | None = None, path: str = "") -> int:
        """How many requests of ``method`` came whose path contains ``path``."""
        return sum(r.method == (method or r.method) and path in r.path for r in self.requests)

    def fault_for(self, request: Request) -> Fault | None:
        """Note the request; what to do to it, if anything."""
        with self._lock:
            self._requests.append(request)
            for rule in self._rules:
                if rule.method not in (None, request.method) or rule.path not in request.path:
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                if rule.times is None:
                    return rule.fault
                if rule.times:
                    rule.times -= 1
                    return rule.fault
        return None

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # idle connections of clients stay open as long as they like
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to print about."""


class Exchange(BaseHTTPRequestHandler):
    """One connection; the methods that faults use are about its current request."""

    protocol_version = "HTTP/1.1"
    server: _Server
    request: Request  # type: ignore[assignment]  # the socket, which ``connection`` has as well

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request = Request(self.command, unquote(self.path), headers, body)
        fault = self.server.proxy.fault_for(self.request)
        if fault is None:
            self.reply(self.forward())
        else:
            fault(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _handle  # noqa: N815

    def forward(self, body: bytes | None = None) -> Reply:
        """Have the server do the request, with another body if one is given."""
        connection = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(self.request.body if body is None else body)
            found = connection.getresponse()
            dropped = {"connection", "content-length", "transfer-encoding"}
            if self.command == "HEAD":
                dropped.discard("content-length")
            headers = tuple((n, v) for n, v in found.getheaders() if n.lower() not in dropped)
            return Reply(found.status, headers, found.read())

    def reply(
        self, reply: Reply, stop: int | None = None, piece: int | None = None, pause: float = 0
    ) -> None:
        """Send the reply, or its head and the body up to ``stop``, in pieces with pauses."""
        self.send_response_only(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in reply.headers):
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else reply.body[:stop]
        for at in range(0, len(body), piece or max(len(body), 1)):
            self.wfile.write(body[at : at + piece] if piece else body)
            if pause and self.server.proxy.ended.wait(pause):
                return
        self.wfile.flush()

    def close(self) -> None:
        """End the connection in good order."""
        self.close_connection = True

    def reset(self) -> None:
        """Break the connection, so that the client's system reports a reset."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    def wait_for_the_end(self) -> None:
        """Say nothing more."""
        self.server.proxy.ended.wait()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""
