"""What only an object store can do wrong. (What every bucket does: test_conformance.py.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deltactl.bucket import open_bucket
from deltactl.bucket.cloud.objects import PART_BYTES, SINGLE_BYTES, ObjectBucket
from deltactl.bucket.cloud.stores import azure_settings, open_objects, parse
from deltactl.bucket.throttle import Throttle
from deltactl.bucket.timeouts import Timeouts
from deltactl.core.errors import (
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    Unsupported,
    UsageError,
)
from tests.support.fault_proxy import (
    Fault,
    FaultProxy,
    drop,
    flip,
    flip_request,
    hang,
    lose_reply,
    refuse,
    shorten,
    status,
    trickle,
    truncate,
)
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, free_ports, use_s3

CONTENT = Random(3).randbytes(50_000)
LARGE = Random(4).randbytes(SINGLE_BYTES + PART_BYTES + 1)
IMPATIENT = Timeouts(connect=5, read=0.5, whole=1.5)


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return s3_server.new_url()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path


@pytest.fixture
def direct(s3_server: S3Server, url: str) -> ObjectBucket:
    """The bucket without the proxy, to make what is there and to see what came of it."""
    with pytest.MonkeyPatch.context() as patch:
        use_s3(patch, s3_server.endpoint)
        return open_objects(url)


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        use_s3(monkeypatch, proxy.url)
        yield proxy


def listed(bucket: ObjectBucket) -> dict[str, int]:
    return {item.name: item.size for item in bucket.list()}


def checked(caught: pytest.ExceptionInfo[DeltactlError]) -> DeltactlError:
    """The error, after what has to be true of all of them."""
    error = caught.value
    text = f"{error} {error.hint} {error.facts()} {error!r}"
    for secret in (ACCESS_KEY, SECRET_KEY, "Signature=", "Authorization", "X-Amz-", "Debug"):
        assert secret not in text
    assert error.file is not None and error.file.startswith("s3://")
    assert error.hint
    return error


METHODS: dict[str, Callable[[ObjectBucket, Path], object]] = {
    "list": lambda bucket, _: list(bucket.list()),
    "read": lambda bucket, _: bucket.read("object", 100, 40_000),
    "fetch": lambda bucket, path: bucket.fetch("object", path.with_name("target")),
    "put": lambda bucket, path: bucket.put("new", path),
    "delete": lambda bucket, _: bucket.delete("object"),
}
ECHO = f"<Error><Code>{SECRET_KEY}</Code><Message>Signature={ACCESS_KEY}</Message></Error>".encode()

# Of each method, what each fault of its one request is. None: nothing is wrong.
EVERYWHERE: dict[str, tuple[Fault, type[DeltactlError]]] = {
    "500": (status(500), Transient),
    "502": (status(502, b"<html>no gateway</html>"), Transient),
    "503": (status(503, b"<Error><Code>SlowDown</Code></Error>"), Transient),
    "429": (status(429), Transient),
    "408": (status(408), Transient),
    "400 RequestTimeout": (status(400, b"<Error><Code>RequestTimeout</Code></Error>"), Transient),
    "400 ExpiredToken": (status(400, b"<Error><Code>ExpiredToken</Code></Error>"), NotAllowed),
    "401": (status(401), NotAllowed),
    "403": (status(403, ECHO), NotAllowed),
    "404 NoSuchBucket": (status(404, b"<Error><Code>NoSuchBucket</Code></Error>"), NotFound),
    "400": (status(400, ECHO), Unsupported),
    "501": (status(501), Unsupported),
    "301": (status(301), UsageError),
    "refused": (refuse(), Transient),
    "reply lost": (lose_reply(), Transient),
    "hung": (hang(), Transient),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", EVERYWHERE)
def test_what_each_fault_is(
    direct: ObjectBucket, proxy: FaultProxy, url: str, source: Path, method: str, fault: str
) -> None:
    direct.put("object", source)
    bucket = open_objects(url, timeouts=IMPATIENT if fault == "hung" else Timeouts())
    injected, kind = EVERYWHERE[fault]
    proxy.inject(injected)
    if kind is NotFound and method == "delete":  # what is not there need not be removed
        bucket.delete("object")
        return
    before = set(source.parent.iterdir())
    with pytest.raises(kind) as caught:
        METHODS[method](bucket, source)
    checked(caught)
    assert type(caught.value) is kind
    assert set(source.parent.iterdir()) == before
    done = fault == "reply lost"  # the server did it; only nobody heard
    left = {"object"} - ({"object"} if done and method == "delete" else set())
    assert set(listed(direct)) == left | ({"new"} if done and method == "put" else set())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "fault", [status(500), status(503), refuse()], ids=["500", "503", "refused"]
)
def test_after_a_fault_the_same_bucket_works(
    direct: ObjectBucket, proxy: FaultProxy, url: str, source: Path, method: str, fault: Fault
) -> None:
    direct.put("object", source)
    bucket = open_objects(url)
    proxy.inject(fault, times=3)
    for _ in range(3):
        with pytest.raises(Transient):
            METHODS[method](bucket, source)
    METHODS[method](bucket, source)


@pytest.mark.parametrize(
    ("method", "fault", "kind"),
    [
        ("read", status(404), NotFound),
        ("fetch", status(404), NotFound),
        ("list", status(404), NotFound),
        ("read", status(409), Transient),
        ("fetch", status(412), Transient),
        ("list", status(409), Transient),
        ("delete", status(409), Transient),
        ("list", status(200, b"Welcome to the network of this hotel"), Malformed),
        ("list", shorten(100), Malformed),
    ],
)
def test_what_depends_on_the_method(
    direct: ObjectBucket,
    proxy: FaultProxy,
    url: str,
    source: Path,
    method: str,
    fault: Fault,
    kind: type[DeltactlError],
) -> None:
    direct.put("object", source)
    proxy.inject(fault)
    with pytest.raises(kind) as caught:
        METHODS[method](open_objects(url), source)
    assert type(caught.value) is kind
    assert not source.with_name("target").exists()


@pytest.mark.parametrize("code", [409, 412])
def test_a_conflict_over_a_name_that_nobody_has(
    proxy: FaultProxy, url: str, source: Path, direct: ObjectBucket, code: int
) -> None:
    """AWS says 409 where two requests meet, whatever comes of them; False would be a lie."""
    proxy.inject(status(code), method="PUT", times=1)
    bucket = open_objects(url)
    with pytest.raises(Transient) as caught:
        bucket.put("object", source)
    checked(caught)
    assert bucket.put("object", source)


CUT = {
    "reset in the body": drop(1000),
    "ended in the body": truncate(1000),
    "shorter than asked": shorten(1000),
    "nothing of the body": truncate(0),
    "slow": trickle(0.4),
}


@pytest.mark.parametrize("method", ["read", "fetch"])
@pytest.mark.parametrize("fault", CUT)
def test_a_body_that_does_not_come_whole(
    direct: ObjectBucket, proxy: FaultProxy, url: str, source: Path, method: str, fault: str
) -> None:
    direct.put("object", source)
    bucket = open_objects(url, timeouts=IMPATIENT if fault == "slow" else Timeouts())
    proxy.inject(CUT[fault])
    with pytest.raises(Transient) as caught:
        METHODS[method](bucket, source)
    checked(caught)
    assert not source.with_name("target").exists()


@pytest.mark.parametrize("fault", [*CUT, "500", "403"])
def test_one_range_of_many_fails(
    direct: ObjectBucket, proxy: FaultProxy, url: str, large: Path, fault: str
) -> None:
    direct.put("object", large)
    injected = CUT[fault] if fault in CUT else EVERYWHERE[fault][0]
    proxy.inject(injected, method="GET", skip=2)
    bucket = open_objects(url, timeouts=IMPATIENT if fault == "slow" else Timeouts())
    with pytest.raises(NotAllowed if fault == "403" else Transient) as caught:
        bucket.fetch("object", large.with_name("target"))
    checked(caught)
    assert not large.with_name("target").exists()
    proxy.clear()
    bucket.fetch("object", large.with_name("target"))
    assert large.with_name("target").read_bytes() == LARGE


def test_an_object_that_is_exchanged_while_it_is_fetched(
    direct: ObjectBucket, proxy: FaultProxy, url: str, large: Path
) -> None:
    direct.put("object", large)

    def exchange(found: Any) -> None:
        reply = found.forward()
        direct.delete("object")
        large.write_bytes(LARGE[::-1])
        direct.put("object", large)
        found.reply(reply)

    proxy.inject(exchange, method="GET", times=1)
    target = large.with_name("target")
    with pytest.raises(Transient, match="changed"):
        open_objects(url, jobs=1).fetch("object", target)
    assert not target.exists()


def test_a_file_that_is_there_is_not_fetched_over(
    direct: ObjectBucket, source: Path, tmp_path: Path
) -> None:
    direct.put("object", source)
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        direct.fetch("object", target)
    assert target.read_bytes() == b"mine"


def test_flipped_bits_are_for_the_caller_to_find(
    direct: ObjectBucket, proxy: FaultProxy, url: str, source: Path
) -> None:
    """As the protocol says: the caller checks digests."""
    direct.put("object", source)
    proxy.inject(flip(7))
    found = open_objects(url).read("object", 0, 50_000)
    assert found[7] == CONTENT[7] ^ 1 and found[8:] == CONTENT[8:]


@pytest.mark.parametrize("name", ["source", "large"])
def test_bits_that_flip_on_the_way_to_the_server_are_found(
    direct: ObjectBucket, proxy: FaultProxy, url: str, name: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(name)
    proxy.inject(flip_request(7), method="PUT")
    with pytest.raises(Transient) as caught:
        open_objects(url).put("object", path)
    checked(caught)
    assert listed(direct) == {}


@pytest.mark.parametrize("name", ["source", "large"])
def test_a_put_whose_reply_was_lost_is_known_again(
    direct: ObjectBucket, proxy: FaultProxy, url: str, name: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(name)
    bucket, other = open_objects(url), open_objects(url)
    last = "PUT" if name == "source" else "POST"
    proxy.inject(lose_reply(), method=last, path="object", skip=0 if name == "source" else 1)
    with pytest.raises(Transient):
        bucket.put("object", path)
    proxy.clear()
    assert not other.put("object", path)
    assert bucket.put("object", path)
    assert not bucket.put("object", path)
    assert direct.read("object", 0, 1 << 30) == path.read_bytes()


def test_a_put_whose_reply_was_lost_and_that_another_won(
    direct: ObjectBucket, proxy: FaultProxy, url: str, source: Path, tmp_path: Path
) -> None:
    bucket = open_objects(url)
    proxy.inject(refuse(), method="PUT")
    with pytest.raises(Transient):
        bucket.put("object", source)
    proxy.clear()
    (tmp_path / "other").write_bytes(b"other")
    assert direct.put("object", tmp_path / "other")
    assert not bucket.put("object", source)


def unfinished(server: S3Server, bucket: ObjectBucket) -> list[str]:
    prefix = bucket.url.removeprefix(f"s3://{BUCKET}/")
    found = server.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]


def test_one_failure_of_a_part_is_no_failure(
    proxy: FaultProxy, url: str, large: Path, direct: ObjectBucket
) -> None:
    proxy.inject(status(503), method="PUT", path="partNumber=2", times=1)
    assert open_objects(url).put("object", large)
    assert direct.read("object", 0, 1 << 30) == LARGE


@pytest.mark.parametrize(
    ("fault", "method", "query", "kind"),
    [
        (status(500), "POST", "uploads", Transient),
        (status(403), "POST", "uploads", NotAllowed),
        (status(503), "PUT", "partNumber=2", Transient),
        (status(403), "PUT", "partNumber=2", NotAllowed),
        (refuse(), "PUT", "partNumber=3", Transient),
        (hang(), "PUT", "partNumber=1", Transient),
        (status(500), "POST", "uploadId", Transient),
        (status(403), "POST", "uploadId", NotAllowed),
        (status(409), "POST", "uploadId", Transient),
    ],
)
def test_a_large_put_that_fails_leaves_nothing(
    s3_server: S3Server,
    direct: ObjectBucket,
    proxy: FaultProxy,
    url: str,
    large: Path,
    fault: Fault,
    method: str,
    query: str,
    kind: type[DeltactlError],
) -> None:
    proxy.inject(fault, method=method, path=query)
    with pytest.raises(kind) as caught:
        open_objects(url, timeouts=Timeouts(read=2)).put("object", large)
    checked(caught)
    assert listed(direct) == {}
    assert unfinished(s3_server, direct) == []


@pytest.mark.parametrize("code", [301, 307])
def test_a_large_put_to_a_bucket_in_another_region(
    proxy: FaultProxy, url: str, large: Path, code: int
) -> None:
    """botocore would ask for the region, and be redirected, for ever."""
    proxy.inject(status(code), method="POST")
    proxy.inject(status(code), method="HEAD", path="?")
    with pytest.raises(UsageError, match="another region") as caught:
        open_objects(url).put("object", large)
    checked(caught)


def test_a_large_put_of_a_name_that_is_taken_meanwhile(
    s3_server: S3Server, direct: ObjectBucket, proxy: FaultProxy, url: str, large: Path
) -> None:
    small = large.with_name("small")
    small.write_bytes(b"small")

    def take_the_name(found: Any) -> None:
        assert direct.put("object", small)
        found.reply(found.forward())

    proxy.inject(take_the_name, method="POST", path="uploadId", times=1)
    assert not open_objects(url).put("object", large)
    assert listed(direct) == {"object": 5}
    assert unfinished(s3_server, direct) == []


def test_a_name_that_is_taken_costs_no_upload(
    direct: ObjectBucket, proxy: FaultProxy, url: str, large: Path, source: Path
) -> None:
    direct.put("object", source)
    assert not open_objects(url).put("object", large)
    assert {request.method for request in proxy.requests} == {"HEAD"}


def test_a_file_that_becomes_shorter_while_it_is_sent(
    direct: ObjectBucket, proxy: FaultProxy, url: str, large: Path, s3_server: S3Server
) -> None:
    def cut(found: Any) -> None:
        with open(large, "r+b") as file:
            file.truncate(1000)
        found.reply(found.forward())

    proxy.inject(cut, method="POST", path="uploads", times=1)
    with pytest.raises(Malformed, match="shorter"):
        open_objects(url).put("object", large)
    assert listed(direct) == {}
    assert unfinished(s3_server, direct) == []


def test_wrong_credentials(
    proxy: FaultProxy, url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for method in METHODS.values():
        with pytest.raises(NotAllowed, match="SignatureDoesNotMatch") as caught:
            method(open_objects(url), source)
        assert "AWS_PROFILE" in str(checked(caught).hint)


def test_no_credentials(
    proxy: FaultProxy, url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for method in METHODS.values():
        with pytest.raises(NotAllowed) as caught:
            method(open_objects(url), source)
        assert "AWS_PROFILE" in str(checked(caught).hint)
    assert not any("authorization" in request.headers for request in proxy.requests)


def test_keys_and_endpoint_of_a_profile(
    proxy: FaultProxy,
    s3_server: S3Server,
    url: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[trainer]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"
    )
    (tmp_path / "config").write_text(
        f"[profile trainer]\nregion = eu-central-1\nendpoint_url = {proxy.url}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    assert open_objects(url).put("object", source)
    assert "/eu-central-1/s3/" in proxy.requests[-1].headers["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError) as caught:
        open_objects(url)
    checked(caught)


def test_the_endpoint_of_s3_alone_comes_first(
    proxy: FaultProxy, url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    assert open_objects(url).put("object", source)
    assert proxy.count("PUT") == 1


def test_nobody_listens(url: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, f"http://127.0.0.1:{free_ports(1)[0]}")
    for method in METHODS.values():
        with pytest.raises(Transient, match="cannot be reached") as caught:
            method(open_objects(url), source)
        checked(caught)


def test_no_such_bucket(s3_server: S3Server, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, s3_server.endpoint)
    bucket = open_objects("s3://there-is-none/chain")
    for method in ("list", "read", "fetch", "put"):
        with pytest.raises(NotFound, match="no such bucket") as caught:
            METHODS[method](bucket, source)
        assert checked(caught).hint == "aws s3 mb s3://there-is-none"


@pytest.mark.parametrize(
    ("url", "spelling"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket//a", "gs://bucket/a"),
        ("az://container/run 1/ü%20", "az://container/run 1/ü%20"),
    ],
)
def test_one_spelling_of_each_address(url: str, spelling: str) -> None:
    assert parse(url).url == spelling
    assert parse(spelling).url == spelling


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:s3cret@bucket/chain",
        "s3://s3cret@bucket/chain",
        "s3://bucket/chain?token=s3cret",
        "gs://bucket?s3cret",
        "az://container/chain#s3cret",
        "az://container:s3cret/chain",
        "s3:///s3cret",
        "s3://",
    ],
)
def test_what_is_no_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_bucket(url)
    error = caught.value
    assert "s3cret" not in f"{error} {error.hint} {error.facts()}"


@pytest.mark.parametrize("url", ["s3://b", "s3://", "gs://ab/chain", "az://.../chain", "s3://a b"])
def test_a_name_that_no_bucket_has(url: str) -> None:
    with pytest.raises(UsageError, match="no name of a bucket"):
        open_bucket(url)


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:9000",
        "http://",
        "ftp://127.0.0.1/",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://me:s3cret@127.0.0.1:99999",
        "no address",
    ],
)
def test_an_endpoint_that_is_none_is_not_taken_for_bad_credentials(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, endpoint)
    with pytest.raises(UsageError, match="endpoint") as caught:
        open_bucket("s3://bucket/chain")
    assert "AWS_ENDPOINT_URL" in str(checked(caught).hint)
    assert "s3cret" not in f"{caught.value} {caught.value.hint} {caught.value.facts()}"


@pytest.mark.parametrize("prefix", ["a//b", "a/../b", "..", "./a"])
def test_a_prefix_is_a_plain_path(prefix: str) -> None:
    with pytest.raises(UsageError):
        open_bucket(f"s3://bucket/{prefix}")


def test_what_azure_tools_read() -> None:
    found = azure_settings(
        {
            "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=http;AccountName=me;"
            "AccountKey=a2V5==;BlobEndpoint=http://127.0.0.1:10000/me;"
        }
    )
    assert found == {
        "account_name": "me",
        "account_key": "a2V5==",
        "endpoint": "http://127.0.0.1:10000/me",
    }
    assert azure_settings({"AZURE_STORAGE_ACCOUNT": "me", "AZURE_STORAGE_SAS_TOKEN": "sig"}) == {
        "account_name": "me",
        "sas_key": "sig",
    }
    assert azure_settings({}) == {}


def test_a_limit_holds_for_all_that_is_sent_and_received(
    s3_server: S3Server, url: str, large: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, s3_server.endpoint)
    slept: list[float] = []
    bucket = open_objects(url, throttle=Throttle(1000, clock=lambda: 0.0, sleep=slept.append))

    def bytes_taken() -> int:
        """Of all takes but the first, each sleeps until the ones before it are paid for."""
        bucket.read("last", 0, 1)
        return round(max(slept) * 1000)

    bucket.put("last", source)
    start = bytes_taken()
    bucket.put("large", large)
    sent = bytes_taken()
    assert sent - start == len(LARGE) + 1
    bucket.fetch("large", large.with_name("target"))
    assert bytes_taken() - sent == len(LARGE) + 1


def test_help_does_not_wait_for_any_store() -> None:
    program = (
        "import sys\n"
        "from deltactl.bucket import open_bucket\n"
        "open_bucket('directory')\n"
        "import deltactl.cli.app\n"
        "print(*(m for m in ('obstore', 'botocore') if m in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
