"""The server: HTTP, counters, and the process side of the stand-in."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.hub.cas import Cas, Refused
from tests.support.hub.faults import Fault, Faults
from tests.support.hub.routes import Answer, Entry, Reply, Request, handle, route_of

_PIECE = 1000  # bytes at a time of a body that trickles


@dataclass
class HubStandIn:
    """The state of a Hub, and the counters. ``page``: entries in one page of a listing.

    ``write_token`` and ``read_token`` may do what they say, in every bucket; nobody needs one to
    read what is not ``private``.
    """

    page: int = 1000
    tokens: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, dict[str, Entry]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    cas: Cas = field(default_factory=Cas)
    faults: Faults = field(default_factory=Faults)
    requests: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.write_token = f"hf_{secrets.token_hex(12)}"
        self.read_token = f"hf_{secrets.token_hex(12)}"
        self.tokens |= {self.write_token: "write", self.read_token: "read"}
        self.cas_tokens: dict[str, str] = {}
        self.signature = secrets.token_hex(8)
        self._released = threading.Event()
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, route: str, **how: Any) -> None:
        """Set a fault; see Fault."""
        self.faults.add(Fault(route, **how))

    def mend(self) -> None:
        """Take back all faults, and let go of what hangs."""
        self.faults.clear()
        self._released.set()
        self._released = threading.Event()

    def new_bucket(self) -> str:
        name = f"team/chains-{secrets.token_hex(4)}"
        self.buckets[name] = {}
        return name

    def hang(self) -> None:
        self._released.wait(60)  # or a test that fails would never end

    def pause(self) -> None:
        self._released.wait(0.001)

    def forget_counts(self) -> None:
        with self.lock:
            for counter in (self.requests, self.received, self.sent):
                counter.clear()

    def calls(self, *routes: str) -> int:
        """Requests to these routes so far."""
        return sum(self.requests[route] for route in routes)

    def count(self, counter: Counter[str], route: str, amount: int) -> None:
        with self.lock:
            counter[route] += amount

    def close(self) -> None:
        self.mend()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to print about."""


class _Dropped(Exception):
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubStandIn

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        route, match = route_of(self.command, parts.path)
        body = self._body()
        self.hub.count(self.hub.requests, route, 1)
        self.hub.count(self.hub.received, route, len(body))
        fault = self.hub.faults.take(route)
        try:
            self._before(fault)
            request = Request(self.hub, route, match, query, self.headers, body, fault.failures)
            answer = self._failure(fault) or self._answer(request)
            self._send(route, answer, fault)
        except (_Dropped, ConnectionError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _before(self, fault: Fault) -> None:
        if fault.meanwhile is not None:
            fault.meanwhile()
        if fault.hang:
            self.hub.hang()
        if fault.drop or fault.hang:
            raise _Dropped

    def _failure(self, fault: Fault) -> Answer | None:
        if fault.status is None:
            return None
        return Answer(fault.status, fault.body, dict(fault.headers))

    def _answer(self, request: Request) -> Answer:
        try:
            return handle(request)
        except Reply as reply:
            return reply.answer
        except Refused as error:
            return Answer.of({"error": str(error)}, 400)

    def _send(self, route: str, answer: Answer, fault: Fault) -> None:
        body = answer.body if fault.instead is None else fault.instead
        if fault.flip and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        self.send_response_only(answer.status)
        for name, value in self._headers(answer, body).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.cut:
            self.wfile.write(body[: len(body) // 2])
            raise _Dropped
        piece = _PIECE if fault.trickle else max(len(body), 1)
        for at in range(0, len(body), piece):
            # Counted first: once it has its bytes, a test may look at the counter.
            self.hub.count(self.hub.sent, route, len(body[at : at + piece]))
            self.wfile.write(body[at : at + piece])
            if fault.trickle:
                self.hub.pause()

    def _headers(self, answer: Answer, body: bytes) -> Mapping[str, str]:
        length = {"Content-Length": str(len(body))}
        return {"Content-Type": "application/json"} | length | dict(answer.headers)
