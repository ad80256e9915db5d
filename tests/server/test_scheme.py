"""``http://`` where https is spoken, the other way round, and certificates."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deltactl.core.errors import NotAllowed, UsageError
from deltactl.server.http.wire import NoAnswer, Wire
from tests.server.conftest import Start
from tests.support.tools import need


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Keep it to itself."""


@contextmanager
def listening(context: ssl.SSLContext | None) -> Iterator[str]:
    """Where it listens, without a scheme."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A handshake that fails is what is tested."""

    with Quiet(("127.0.0.1", 0), _Answering) as listener:
        if context is not None:
            listener.socket = context.wrap_socket(listener.socket, server_side=True)
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of 127.0.0.1, signed by itself."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(path)]
    named = ["-out", f"{path}.crt", "-subj", "/CN=127.0.0.1"]
    named += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([need("openssl"), *made, *named], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.fixture(scope="module")
def tls(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with listening(context) as address:
        yield address


def test_http_where_https_is_spoken(tls: str) -> None:
    with pytest.raises(UsageError) as caught:
        Wire(f"http://{tls}", 10).get("/version")
    assert caught.value.what == "the server speaks https at this port"
    assert caught.value.hint == f"--server https://{tls}"


def test_https_where_http_is_spoken() -> None:
    with listening(None) as address, pytest.raises(UsageError) as caught:
        Wire(f"https://{address}", 10).get("/version")
    assert caught.value.what == "the server does not speak https at this port"
    assert caught.value.hint == f"--server http://{address}"


def test_a_certificate_that_nobody_trusts(
    tls: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotAllowed) as caught:
        Wire(f"https://{tls}", 10).get("/version")
    assert "self-signed certificate" in str(caught.value.found)
    assert "REQUESTS_CA_BUNDLE" in str(caught.value.hint)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", f"{certificate}.crt")
    assert Wire(f"https://{tls}", 10).get("/version") == {}


def test_a_connection_that_ends_is_no_fault_of_the_scheme(start: Start) -> None:
    server = start()
    server.fail("/version", how="drop")
    with pytest.raises(NoAnswer):
        Wire(server.url, 10).get("/version")
