"""HTTP for the stand-in, and the faults on the way."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.vllm_standin.faults import Fault, Faults
from tests.support.vllm_standin.vllm import Refused, Vllm


class _Dropped(Exception):
    """The connection ends here."""


class StandIn:
    """A server that answers at ``url`` until it is closed or killed. ``requests``: what was asked
    for, in order, RPCs as ``rpc:METHOD``; ``headers``: of the last request."""

    def __init__(self, model: Path, scratch: Path, *, port: int = 0, **options: Any) -> None:
        self.model, self.scratch, self._options = model, scratch, options
        self.vllm = Vllm(model, scratch, **options)
        self.faults = Faults()
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.dead = False
        self.stopped = threading.Event()  # set while a request hangs
        self._released = threading.Event()
        handler = type("BoundHandler", (_Handler,), {"standin": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def live(self) -> str:
        return self.vllm.live

    def fail(self, route: str, **how: Any) -> None:
        """Set a fault; see Fault."""
        self.faults.add(Fault(route, **how))

    def release(self) -> None:
        """Let go of what hangs."""
        self._released.set()
        self._released = threading.Event()

    def mend(self) -> None:
        self.faults.clear()
        self.release()

    def hang(self) -> None:
        released = self._released
        self.stopped.set()
        released.wait(60)  # or a test that fails would never end

    def kill(self) -> None:
        """As kill -9: no answer any more, and what was in memory is gone."""
        self.dead = True
        self._server.shutdown()
        self._server.server_close()
        self.mend()

    def again(self) -> StandIn:
        """The server that somebody starts in place of one that was killed."""
        assert self.dead
        port = self._server.server_address[1]
        self.close()
        return StandIn(self.model, self.scratch, port=port, **self._options)

    def stop_listening(self) -> None:
        """As vLLM does some seconds after its engine has died: requests that are open stay so."""
        self._server.shutdown()
        self._server.socket.close()

    def close(self) -> None:
        self.mend()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.vllm.workers.close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to print about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    standin: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        route = parts.path
        if route == "/collective_rpc":
            route = f"rpc:{body.get('method')}"
        self.standin.requests.append(route)
        self.standin.headers = dict(self.headers)
        try:
            if self.standin.dead:
                raise _Dropped
            fault = self.standin.faults.take(route) or Fault("", how=None)
            if fault.meanwhile is not None:
                fault.meanwhile()
            if fault.when == "before":
                self._suffer(fault)
            if self.standin.dead:
                raise _Dropped
            status, answer = self._answer(parts.path, query, body)
            if fault.when == "after":
                self._suffer(fault)
            self._send(status, b"<html>" if fault.how == "garbage" else answer)
        except (_Dropped, ConnectionError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = _serve  # noqa: N815

    def _suffer(self, fault: Fault) -> None:
        if fault.how == "kill":
            self.standin.kill()
        if fault.how == "die":
            self.standin.vllm.engine_dead = True
        if fault.how in ("hang", "late", "die"):
            self.standin.hang()
        if fault.how in ("drop", "hang", "kill", "die") or self.standin.dead:
            raise _Dropped
        if fault.how == "error":
            self._send(fault.status, fault.body)
            raise _Dropped

    def _answer(self, path: str, query: Any, body: Any) -> tuple[int, bytes]:
        try:
            self._check_key(path)
            found = self.standin.vllm.handle(self.command, path, query, body)
        except Refused as refused:
            error = {"error": {"message": refused.message, "code": refused.status}}
            return refused.status, json.dumps(error).encode()
        return 200, b"" if found is None else json.dumps(found).encode()

    def _check_key(self, path: str) -> None:
        """Of all routes vLLM guards only those for everybody."""
        key, given = self.standin.vllm.key, self.headers.get("Authorization")
        if key is not None and path.startswith("/v1") and given != f"Bearer {key}":
            raise Refused(401, "Unauthorized")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
