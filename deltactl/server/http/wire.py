"""HTTP with one server: every request is answered whole in bounded time, or raises what is known.

What matters to an update is whether a request that failed may have been carried out all the same.
``Unreachable`` says that it was not, ``NoAnswer`` that nobody knows, ``Refused`` what the server
said, which need not mean that nothing was done. ``Dead`` ends it all.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase
from urllib3.exceptions import HTTPError, NewConnectionError

from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, Transient, UsageError
from deltactl.files.untrusted import parse_json
from deltactl.server.http import pulse
from deltactl.server.http.scheme import fault_of_scheme

log = logging.getLogger("deltactl.server")

CONNECT = 10.0  # seconds for a connection
HEALTH = "/health"
KEY, HEADERS = "VLLM_API_KEY", "DELTACTL_SERVER_HEADERS"
"""Variables of the environment: a bearer token, and further headers, ``Name: value`` a line."""

_LOOK = 5.0  # seconds that /health may take, where it is asked beside another request
_LARGEST = 1 << 26  # bytes of an answer
_TOLD = 400  # characters of a server's own words that are passed on
_EXCERPT = 80  # of what is no answer of vLLM's


class Unreachable(Transient):
    """There was no connection: the request was not carried out."""


class ConnectionLost(Unreachable):
    """Nor is there any more to a server that has answered before."""


class NoAnswer(Transient):
    """No whole answer came: whether the request was carried out is not known."""


class Refused(DeltactlError):
    """The server answered with another status than 200."""

    def __init__(self, status: int, path: str, *, file: str, found: str, hint: str | None) -> None:
        self.status = status
        what = f"the server answered {path} with status {status}"
        super().__init__(what, file=file, found=found or None, hint=hint)


class Busy(Refused, Transient):
    """The server, or what stands before it, is overloaded or on its way up or down."""


class Dead(DeltactlError):
    """The engine behind the server's port has ended, and with it the weights that it held."""


def server_url(url: str) -> str:
    """A server's address without the last slash. Raises UsageError for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError("this is no server's address", file=url, expected="http://HOST:PORT")
    return url.rstrip("/")


class Wire:
    """Requests to the server at ``url``, one at a time. ``timeout``: seconds for an answer.

    Once the engine was found dead every request raises that.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        self._dead: Dead | None = None
        self._answered = False  # whether it ever has
        self._session = requests.Session()
        self._session.auth = _Authorization()
        self._session.headers.update(_more_headers())

    def get(self, path: str, **query: object) -> dict[str, Any]:
        return self._ask("GET", path, query, None)

    def post(self, path: str, body: Mapping[str, Any] | None, **query: object) -> dict[str, Any]:
        return self._ask("POST", path, query, body)

    def close(self) -> None:
        self._session.close()

    def _ask(
        self, method: str, path: str, query: Mapping[str, object], body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The answer's JSON object, empty where it has no body. Raises the classes above,
        NotAllowed, Malformed."""
        if self._dead is not None:
            raise self._dead
        try:
            return pulse.beside(lambda: self._exchange(method, path, query, body), self._is_gone)
        except pulse.Gone:
            raise self._died(path) from None
        except Refused as error:
            if (error.status, path) == (503, HEALTH) or (error.status == 500 and self._is_gone()):
                raise self._died(path) from None
            raise

    def _died(self, path: str) -> Dead:
        self._dead = Dead(
            "the server's engine has died",
            file=self.url,
            found=f"{path} unanswered, and no engine by {HEALTH}" if path != HEALTH else None,
            hint="see its log, and restart the server",
        )
        return self._dead

    def _is_gone(self) -> bool:
        """Whether vLLM says that its engine is dead, or listens no more. Not where that is not
        known: a server that is only slow, or a proxy that passes no /health, is no reason."""
        try:
            with requests.get(
                self.url + HEALTH,
                auth=self._session.auth,
                headers=self._session.headers,
                timeout=_LOOK,
                allow_redirects=False,
            ) as reply:
                return reply.status_code == 503
        except requests.RequestException as error:
            return _is_refused(error)

    def _exchange(
        self, method: str, path: str, query: Mapping[str, object], body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        began = time.monotonic()
        deadline = began + self.timeout
        try:
            with self._session.request(
                method,
                self.url + path,
                params={key: _spelled(value) for key, value in query.items()},
                json=body,
                timeout=(min(CONNECT, self.timeout), self.timeout),
                allow_redirects=False,
                stream=True,
            ) as reply:
                self._answered = True
                raw = self._read(reply, path, deadline)
        except requests.RequestException as error:
            log.debug("%s %s%s: %s", method, self.url, path, type(error).__name__)
            raise self._unanswered(path, error) from None
        except HTTPError as error:  # of reading the body
            raise self._no_answer(path, type(error).__name__) from None
        took = 1000 * (time.monotonic() - began)
        log.debug("%s %s%s: %d, %.0f ms", method, self.url, path, reply.status_code, took)
        if reply.status_code != 200:
            self._session.close()  # vLLM's may close after a fault, and the next request be lost
            raise self._refused(reply.status_code, path, raw)
        return self._parsed(path, raw) if raw.strip() else {}

    def _parsed(self, path: str, raw: bytes) -> dict[str, Any]:
        try:
            return parse_json(raw, self.url, what=f"the answer to {path}")
        except Malformed as error:
            error.found = _excerpt(raw)
            raise

    def _read(self, reply: requests.Response, path: str, deadline: float) -> bytes:
        raw = bytearray()
        while piece := reply.raw.read1(1 << 16, decode_content=True):  # what has come so far
            raw += piece
            if len(raw) > _LARGEST:
                raise self._no_answer(path, f"more than {_LARGEST} bytes")
            if time.monotonic() > deadline:
                raise self._no_answer(path, f"no end of it in {self.timeout:g} seconds")
        return bytes(raw)

    def _no_answer(self, path: str, found: str) -> NoAnswer:
        return NoAnswer(f"the server did not answer {path}", file=self.url, found=found)

    def _unanswered(self, path: str, error: requests.RequestException) -> DeltactlError:
        if isinstance(error, requests.ConnectTimeout) or _unconnected(error) is not None:
            return self._unreachable(error)
        fault = None if self._answered else fault_of_scheme(self.url, error)
        if fault is not None:
            return fault
        if isinstance(error, requests.Timeout):
            silent = self._no_answer(path, f"nothing in {self.timeout:g} seconds")
            silent.hint = "give it longer with --timeout, if it may take that long"
            return silent
        if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
            return self._no_answer(path, "the connection ended")
        return NoAnswer(f"the request to {path} failed", file=self.url, found=type(error).__name__)

    def _unreachable(self, error: requests.RequestException) -> Unreachable:
        """For vLLM's port, which is closed until the model is loaded, and once its engine died."""
        what, found = "no connection to the server", _reason(error)
        if self._answered:
            hint = "it has ended, or its engine has died: see its log, and restart the server"
            return ConnectionLost(f"{what} any more", file=self.url, found=found, hint=hint)
        hint = f"deltactl doctor --server {quote(self.url)}; if it is still starting, wait for it"
        return Unreachable(what, file=self.url, found=found, hint=hint)

    def _refused(self, status: int, path: str, raw: bytes) -> DeltactlError:
        told = _message(raw)
        if status in (401, 403):
            what = f"the server, or what stands before it, does not allow {path}"
            hint = f"set {KEY}, or further headers in {HEADERS}"
            return NotAllowed(what, file=self.url, found=f"status {status}", hint=hint)
        kind = Busy if status in (408, 429, 502, 503, 504) else Refused
        hint = f"deltactl doctor --server {quote(self.url)}"
        if kind is Busy:
            hint = "it may be starting, or have too much to do: wait for it"
        return kind(status, path, file=self.url, found=told, hint=hint)


def _unconnected(error: requests.RequestException) -> NewConnectionError | None:
    """Why no connection came about, if none did."""
    reason = error.args[0] if error.args else None
    reason = getattr(reason, "reason", reason)
    return reason if isinstance(reason, NewConnectionError) else None


def _reason(error: requests.RequestException) -> str | None:
    """What the system said of it."""
    cause = getattr(_unconnected(error), "__cause__", None)
    return str(cause.strerror).lower() if isinstance(cause, OSError) and cause.strerror else None


def _is_refused(error: requests.RequestException) -> bool:
    """Whether the machine is there and nothing listens at the port."""
    reason = _unconnected(error)
    return reason is not None and isinstance(reason.__cause__, ConnectionRefusedError)


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _message(raw: bytes) -> str:
    """What an answer that is an error says, in the forms that vLLM gives it."""
    try:
        document: Any = parse_json(raw, None, what="the answer")
    except DeltactlError:
        return _excerpt(raw)
    found = document.get("error", document.get("detail", ""))
    if isinstance(found, dict):
        found = found.get("message", "")
    return str(found)[:_TOLD]


def _excerpt(raw: bytes) -> str:
    """What somebody else than vLLM has answered, in a few words."""
    text = raw[: 1 << 14].decode(errors="replace")
    if text.lstrip().startswith("<"):
        title = re.search(r"<title[^>]*>([^<]*)", text, re.IGNORECASE)
        named = " ".join(title[1].split()) if title else ""
        return f"a web page, {named[:_EXCERPT]!r}" if named else "a web page"
    words = " ".join(text.split())
    return words if len(words) <= _EXCERPT else words[:_EXCERPT] + "..."


class _Authorization(AuthBase):
    """The token of the environment; and ~/.netrc, which is for others, is not asked."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        key = os.environ.get(KEY)
        if key and "Authorization" not in request.headers:
            if not re.fullmatch(r"[\x21-\x7e]+", key):
                raise UsageError(f"{KEY} holds what cannot stand in a header")
            request.headers["Authorization"] = f"Bearer {key}"
        return request


def _more_headers() -> dict[str, str]:
    """Those of HEADERS. Raises UsageError, which repeats none of them."""
    found = {}
    for line in os.environ.get(HEADERS, "").splitlines():
        match = re.fullmatch(r"\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([\x20-\x7e]*?)\s*", line)
        if match:
            found[match[1]] = match[2]
        elif line.strip():
            raise UsageError(f"a line of {HEADERS} is no header", expected="Name: value")
    return found
