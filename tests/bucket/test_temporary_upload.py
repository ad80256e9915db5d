"""Large objects at stores whose multipart uploads take no condition."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote

import pytest

from deltactl.bucket.cloud.objects import SINGLE_BYTES
from deltactl.bucket.cloud.stores import open_objects
from deltactl.core.errors import NotAllowed, Transient
from tests.support.azure_server import ACCOUNT, KEY, AzureServer
from tests.support.fault_proxy import FaultProxy, Reply, lose_reply, refuse, status

LARGE = Random(5).randbytes(2 * SINGLE_BYTES + 1)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path


def use(patch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(
    ("fault", "method", "path", "kind"),
    [
        (status(503), "PUT", "comp=block&", Transient),
        (status(403), "PUT", "comp=blocklist", NotAllowed),
        (refuse(), "PUT", "object", Transient),
    ],
)
def test_what_fails_leaves_nothing(
    azure_server: AzureServer,
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    method: str,
    path: str,
    kind: type[Exception],
) -> None:
    url = azure_server.new_url()
    upstream, _, account = azure_server.endpoint.rpartition("/")
    with FaultProxy(upstream) as proxy:
        use(monkeypatch, AzureServer(f"{proxy.url}/{account}").environment)
        bucket = open_objects(url)
        proxy.inject(fault, method=method, path=path)
        with pytest.raises(kind) as caught:
            bucket.put("object", large)
        proxy.clear()
        assert KEY not in str(caught.value) and "sig=" not in str(caught.value)
        assert list(bucket._store.list()) == []  # the unfinished upload is not just hidden
        assert bucket.put("object", large)
        assert not bucket.put("object", large)
        assert bucket.read("object", 0, 1 << 30) == LARGE
        assert [item.name for item in bucket.list()] == ["object"]


def test_a_copy_whose_reply_was_lost_is_known_again(
    azure_server: AzureServer, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = azure_server.endpoint.removesuffix(f"/{ACCOUNT}")
    with FaultProxy(upstream) as proxy:
        use(monkeypatch, AzureServer(f"{proxy.url}/{ACCOUNT}").environment)
        bucket = open_objects(azure_server.new_url())
        proxy.inject(lose_reply(), method="PUT", path="object", times=1)
        with pytest.raises(Transient):
            bucket.put("object", large)
        assert bucket.put("object", large)
        assert not bucket.put("object", large)


def test_an_unfinished_upload_is_not_listed(
    azure_server: AzureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, azure_server.environment)
    bucket = open_objects(azure_server.new_url())
    bucket._store.put(".upload-0123", b"half")
    assert list(bucket.list()) == []


def test_what_is_asked_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server that can be had speaks what obstore does to Google's; this shows no more than that
    creation is asked for on the condition that the name is free."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"small")
    large.write_bytes(LARGE)
    with FaultProxy("http://127.0.0.1:1") as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        bucket = open_objects("gs://bucket/chain")
        proxy.inject(_google)
        assert bucket.put("small", small)
        assert bucket.put("large", large)
        puts = [r for r in proxy.requests if r.method == "PUT" and "partNumber" not in r.path]
        assert [r.path for r in puts] == ["/bucket/chain/small", "/bucket/chain/large"]
        assert all(r.headers["x-goog-if-generation-match"] == "0" for r in puts)
        assert puts[0].body == b"small"
        aside = unquote(puts[1].headers["x-goog-copy-source"])
        assert aside.removeprefix("bucket/").startswith("chain/.upload-")
        parts = [r for r in proxy.requests if "partNumber" in r.path]
        assert b"".join(r.body for r in sorted(parts, key=lambda r: r.path)) == LARGE
        deleted = [r.path for r in proxy.requests if r.method == "DELETE"]
        assert deleted == [f"/{aside}"]


def _google(exchange: Any) -> None:
    """Content with everything, in the words of Google's XML API."""
    method, path = exchange.request.method, exchange.request.path
    head = {"ETag": '"1"', "x-goog-generation": "1"}
    body = b""
    if method == "HEAD":
        return exchange.reply(Reply(404, (), b""))
    if method == "POST" and "uploads" in path:
        body = (
            b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        )
    elif method == "POST":
        body = b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
    exchange.reply(Reply(200, tuple(head.items()), body))
