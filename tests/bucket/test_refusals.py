"""What the store itself said, and what to do about it; by what the real clients make of replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore import auth
from obstore.exceptions import GenericError

from deltactl.bucket import open_bucket
from deltactl.bucket.cloud.objects import SINGLE_BYTES, ObjectBucket
from deltactl.bucket.cloud.obstore_errors import translated
from deltactl.bucket.cloud.refusals import Place
from deltactl.bucket.cloud.stores import open_objects
from deltactl.bucket.said import said
from deltactl.core.errors import (
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    Unsupported,
    UsageError,
)
from tests.support.azure_server import ACCOUNT, KEY
from tests.support.fault_proxy import Fault, FaultProxy, status
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, free_ports, use_s3

URLS = {"s3": "s3://bucket/chain", "gs": "gs://bucket/chain", "az": "az://container/chain"}
SECRETS = (ACCESS_KEY, SECRET_KEY, KEY, "Signature=", "sig=", "X-Amz-", "Debug", "stack")


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Every store's endpoint; what answers is for the test to say."""
    with FaultProxy(s3_server.endpoint) as proxy:
        everywhere(monkeypatch, proxy.url)
        yield proxy


def everywhere(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    use_s3(monkeypatch, endpoint)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    connection = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}/{ACCOUNT};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small").write_bytes(b"content")
    return tmp_path / "small"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "large").write_bytes(bytes(SINGLE_BYTES + 1))
    return tmp_path / "large"


METHODS: dict[str, Callable[[ObjectBucket, Path], object]] = {
    "list": lambda bucket, _: list(bucket.list()),
    "read": lambda bucket, _: bucket.read("object", 0, 10),
    "put": lambda bucket, path: bucket.put("object", path),
    "delete": lambda bucket, _: bucket.delete("object"),
}


def error_of(scheme: str, method: str, source: Path) -> DeltactlError:
    with pytest.raises(DeltactlError) as caught:
        METHODS[method](open_objects(URLS[scheme]), source)
    error = caught.value
    text = f"{error} {error.hint} {error.facts()} {error!r}"
    assert not [secret for secret in SECRETS if secret in text]
    assert error.hint
    return error


def reply(code: str, message: str, more: str = "") -> bytes:
    words = f"<Code>{code}</Code><Message>{message}</Message>{more}"
    return f'<?xml version="1.0" encoding="utf-8"?><Error>{words}</Error>'.encode()


# What it said.


@pytest.mark.parametrize("scheme", URLS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("code", "kind"), [(400, Unsupported), (403, NotAllowed), (503, Transient)]
)
def test_the_stores_code_and_message_are_passed_on(
    proxy: FaultProxy, small: Path, scheme: str, method: str, code: int, kind: type[Exception]
) -> None:
    proxy.inject(status(code, reply("SomeCode", "The &quot;frobnicator&quot; is off.")))
    error = error_of(scheme, method, small)
    assert type(error) is kind
    assert f'({code} SomeCode: The "frobnicator" is off)' in error.what


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Access denied.", "Access denied"),
        ("  spaces\t here \x1b[31m ", "spaces here [31m"),
        ("one line\nRequestId:46f5ae6c-801e\nTime:2026-12-01T03:00:00Z", "one line"),
        (f"the key {SECRET_KEY} is wrong", "the key ... is wrong"),
        ("the key AKIAIOSFODNN7EXAMPLE is wrong", "the key ... is wrong"),
        ("at https://host/x?X-Amz-Signature=abc now", "at ... now"),
        ("no: Signature=abc, Credential: def; sig=x", "no: ... ... ..."),
        ("a token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc here", "a token ... here"),
        ("a token ya29.a0Af-x_y here", "a token ... here"),
        ("Your proposed upload exceeds &lt;5&gt; GB", "Your proposed upload exceeds <5> GB"),
        ("word " * 200, ("word " * 200)[:197] + "..."),
        ("", ""),
        ("...", ""),
    ],
)
def test_what_is_left_of_a_message(message: str, shown: str) -> None:
    found = said(message)
    assert len(found) <= 200
    assert found == shown


@pytest.mark.parametrize("scheme", URLS)
def test_a_message_that_repeats_what_was_sent(proxy: FaultProxy, small: Path, scheme: str) -> None:
    """As Azure's detail does, and as a server may that means ill."""

    def echo(exchange: object) -> None:
        asked = exchange.request  # type: ignore[attr-defined]
        heard = f"heard {asked.headers.get('authorization', '')} of {ACCESS_KEY} {SECRET_KEY} {KEY}"
        detail = f"<AuthenticationErrorDetail>{heard}</AuthenticationErrorDetail>"
        act = status(403, reply("AuthenticationFailed", heard, detail))
        act(exchange)  # type: ignore[arg-type]

    proxy.inject(echo)
    for method in METHODS:
        assert "heard" in str(error_of(scheme, method, small))


# Clocks.

SKEWED = {
    "s3": reply(
        "RequestTimeTooSkewed",
        "The difference between the request time and the current time is too large.",
        "<RequestTime>20261130T030000Z</RequestTime>",
    ),
    "az": reply(
        "AuthenticationFailed",
        "Server failed to authenticate the request.\nRequestId:1\nTime:2026-12-01T03:00:00Z",
        "<AuthenticationErrorDetail>Request date header too old: 'Mon, 30 Nov 2026 03:00:00 GMT'"
        "</AuthenticationErrorDetail>",
    ),
}
SKEWED["gs"] = SKEWED["s3"]


@pytest.mark.parametrize("scheme", SKEWED)
@pytest.mark.parametrize("method", METHODS)
def test_a_clock_that_is_wrong(proxy: FaultProxy, small: Path, scheme: str, method: str) -> None:
    proxy.inject(status(403, SKEWED[scheme]))
    error = error_of(scheme, method, small)
    assert isinstance(error, NotAllowed)
    assert "clock" in error.what
    assert "timedatectl" in str(error.hint)


def test_a_real_server_and_a_clock_that_is_wrong(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    """The request is a day old when the server gets it."""

    def old(*_: object) -> datetime:
        return datetime.now(UTC).replace(tzinfo=None) - timedelta(1)

    use_s3(monkeypatch, s3_server.endpoint)
    bucket = open_objects(s3_server.new_url())
    monkeypatch.setattr(auth, "get_current_datetime", old)
    with pytest.raises(NotAllowed, match="clock") as caught:
        list(bucket.list())
    assert "RequestTimeTooSkewed" in caught.value.what


def test_wrong_keys_are_no_wrong_clock(proxy: FaultProxy, small: Path) -> None:
    body = reply("AuthenticationFailed", "Server failed to authenticate the request.")
    proxy.inject(status(403, body))
    error = error_of("az", "list", small)
    assert "clock" not in f"{error} {error.hint}"
    assert "AZURE_STORAGE_KEY" in str(error.hint)


# Conditions.

NOT_IMPLEMENTED = reply(
    "NotImplemented",
    "A header you provided implies functionality that is not implemented.",
    "<Header>If-None-Match</Header>",
)


@pytest.mark.parametrize("scheme", URLS)
def test_a_store_without_conditional_writes(proxy: FaultProxy, small: Path, scheme: str) -> None:
    proxy.inject(status(501, NOT_IMPLEMENTED), method="PUT")
    error = error_of(scheme, "put", small)
    assert isinstance(error, Unsupported)
    assert "no conditional writes" in error.what and "two publishers" in error.what
    assert "501 NotImplemented" in error.what
    assert "directory" in str(error.hint)


def test_a_store_that_completes_uploads_without_conditions(
    s3_server: S3Server, proxy: FaultProxy, large: Path
) -> None:
    url = s3_server.new_url()
    proxy.inject(status(501, NOT_IMPLEMENTED), method="POST", path="uploadId=")
    with pytest.raises(Unsupported, match="no conditional writes") as caught:
        open_objects(url).put("deltas/large", large)
    assert caught.value.file == f"{url}/deltas/large"
    assert list(open_objects(url).unfinished()) == []


@pytest.mark.parametrize("method", ["list", "read", "delete"])
def test_another_thing_that_is_not_implemented(proxy: FaultProxy, small: Path, method: str) -> None:
    proxy.inject(status(501, NOT_IMPLEMENTED))
    assert "conditional" not in str(error_of("s3", method, small))


# Another server than was meant.

SETTINGS = {
    "s3": "AWS_ENDPOINT_URL",
    "gs": "STORAGE_EMULATOR_HOST",
    "az": "AZURE_STORAGE_SERVICE_ENDPOINT",
}
ANSWERS: dict[str, tuple[Fault, type[DeltactlError]]] = {
    "403": (status(403, b"<html>Forbidden</html>"), NotAllowed),
    "401": (status(401), NotAllowed),
    "404": (status(404, b"404 page not found"), NotFound),
    "405": (status(405), Unsupported),
    "200": (status(200, b"Welcome"), Malformed),
}


@pytest.mark.parametrize("scheme", URLS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_server_that_is_no_such_store(
    proxy: FaultProxy, small: Path, scheme: str, answer: str
) -> None:
    fault, kind = ANSWERS[answer]
    proxy.inject(fault)
    error = error_of(scheme, "list", small)
    assert type(error) is kind
    assert f"is {proxy.url} the right endpoint?" in str(error.hint)
    assert SETTINGS[scheme] in str(error.hint)
    assert "credentials" not in error.what
    if scheme == "gs":
        assert "fake-gcs-server does not" in str(error.hint)


@pytest.mark.parametrize("scheme", URLS)
def test_a_page_of_another_kind_is_no_empty_listing(
    proxy: FaultProxy, small: Path, scheme: str
) -> None:
    proxy.inject(status(200, b"<html>Welcome</html>"))
    assert isinstance(error_of(scheme, "list", small), Malformed)


@pytest.mark.parametrize("scheme", URLS)
def test_where_nobody_listens_the_endpoint_is_named(
    monkeypatch: pytest.MonkeyPatch, small: Path, scheme: str
) -> None:
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    everywhere(monkeypatch, endpoint)
    error = error_of(scheme, "list", small)
    assert isinstance(error, Transient)
    assert endpoint in str(error.hint)


def test_an_endpoint_that_looks_like_a_machines_metadata_is_no_lack_of_credentials() -> None:
    """obstore's errors name the address."""
    text = "Generic S3 error: error sending request\nHttpError {\n    kind: Connect,\n"
    text += 'url: "http://169.254.1.1:9/bucket"'
    with pytest.raises(Transient), translated(Place("s3", "bucket", "chain")):
        raise GenericError(text)


def test_a_bucket_that_a_real_store_does_not_have_is_not_its_endpoints_fault(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, s3_server.endpoint)
    with pytest.raises(NotFound, match="no such bucket") as caught:
        list(open_objects("s3://there-is-none/chain").list())
    assert caught.value.hint == "aws s3 mb s3://there-is-none"


@pytest.mark.parametrize("scheme", ["gs", "az"])
@pytest.mark.parametrize(
    "endpoint",
    ["nonsense host", "ftp://host", "http://", "http://host:0", "http://me:s3cret@h:99999"],
)
def test_an_endpoint_that_is_none(
    monkeypatch: pytest.MonkeyPatch, scheme: str, endpoint: str
) -> None:
    """obstore ends in a panic, or calls it a lack of credentials."""
    everywhere(monkeypatch, endpoint)
    if scheme == "az":
        connection = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    with pytest.raises(UsageError, match="no address of a server") as caught:
        open_bucket(URLS[scheme])
    assert SETTINGS[scheme] in str(caught.value.hint)
    assert "s3cret" not in f"{caught.value} {caught.value.hint} {caught.value.facts()}"


def test_an_endpoint_with_a_password_is_not_repeated(
    proxy: FaultProxy, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.inject(status(403))
    endpoint = proxy.url.replace("http://", "http://me:s3cret@")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"{endpoint}/path?token=s3cret")
    error = error_of("gs", "list", small)
    assert "s3cret" not in f"{error} {error.hint}"
