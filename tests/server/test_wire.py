"""Requests to a server: what each way to fail is told as, and what is sent along."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deltactl.core.errors import Malformed, NotAllowed, Transient, UsageError
from deltactl.server.http.wire import Busy, NoAnswer, Refused, Unreachable, Wire, server_url
from tests.server.conftest import Start

SECRET = "sk-hunter2"


def test_an_answer(start: Start) -> None:
    assert Wire(start().url, 10).get("/version") == {"version": "0.32.0"}


def test_an_answer_without_a_body(start: Start) -> None:
    assert Wire(start().url, 10).post("/reset_mm_cache", None) == {}


def test_nobody_listens(start: Start) -> None:
    server = start()
    server.kill()
    with pytest.raises(Unreachable):
        Wire(server.url, 10).get("/version")


@pytest.mark.parametrize("how", ["hang", "drop", "kill"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_no_answer(how: str, when: str, start: Start) -> None:
    server = start()
    server.fail("/resume", how=how, when=when)
    with pytest.raises(NoAnswer) as caught:
        Wire(server.url, 0.2).post("/resume", None)
    assert caught.value.file == server.url
    assert how != "hang" or server.stopped.wait(30)  # it may come to it later than we gave up
    assert len(server.vllm.resumed_on) == (when == "after")


def test_an_answer_that_trickles_has_an_end() -> None:
    """Each byte is in time; all of them never are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                with contextlib.suppress(OSError):
                    while not ended.wait(0.05):
                        connection.sendall(b" ")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(NoAnswer, match="no end of it"):
                Wire(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.3).get("/version")
        finally:
            ended.set()
            thread.join()


def test_a_connection_is_not_used_again_after_a_refusal() -> None:
    """vLLM's server may close it without a word, and the next request would be lost with it."""
    ports = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            ports.append(self.client_address[1])
            self.send_response(500 if self.path == "/fault" else 200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Keep it to itself."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        wire = Wire(f"http://127.0.0.1:{listener.server_address[1]}", 10)
        wire.get("/good")
        with pytest.raises(Refused):
            wire.get("/fault")
        wire.get("/good")
        wire.close()
        listener.shutdown()
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Refused), (404, Refused), (500, Refused), (301, Refused)]
    + [(status, Busy) for status in (408, 429, 502, 503, 504)],
)
def test_another_status(status: int, kind: type[Refused], start: Start) -> None:
    server = start()
    server.fail("/version", status=status)
    with pytest.raises(kind) as caught:
        Wire(server.url, 10).get("/version")
    assert type(caught.value) is kind
    assert isinstance(caught.value, Transient) is (kind is Busy)
    assert (caught.value.status, caught.value.found) == (status, "told to fail")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": "in words"}', "in words"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>", "a web page"),
        (b'{"error": {"message": "' + b"x" * 10_000 + b'"}}', "x" * 400),
        (b"\xff", "\ufffd"),
        (b"[]", "[]"),
        (b"", None),
    ],
)
def test_what_an_error_says(body: bytes, told: str | None, start: Start) -> None:
    server = start()
    server.fail("/version", body=body)
    with pytest.raises(Refused) as caught:
        Wire(server.url, 10).get("/version")
    assert caught.value.found == told


@pytest.mark.parametrize("status", [401, 403])
def test_not_allowed(status: int, start: Start) -> None:
    server = start()
    server.fail("/version", status=status)
    with pytest.raises(NotAllowed) as caught:
        Wire(server.url, 10).get("/version")
    assert "VLLM_API_KEY" in str(caught.value.hint)


def test_an_answer_that_is_no_json(start: Start) -> None:
    server = start()
    server.fail("/version", when="after", how="garbage")
    with pytest.raises(Malformed):
        Wire(server.url, 10).get("/version")


def test_the_key_and_the_headers_of_the_environment(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("DELTACTL_SERVER_HEADERS", "X-Proxy: a b\n\nX-Other:c\n")
    server = start()
    Wire(server.url, 10).get("/version")
    assert server.headers["Authorization"] == f"Bearer {SECRET}"
    assert (server.headers["X-Proxy"], server.headers["X-Other"]) == ("a b", "c")


def test_a_header_of_the_environment_goes_before_the_key(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("DELTACTL_SERVER_HEADERS", "Authorization: Basic abc")
    server = start()
    Wire(server.url, 10).get("/version")
    assert server.headers["Authorization"] == "Basic abc"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_API_KEY", f"{SECRET} \n"),
        ("VLLM_API_KEY", f"{SECRET}\u20ac"),
        ("DELTACTL_SERVER_HEADERS", SECRET),
        ("DELTACTL_SERVER_HEADERS", f"a b: {SECRET}"),
        ("DELTACTL_SERVER_HEADERS", f"a: {SECRET}\x01"),
    ],
)
def test_what_cannot_be_a_header_is_refused_and_not_repeated(
    name: str, value: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    url = start().url
    with pytest.raises(UsageError) as caught:
        Wire(url, 10).get("/version")
    assert name in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "url", ["", "host:8000", "ftp://host", "http://", "http://a?x=1", "http://a#b", "http:///x"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError):
        server_url(url)


def test_addresses() -> None:
    assert server_url("http://a:8000/") == "http://a:8000"
    assert server_url("https://a/prefix//") == "https://a/prefix"
