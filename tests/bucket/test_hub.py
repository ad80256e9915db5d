"""What only the Hub's buckets can be or do, and how their client's failures come out.

The real client against a stand-in. (What every bucket does: test_conformance.py.)
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pexpect
import pytest
from huggingface_hub import errors as theirs
from huggingface_hub import get_session

from deltactl.bucket import open_bucket
from deltactl.bucket.hub import calls
from deltactl.bucket.hub.bucket import HubBucket
from deltactl.bucket.hub.errors import of_xet, plain, retry_after
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Object
from deltactl.core.errors import (
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    UsageError,
)
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support.chains import holds, push_all, states, write_steps
from tests.support.hub import HubStandIn
from tests.support.hub.routes import Entry

CONTENT = b"content" * 1000


@pytest.fixture
def name(hub: HubStandIn) -> str:
    return hub.new_bucket()


@pytest.fixture
def bucket(hub: HubStandIn, name: str) -> HubBucket:
    return HubBucket(f"hf://buckets/{name}/chain")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def full(hub: HubStandIn, bucket: HubBucket, source: Path) -> HubBucket:
    """A bucket with an object in it, and the counters at zero."""
    assert bucket.put("object", source)
    hub.forget_counts()
    return bucket


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Where to fetch to: a place of which nothing else is ever left."""
    directory = tmp_path / "fetched"
    directory.mkdir()
    yield directory / "target"
    assert {path.name for path in directory.iterdir()} <= {"target"}


# The address.


def test_the_address_has_one_spelling(hub: HubStandIn) -> None:
    spellings = ["hf://buckets/a/b/c/d", "hf://buckets/a/b/c/d/", "HF://buckets//a/b//c/d"]
    assert {open_bucket(url).url for url in spellings} == {"hf://buckets/a/b/c/d"}
    assert open_bucket("hf://buckets/a/b/").url == "hf://buckets/a/b"


@pytest.mark.parametrize(
    "url",
    [
        "hf://",
        "hf://team/chains",
        "hf://models/team/chains",
        "hf://datasets/team/chains/x",
        "hf://buckets",
        "hf://buckets/team",
        "hf://buckets/team/../x",
        "hf://buckets/team/chains/../x",
        "hf://buckets/team/chains/./x",
        "hf://buckets/team/chains/a\\b",
        "hf://buckets/te am/chains",
        "hf://buckets/-team/chains",
    ],
)
def test_what_is_no_address_of_a_bucket(hub: HubStandIn, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_bucket(url)
    assert caught.value.expected == "hf://buckets/NAMESPACE/NAME[/PREFIX]"
    assert caught.value.file == url


@pytest.mark.parametrize(
    "url",
    [
        "hf://me:s3cret@buckets/team/chains",
        "hf://s3cret@buckets/team/chains",
        "hf://buckets/s3cret@team/chains",
        "hf://buckets/team/chains?token=s3cret",
        "hf://buckets/team/chains/x#s3cret",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(hub: HubStandIn, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_bucket(url)
    assert "s3cret" not in f"{caught.value} {caught.value.hint} {caught.value.facts()}"
    assert "HF_TOKEN" in str(caught.value.hint) or "environment" in str(caught.value.hint)


def test_a_limit_on_the_rate_cannot_be_kept(hub: HubStandIn) -> None:
    with pytest.raises(UsageError, match="cannot be limited"):
        open_bucket("hf://buckets/team/chains", limit_rate=1000)


@pytest.mark.parametrize("url", ["localhost:80", "ftp://hub", "http://me:s3cret@hub", "http://"])
def test_an_endpoint_that_is_none(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(UsageError, match="HF_ENDPOINT") as caught:
        open_bucket("hf://buckets/team/chains")
    assert "s3cret" not in str(caught.value)


def test_the_library_is_loaded_for_the_hub_alone(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from deltactl.bucket import open_bucket\n"
        f"open_bucket({str(tmp_path)!r})\n"
        "assert not {'huggingface_hub', 'hf_xet', 'httpx2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_offline_mode_is_said_before_anything_is_asked(
    hub: HubStandIn, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path
) -> None:
    bucket = open_bucket(f"hf://buckets/{name}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "deltactl", "push", str(source), bucket.url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "offline mode" in ended.stderr and "unset HF_HUB_OFFLINE" in ended.stderr
    assert not hub.requests


# What each method asks of the Hub; what counts against its limits is in the class's docstring.

API = ("tree", "paths-info", "batch", "token", "info", "create")
DOWNLOADS = ("resolve", "head")


def test_how_much_is_asked(hub: HubStandIn, full: HubBucket, source: Path, target: Path) -> None:
    list(full.list())
    assert (hub.calls(*API), hub.calls(*DOWNLOADS)) == (1, 0)
    hub.forget_counts()
    full.read("object", 0, 10)
    assert (hub.calls(*API), hub.calls(*DOWNLOADS)) == (0, 1)
    assert hub.sent["file"] == 10
    hub.forget_counts()
    full.fetch("object", target)
    assert (hub.calls(*API), hub.calls(*DOWNLOADS)) == (1, 2)
    hub.forget_counts()
    assert full.put("other", source)
    assert (hub.calls(*API), hub.calls(*DOWNLOADS)) == (4, 0)
    hub.forget_counts()
    assert not full.put("other", source)
    assert (hub.calls(*API), hub.calls(*DOWNLOADS)) == (1, 0)


def test_a_range_is_all_that_is_read(hub: HubStandIn, full: HubBucket) -> None:
    assert full.read("object", 5, 5) == b""
    assert not hub.requests
    assert full.read("object", 100, 107) == CONTENT[100:107]
    assert hub.sent["file"] == 7


# Failures. Each has the class, the facts and the hint that it should, and none is tried again by
# the client: who holds the bucket does that.

Operation = Callable[[HubBucket, Path, Path], object]

OPERATIONS: dict[str, Operation] = {
    "list": lambda bucket, source, target: list(bucket.list()),
    "read": lambda bucket, source, target: bucket.read("object", 0, 10),
    "fetch": lambda bucket, source, target: bucket.fetch("object", target),
    "put": lambda bucket, source, target: bucket.put("new", source),
    "delete": lambda bucket, source, target: bucket.delete("object"),
}

HUB_ROUTES = [
    ("list", "tree"),
    ("read", "resolve"),
    ("read", "file"),
    ("fetch", "head"),
    ("put", "paths-info"),
    ("put", "batch"),
    ("delete", "batch"),
]
XET_ROUTES = [
    ("fetch", "token"),
    ("fetch", "reconstruction"),
    ("fetch", "xorb-get"),
    ("put", "token"),
    ("put", "xorb-put"),
    ("put", "shard-put"),
]
NO_BODY = ("head", "resolve")


def fails(
    full: HubBucket, operation: str, source: Path, target: Path, kind: type[DeltactlError]
) -> DeltactlError:
    """The error of an operation, after which everything is as it was."""
    source.write_bytes(os.urandom(3000))  # which the store does not have yet
    with pytest.raises(DeltactlError) as caught:
        OPERATIONS[operation](full, source, target)
    assert type(caught.value) is kind
    file = str(caught.value.file)
    assert file.startswith(full.url) or (kind is NotFound and full.url.startswith(f"{file}/"))
    assert not target.exists()
    return caught.value


def untouched(hub: HubStandIn, full: HubBucket) -> None:
    hub.mend()
    assert list(full.list()) == [Object("object", len(CONTENT))]
    assert full.read("object", 0, 1 << 20) == CONTENT


@pytest.mark.parametrize(("operation", "route"), HUB_ROUTES + XET_ROUTES)
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, NotAllowed),
        (403, NotAllowed),
        (408, Transient),
        (409, Transient),
        (429, Transient),
        (500, Transient),
        (503, Transient),
        (418, DeltactlError),
    ],
)
def test_a_refusal(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    operation: str,
    route: str,
    status: int,
    kind: type[DeltactlError],
) -> None:
    hub.fail(route, status=status, headers={"X-Error-Message": "told to\tfail"})
    error = fails(full, operation, source, target, kind)
    assert f"HTTP {status}" in str(error.found)
    if status == 401:
        assert "hf auth login" in str(error.hint)
    if (operation, route) in HUB_ROUTES:
        assert hub.calls(route) == 1
        assert error.found == f"HTTP {status} (told to fail)"
    untouched(hub, full)


@pytest.mark.parametrize(("operation", "route"), HUB_ROUTES)
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "7"}, 7),
        ({"RateLimit": '"api";r=9;t=55'}, None),
        ({}, None),
    ],
)
def test_how_long_to_wait(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    operation: str,
    route: str,
    headers: dict[str, str],
    seconds: float | None,
) -> None:
    hub.fail(route, status=429, headers=headers)
    error = fails(full, operation, source, target, Transient)
    assert isinstance(error, Transient) and error.retry_after == seconds
    assert hub.calls(route) == 1


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 2026 07:27:30 GMT", 30),
        ("Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 2026 07:29:00 GMT", 0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", "yesterday", None),
        ("soon", "Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("-5", "", None),
        ("٣", "", None),
    ],
)
def test_a_date_to_wait_for(value: str, date: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value, "date": date}) == seconds


@pytest.mark.parametrize(
    ("how", "operation", "route"),
    [("drop", *which) for which in HUB_ROUTES + XET_ROUTES]
    + [("cut", *which) for which in HUB_ROUTES + XET_ROUTES if which[1] not in NO_BODY]
    + [("hang", *which) for which in HUB_ROUTES + XET_ROUTES],
)
def test_a_connection_that_ends_or_goes_silent(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    operation: str,
    route: str,
) -> None:
    hub.fail(route, **{how: True})
    with monkeypatch.context() as patch:
        if how == "hang":
            patch.setattr(calls, "TIMEOUT", 0.2)
        error = fails(full, operation, source, target, Transient)
    if how == "hang" and (operation, route) in HUB_ROUTES:
        assert error.what == "no answer in time"
    if (operation, route, how) == ("put", "batch", "cut"):  # it was done, and the answer lost
        hub.mend()
        assert not full.put("new", source)
        assert full.read("new", 0, 1 << 20) == source.read_bytes()
    elif (operation, route, how) != ("delete", "batch", "cut"):
        untouched(hub, full)


@pytest.mark.parametrize("route", ["file", "tree", "xorb-get", "reconstruction", "batch"])
def test_what_comes_slowly_comes(
    hub: HubStandIn, full: HubBucket, source: Path, target: Path, route: str
) -> None:
    hub.fail(route, trickle=True)
    assert full.read("object", 0, 1 << 20) == CONTENT
    full.fetch("object", target)
    assert target.read_bytes() == CONTENT
    assert full.put("new", source)
    assert len(list(full.list())) == 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_where_nobody_listens(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    gone = HubStandIn()
    gone.close()
    monkeypatch.setenv("HF_ENDPOINT", gone.url)
    elsewhere = HubBucket(full.url)
    error = fails(elsewhere, operation, source, target, Transient)
    assert error.expected == "127.0.0.1"
    assert error.found == "ConnectError"


def test_a_storage_that_is_down_is_asked_three_times(
    hub: HubStandIn, full: HubBucket, source: Path, target: Path
) -> None:
    hub.fail("xorb-get", status=503)
    fails(full, "fetch", source, target, Transient)
    assert hub.calls("xorb-get") == 3
    hub.mend()
    hub.fail("xorb-get", status=503, times=2)
    full.fetch("object", target)
    assert target.read_bytes() == CONTENT


# What is not there.


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_such_bucket(hub: HubStandIn, source: Path, target: Path, operation: str) -> None:
    bucket = HubBucket("hf://buckets/team/nothing/chain")
    error = fails(bucket, operation, source, target, NotFound)
    assert error.hint == "hf buckets create team/nothing"
    assert error.file == "hf://buckets/team/nothing"
    assert not hub.calls("xorb-put", "create")
    assert "team/nothing" not in hub.buckets


def test_a_bucket_that_vanishes_while_an_object_is_put(
    hub: HubStandIn, full: HubBucket, name: str, source: Path, target: Path
) -> None:
    hub.fail("batch", meanwhile=lambda: hub.buckets.pop(name, None) and None, times=1)
    error = fails(full, "put", source, target, NotFound)
    assert error.hint == f"hf buckets create {name}"


@pytest.mark.parametrize(("operation", "route"), [("read", "resolve"), ("fetch", "head")])
def test_no_such_object(
    hub: HubStandIn,
    full: HubBucket,
    name: str,
    source: Path,
    target: Path,
    operation: str,
    route: str,
) -> None:
    hub.buckets[name].clear()
    error = fails(full, operation, source, target, NotFound)
    assert error.what == "no such object" and error.file == f"{full.url}/object"


def test_an_object_whose_content_the_storage_has_lost(
    hub: HubStandIn, full: HubBucket, name: str, source: Path, target: Path
) -> None:
    hub.buckets[name]["chain/object"] = Entry("ab" * 32, 7000, "2026-01-01T00:00:00.000Z")
    error = fails(full, "fetch", source, target, NotFound)
    assert "does not have it" in error.what


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_private_bucket_without_a_token(
    hub: HubStandIn,
    full: HubBucket,
    name: str,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(hub, "private", {name})
    assert "private" in fails(full, operation, source, target, NotFound).what


@pytest.mark.parametrize("operation", ["put", "delete"])
def test_a_token_that_may_only_read(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    assert fails(full, operation, source, target, NotAllowed).hint == "hf auth whoami"
    assert not hub.calls("xorb-put")
    full.fetch("object", target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_token_that_the_hub_does_not_know(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_forged")
    error = fails(full, operation, source, target, NotAllowed)
    assert "hf_forged" not in f"{error} {error.hint} {error.facts()}"


# Answers that make no sense.


@pytest.mark.parametrize(
    "instead",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"7",
        b'"text"',
        b"[7]",
        b"[{}]",
        b'[{"type": "file"}]',
        b'[{"type": "file", "path": 7, "size": 7, "xetHash": ""}]',
        b'[{"type": "file", "path": "chain/a", "size": -1, "xetHash": ""}]',
        b'[{"type": "file", "path": "chain/a", "size": "7", "xetHash": ""}]',
        b'[{"type": "file", "path": "chain/a", "size": 7, "xetHash": "", "mtime": "?"}]',
        b'[{"type": "file", "path": "chain/a", "size": 7, "xetHash": ""},'
        b' {"type": "file", "path": "chain/a", "size": 7, "xetHash": ""}]',
    ],
)
def test_a_listing_that_makes_no_sense(
    hub: HubStandIn, full: HubBucket, source: Path, target: Path, instead: bytes
) -> None:
    hub.fail("tree", instead=instead)
    fails(full, "list", source, target, Malformed)


@pytest.mark.parametrize(
    "rows", [b"[]", b'[{"type": "file", "path": "other/a", "size": 7, "xetHash": ""}]']
)
def test_a_listing_that_goes_in_circles(
    hub: HubStandIn, full: HubBucket, source: Path, target: Path, rows: bytes
) -> None:
    """Its page says that it is the next one itself."""
    link = f'<{hub.url}/api/buckets/{full._id}/tree?again=1>; rel="next"'
    hub.fail("tree", status=200, body=rows, headers={"Link": link})
    hub.forget_counts()
    error = fails(full, "list", source, target, Malformed)
    assert "no end" in str(error)
    assert hub.calls("tree") <= 3


@pytest.mark.parametrize(
    ("operation", "route"), [("put", "paths-info"), ("put", "batch"), ("delete", "batch")]
)
@pytest.mark.parametrize("instead", [b"", b"{", b"null", b"[7]"])
def test_an_answer_that_makes_no_sense(
    hub: HubStandIn,
    full: HubBucket,
    source: Path,
    target: Path,
    operation: str,
    route: str,
    instead: bytes,
) -> None:
    hub.fail(route, instead=instead)
    fails(full, operation, source, target, Malformed)


def test_other_objects_than_were_asked_for_are_not_listed(
    hub: HubStandIn, full: HubBucket, name: str
) -> None:
    row = b'{"type": "file", "path": "other/object", "size": 7, "xetHash": ""}'
    folder = b'{"type": "directory", "path": "chain/deltas"}'
    hub.fail("tree", instead=b"[" + row + b"," + folder + b"]")
    assert list(full.list()) == []


def test_a_server_that_ignores_the_range(
    hub: HubStandIn, full: HubBucket, source: Path, target: Path
) -> None:
    hub.fail("file", status=200, body=CONTENT)
    assert full.read("object", 0, 10) == CONTENT[:10]
    with pytest.raises(Malformed, match="another range"):
        full.read("object", 10, 20)
    hub.mend()
    hub.fail("file", status=206, body=CONTENT[20:30], headers={"Content-Range": "bytes 20-29/7000"})
    with pytest.raises(Malformed, match="another range"):
        full.read("object", 10, 20)


def test_more_than_the_range_is_not_taken(hub: HubStandIn, full: HubBucket) -> None:
    hub.fail("file", status=206, body=CONTENT, headers={"Content-Range": "bytes 0-9/7000"})
    assert full.read("object", 0, 10) == CONTENT[:10]


def test_an_object_in_another_size_than_is_said(
    hub: HubStandIn, full: HubBucket, name: str, source: Path, target: Path
) -> None:
    hub.buckets[name]["chain/object"] = Entry(
        hub.buckets[name]["chain/object"].hash, 8000, "2026-01-01T00:00:00.000Z"
    )
    fails(full, "fetch", source, target, Malformed)
    hub.buckets[name]["chain/object"] = Entry("0" * 64, 0, "2026-01-01T00:00:00.000Z")
    full.fetch("object", target)
    assert target.read_bytes() == b""


def test_a_client_that_does_not_notice_that_something_is_missing(
    full: HubBucket, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(_: object, files: list[tuple[object, Path]]) -> None:
        files[0][1].write_bytes(CONTENT[:-1])

    monkeypatch.setattr(full._api, "download_bucket_files", download)
    error = fails(full, "fetch", source, target, Malformed)
    assert (error.expected, error.found) == (7000, 6999)


def test_what_is_there_is_not_fetched_over(full: HubBucket, target: Path) -> None:
    target.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        full.fetch("object", target)
    assert target.read_bytes() == b"mine"


def test_an_object_that_was_replaced_is_fetched_as_it_is(
    hub: HubStandIn, full: HubBucket, name: str, source: Path, target: Path
) -> None:
    """The client would fetch what a listing once said."""
    list(full.list())
    source.write_bytes(b"other")
    assert full.put("other", source)
    hub.buckets[name]["chain/object"] = hub.buckets[name]["chain/other"]
    full.fetch("object", target)
    assert target.read_bytes() == b"other"


# Creation, which is not atomic.


def entry(hub: HubStandIn, content: bytes, tmp_path: Path) -> Entry:
    """What another's object looks like to the Hub."""
    name = hub.new_bucket()
    path = tmp_path / "theirs"
    path.write_bytes(content)
    assert HubBucket(f"hf://buckets/{name}").put("object", path)
    return hub.buckets[name]["object"]


def test_of_two_who_find_a_name_free_the_later_wins(
    hub: HubStandIn, bucket: HubBucket, name: str, source: Path, tmp_path: Path
) -> None:
    theirs = entry(hub, b"theirs!" * 1000, tmp_path)  # of the same size
    files = hub.buckets[name]
    hub.fail("batch", meanwhile=lambda: files.update({"chain/object": theirs}), times=1)
    assert bucket.put("object", source)
    assert bucket.read("object", 0, 7) == b"content"

    def after() -> None:
        if "chain/second" in files:
            files["chain/second"] = theirs

    hub.fail("paths-info", meanwhile=after)
    assert not bucket.put("second", source)
    assert bucket.read("second", 0, 7) == b"theirs!"


def test_an_object_that_is_gone_when_looked_for(
    hub: HubStandIn, full: HubBucket, name: str, source: Path, target: Path
) -> None:
    def take_away() -> None:
        hub.buckets[name].pop("chain/new", None)

    hub.fail("paths-info", meanwhile=take_away)
    fails(full, "put", source, target, Transient)


def test_why_a_batch_failed_is_said(
    hub: HubStandIn, full: HubBucket, source: Path, target: Path
) -> None:
    hub.fail("batch", failures="the storage is full, hf_abc at https://hub/x?signature=y")
    error = fails(full, "put", source, target, DeltactlError)
    assert error.found == "the storage is full, hf_... at ..."
    error = fails(full, "delete", source, target, DeltactlError)
    assert error.file == f"{full.url}/object"
    full.delete("nothing")


# The words of errors.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\n\x1b[31mb", "a [31mb"),
        ("token hf_AbC123 at HTTPS://user:pw@host/x?sig=1 end", "token hf_... at ... end"),
        ("for url (http://host/x?sig=1) at once", "for url (...) at once"),
        ("x" * 300, "x" * 197 + "..."),
    ],
)
def test_what_a_server_says_is_made_fit_to_be_shown(text: str, shown: str) -> None:
    assert plain(text) == shown


def response(status: int, **headers: str) -> httpx2.Response:
    request = httpx2.Request("GET", "https://hub/api/buckets/a/b?signature=s3cret")
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, headers=names, request=request)


def batch_error() -> theirs.BucketBatchError:
    error = theirs.BucketBatchError("s3cret", response=response(422))
    error.failures = [{"path": "x", "error": "no"}, {"path": "y", "error": "no"}]
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (theirs.BucketNotFoundError("s3cret", response=response(404)), NotFound),
        (batch_error(), DeltactlError),
        (
            theirs.RemoteEntryNotFoundError(
                "s3cret", response=response(404, X_Error_Code="EntryNotFound")
            ),
            NotFound,
        ),
        (theirs.HfHubHTTPError("s3cret", response=response(403)), NotAllowed),
        (theirs.HfHubHTTPError("s3cret", response=response(502)), Transient),
        (theirs.EntryNotFoundError("s3cret"), NotFound),
        (ConnectionError("Network error: https://hub/?s3cret (401 Unauthorized)"), NotAllowed),
        (ConnectionError("Network error: https://hub/?s3cret reset"), Transient),
        (RuntimeError("Task error: (503 Service Unavailable) https://hub/?s3cret"), Transient),
        (RuntimeError("Corrupted Reconstruction: https://hub/?s3cret"), Malformed),
        (RuntimeError("Internal error: https://hub/?s3cret"), Transient),
        (TimeoutError("Timeout: https://hub/?s3cret"), Transient),
        (PermissionError("Authentication error: https://hub/?s3cret"), NotAllowed),
        (FileNotFoundError("Not found: https://hub/?s3cret"), NotFound),
        (httpx2.ConnectError("https://hub/?s3cret"), Transient),
        (httpx2.ReadTimeout("https://hub/?s3cret"), Transient),
        (httpx2.RemoteProtocolError("https://hub/?s3cret"), Transient),
        (httpx2.TooManyRedirects("https://hub/?s3cret"), Malformed),
        (httpx2.DecodingError("https://hub/?s3cret"), Malformed),
        (ValueError("https://hub/?s3cret"), Malformed),
        (KeyError("s3cret"), Malformed),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_every_error_of_theirs_is_one_of_ours(
    hub: HubStandIn, error: Exception, kind: type[DeltactlError]
) -> None:
    with pytest.raises(DeltactlError) as caught, calls.calls("a/b", "the file"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.file in ("the file", "hf://buckets/a/b")
    assert "s3cret" not in f"{caught.value} {caught.value.hint} {caught.value.facts()}"


def test_a_full_disk_is_an_error_of_the_system(hub: HubStandIn) -> None:
    with pytest.raises(OSError, match="No space left") as caught, calls.calls("a/b", "file"):
        raise OSError("I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(of_xet(RuntimeError("reset (os error 104)"), "a/b"), ConnectionError)
    with pytest.raises(OSError, match="Errno 5"), calls.calls("a/b", "file"):
        raise OSError(errno.EIO, "Input/output error")


# What this process has beside us.


def test_others_find_the_shared_client_as_it_was(hub: HubStandIn, full: HubBucket) -> None:
    hub.fail("tree", status=503)
    client = get_session()
    assert client.get(f"{hub.url}/api/buckets/a/b/tree").status_code == 503
    assert client.timeout == httpx2.Timeout(None)
    with pytest.raises(Transient):
        list(full.list())
    assert client is get_session()


def test_a_client_that_was_closed_meanwhile_is_bounded_anew(
    hub: HubStandIn, full: HubBucket
) -> None:
    get_session().close()
    from huggingface_hub import close_session

    close_session()
    hub.fail("tree", status=503)
    with pytest.raises(Transient):
        list(full.list())
    assert hub.calls("tree") == 1


@pytest.mark.parametrize(("theirs", "attempts"), [(None, 2), ("7", 7)])
def test_the_settings_of_xet(theirs: str | None, attempts: int) -> None:
    code = (
        "from deltactl.bucket.hub import calls\n"
        "from hf_xet import XetConfig\n"
        "config = XetConfig()\n"
        f"assert config.get('client.retry_max_attempts') == {attempts}\n"
        "assert config.get('client.retry_base_delay').total_seconds() == 1\n"
        "assert config.get('client.connect_timeout').total_seconds() == 20\n"
        "assert config.get('client.read_timeout').total_seconds() == 120\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_XET_CLIENT")}
    if theirs is not None:
        environment["HF_XET_CLIENT_RETRY_MAX_ATTEMPTS"] = theirs
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_nothing_is_printed_on_a_terminal(hub: HubStandIn, name: str, tmp_path: Path) -> None:
    """The client would show bars there, and the Hub's warnings."""
    hub.fail("paths-info", status=200, body=b"[]", headers={"X-HF-Warning": "x; beware"}, times=1)
    (tmp_path / "source").write_bytes(os.urandom(2_000_000))
    code = (
        "from pathlib import Path\n"
        "from deltactl.bucket import open_bucket\n"
        f"bucket = open_bucket('hf://buckets/{name}')\n"
        "assert bucket.put('object', Path('source'))\n"
        "bucket.fetch('object', Path('target'))\n"
    )
    hidden = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    child = pexpect.spawn(
        sys.executable, ["-c", code], cwd=str(tmp_path), env=environment, timeout=60
    )
    printed = child.read()
    child.close()
    assert (printed, child.exitstatus) == (b"", 0)


# A chain, end to end.


def test_a_chain(hub: HubStandIn, bucket: HubBucket, tmp_path: Path) -> None:
    steps = states(5)
    checkpoints = write_steps(tmp_path, steps)
    push_all(bucket, checkpoints, anchor_every=3)
    assert pull(bucket, tmp_path / "second", step=2).step == 2
    assert holds(tmp_path / "second", steps[1])
    assert pull(bucket, tmp_path / "dest").step == 5
    assert holds(tmp_path / "dest", steps[4])
    for level in ("links", "data", "rebuild"):
        report = verify_bucket(bucket, level=level)
        assert report.ok and not report.unproven and report.steps == 5
    assert not push(checkpoints[4], bucket, step=5).written


def test_a_bit_that_flips_on_the_way_is_found(
    hub: HubStandIn, bucket: HubBucket, tmp_path: Path
) -> None:
    """The client hands it on; the digests of the links are what finds it."""
    push_all(bucket, write_steps(tmp_path, states(3), shards=0))
    hub.fail("xorb-get", flip=True, times=1)
    with pytest.raises(Malformed):
        pull(bucket, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()
    assert pull(bucket, tmp_path / "dest").step == 3


def test_what_the_log_of_a_chain_asks(hub: HubStandIn, bucket: HubBucket, tmp_path: Path) -> None:
    push_all(bucket, write_steps(tmp_path, states(4), shards=0))
    hub.forget_counts()
    assert len(read_chain(bucket).links) == 4
    assert (hub.calls(*API), hub.calls(*DOWNLOADS)) == (1, 4)
