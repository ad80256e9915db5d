"""The environment: an HTTP server at which many sessions of the game are played at once.

``POST /sessions`` with ``{"seed": n}`` begins one: ``{"session", "letters", "guesses"}``, status
201. ``POST /sessions/ID/guess`` with ``{"word": text}`` answers ``{"marks", "left", "done",
"reward"}``. The reward, in [0, 1], is null until the session is done, and forgotten.
``GET /`` counts sessions: ``{"open", "most", "begun", "done"}``. What a session of a seed answers
depends on the seed and the guesses alone. Anything else that is sent is answered with an error,
``{"error": text}``, and changes nothing.

``python -m deltactl.demo.loop.environment`` runs one on a free port of loopback, and says which.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

from deltactl.demo.game import game

SESSIONS = 4096  # open at once; past them the one that was idle longest is forgotten
CONNECTIONS = 256  # at once; further ones wait in the system's queue
BODY = 1024  # bytes of a request's body
IDLE = 120.0  # seconds in which a client must send what it has begun to, or something new
_GUESS = re.compile(r"/sessions/([0-9a-f]{16})/guess")


class BadRequest(Exception):
    """What a client did wrong, in words, and the HTTP status that says so."""

    def __init__(self, status: int, what: str) -> None:
        self.status, self.what = status, what
        super().__init__(what)


@dataclass(slots=True)
class _Session:
    secret: str
    history: list[tuple[str, str]] = field(default_factory=list)


class Sessions:
    """The open sessions. All methods may be called from many threads at once."""

    def __init__(self, limit: int = SESSIONS) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._open: OrderedDict[str, _Session] = OrderedDict()
        self._begun = self._done = self._most = 0

    def begin(self, document: object) -> dict[str, Any]:
        seed = _field(document, "seed", int)
        if not 0 <= seed < 1 << 63:
            raise BadRequest(400, "the seed is below zero or 2^63 and more")
        name, session = secrets.token_hex(8), _Session(game.secret_of(seed))
        with self._lock:
            if len(self._open) >= self._limit:
                self._open.popitem(last=False)
            self._open[name] = session
            self._begun += 1
            self._most = max(self._most, len(self._open))
        return {"session": name, "letters": game.LETTERS, "guesses": game.GUESSES}

    def guess(self, name: str, document: object) -> dict[str, Any]:
        word = _field(document, "word", str)
        with self._lock:
            session = self._open.get(name)
            if session is None:
                raise BadRequest(404, "there is no such session, or it is over")
            said = game.marks(session.secret, word)
            session.history.append((word, said))
            left = game.GUESSES - len(session.history)
            done = word == session.secret or not left
            if done:
                del self._open[name]
                self._done += 1
            else:
                self._open.move_to_end(name)
        reward = game.reward(session.history) if done else None
        return {"marks": said, "left": left, "done": done, "reward": reward}

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {
                "open": len(self._open),
                "most": self._most,
                "begun": self._begun,
                "done": self._done,
            }


def _field(document: object, name: str, kind: type) -> Any:
    found = document.get(name) if isinstance(document, dict) else None
    if type(found) is not kind:
        raise BadRequest(400, f"a JSON object with {name!r}, {kind.__name__}, is expected")
    return found


class Environment(ThreadingHTTPServer):
    """The server, on a free port of loopback."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, sessions: Sessions | None = None, *, idle: float = IDLE) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sessions, self.idle = sessions or Sessions(), idle
        self._places = threading.BoundedSemaphore(CONNECTIONS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()  # nobody is accepted meanwhile; a client that idles is put out
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """A client that breaks off is no event; anything else is a fault of ours, and told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a client keeps its connection
    disable_nagle_algorithm = True
    server: Environment

    def setup(self) -> None:
        self.request.settimeout(self.server.idle)
        super().setup()

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body that is not read is not the next request
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> tuple[int, dict[str, Any]]:
        if self.path != "/":
            raise BadRequest(404, "there is nothing here")
        return 200, dict(self.server.sessions.counts())

    def _post(self) -> tuple[int, dict[str, Any]]:
        document = self._document()
        if self.path == "/sessions":
            return 201, self.server.sessions.begin(document)
        match = _GUESS.fullmatch(self.path)
        if match is None:
            raise BadRequest(404, "there is nothing here")
        return 200, self.server.sessions.guess(match[1], document)

    def _document(self) -> object:
        """The body. Where it is not read to its end, the connection ends with the answer."""
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            self.close_connection = True
            raise BadRequest(411, "the body's length is not given, once")
        if not re.fullmatch(r"[0-9]{1,9}", lengths[0]) or int(lengths[0]) > BODY:
            self.close_connection = True
            raise BadRequest(413, f"the body is no more than {BODY} bytes")
        raw = self.rfile.read(int(lengths[0]))
        if len(raw) < int(lengths[0]):
            self.close_connection = True
            raise BadRequest(400, "the body is shorter than was said")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise BadRequest(400, "the body is no JSON") from None

    def _answer(self, act: Any) -> None:
        try:
            status, document = act()
        except BadRequest as refusal:
            status, document = refusal.status, {"error": refusal.what}
        raw = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads an access log."""


def main() -> None:
    """Serve until the process that started this one ends or has had enough."""
    from deltactl.demo.loop.processes import leashed, tell

    leashed()
    with Environment() as server:
        tell(event="ready", url=server.url)
        server.serve_forever()


if __name__ == "__main__":
    main()
