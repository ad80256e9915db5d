"""Listings that may not be whole are refused, by what each real client makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from deltactl.bucket import open_bucket, retrying
from deltactl.bucket.cloud import pages
from deltactl.bucket.cloud.stores import open_objects
from deltactl.bucket.timeouts import Timeouts
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Object
from deltactl.core.errors import Malformed, NotAllowed, Transient
from deltactl.ops.push import push
from tests.support.azure_server import AzureServer
from tests.support.chains import states, write_steps
from tests.support.fault_proxy import FaultProxy, Reply, status
from tests.support.s3_server import BUCKET, S3Server, use_s3

NAMES = [f"deltas/step_{n:06d}.safetensors" for n in range(7)]
LIST = {"s3": "list-type=2", "az": "comp=list", "gs": "list-type=2"}


def rows(names: list[str], prefix: str) -> str:
    """As S3 and Google's XML interface write them."""
    return "".join(
        f"<Contents><Key>{escape(prefix + name)}</Key><Size>7</Size><ETag>x</ETag>"
        "<LastModified>2026-11-30T10:00:00.000Z</LastModified></Contents>"
        for name in names
    )


def page(names: list[str], more: str = "<IsTruncated>false</IsTruncated>", at: str = "c/") -> bytes:
    return f"<ListBucketResult>{more}{rows(names, at)}</ListBucketResult>".encode()


def truncated(token: str = "") -> str:
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f"<IsTruncated>true</IsTruncated>{more}"


def azure(names: list[str], marker: str = "", at: str = "c/") -> bytes:
    blobs = "".join(
        f"<Blob><Name>{at}{name}</Name><Properties><Content-Length>7</Content-Length>"
        "<Last-Modified>Mon, 30 Nov 2026 10:00:00 GMT</Last-Modified><Etag>x</Etag>"
        "<Content-Type>a/b</Content-Type></Properties></Blob>"
        for name in names
    )
    more = f"<NextMarker>{marker}</NextMarker>"
    where = 'ServiceEndpoint="http://x" ContainerName="c"'
    return f"<EnumerationResults {where}><Blobs>{blobs}</Blobs>{more}</EnumerationResults>".encode()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_FIRST_WAIT", 0.01)


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        use_s3(monkeypatch, proxy.url)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        account = AzureServer(f"{proxy.url}/deltactl")
        for name, value in account.environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


def refused(url: str, says: str, seconds: float = 60) -> Malformed:
    bucket = open_objects(url, timeouts=Timeouts(whole=seconds))
    with pytest.raises(Malformed, match=says) as caught:
        list(bucket.list())
    assert caught.value.file == url
    assert caught.value.hint
    return caught.value


# Truncated, and not where.


@pytest.mark.parametrize("names", [NAMES, []], ids=["some", "none"])
def test_a_page_of_s3s_that_goes_on_and_does_not_say_where(
    proxy: FaultProxy, names: list[str]
) -> None:
    proxy.inject(status(200, page(names, truncated())), path=LIST["s3"])
    refused("s3://bucket/c", "goes on, and not from where")
    assert proxy.count("GET") == 1


def test_the_second_page_may_be_it(proxy: FaultProxy) -> None:
    proxy.inject(status(200, page(NAMES[3:], truncated())), path="continuation-token=one")
    proxy.inject(status(200, page(NAMES[:3], truncated("one"))), path=LIST["s3"])
    refused("s3://bucket/c", "goes on, and not from where")


def test_a_real_servers_page_that_loses_its_token(
    s3_server: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Everything else in the reply is as the server wrote it."""
    client, url = s3_server.client(), s3_server.new_url()
    for name in NAMES:
        key = f"{url.removeprefix(f's3://{BUCKET}/')}/{name}"
        client.put_object(Bucket=BUCKET, Key=key, Body=b"content")
    bucket = open_objects(url)
    ask: Any = bucket._listing
    ask._ask.keywords["MaxKeys"] = 3
    assert [item.name for item in bucket.list()] == NAMES
    assert proxy.count("GET", LIST["s3"]) == 3
    token = re.compile(rb"<NextContinuationToken>.*?</NextContinuationToken>")

    def lose(exchange: Any) -> None:
        reply = exchange.forward()
        exchange.reply(Reply(reply.status, reply.headers, token.sub(b"", reply.body)))

    proxy.inject(lose, path=LIST["s3"])
    with pytest.raises(Malformed, match="not from where"):
        list(bucket.list())


def test_a_page_of_googles_that_goes_on_and_does_not_say_where(proxy: FaultProxy) -> None:
    """obstore believes it; that the store has more after its last name tells."""
    proxy.inject(status(200, page(NAMES[4:])), path="start-after=c/" + NAMES[3])
    proxy.inject(status(200, page(NAMES[:4], truncated())), path=LIST["gs"])
    refused("gs://bucket/c", "goes on, and not from where")


def test_an_empty_page_of_an_emulators_that_goes_on(proxy: FaultProxy) -> None:
    proxy.inject(status(200, page([], truncated())), path=LIST["gs"])
    refused("gs://bucket/c", "goes on, and not from where")


def test_an_empty_listing_of_an_emulators(proxy: FaultProxy) -> None:
    proxy.inject(status(200, page([])), path=LIST["gs"])
    assert list(open_objects("gs://bucket/c").list()) == []
    first, second = proxy.requests
    assert second.path.replace("c/", "c%2F") == first.path.replace("c/", "c%2F")


def test_a_listing_of_googles_that_is_whole(proxy: FaultProxy) -> None:
    proxy.inject(status(200, page([])), path="start-after=c/" + NAMES[-1])
    proxy.inject(status(200, page(NAMES[4:])), path="continuation-token=one")
    proxy.inject(status(200, page(NAMES[:4], truncated("one"))), path=LIST["gs"])
    found = list(open_objects("gs://bucket/c").list())
    assert found == [Object(name, 7) for name in NAMES]
    assert {item.modified for item in found} == {1796032800.0}


# In circles.


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("names", [NAMES, []], ids=["the same objects", "nothing"])
def test_the_same_page_for_ever(proxy: FaultProxy, scheme: str, names: list[str]) -> None:
    body = azure(names, "again") if scheme == "az" else page(names, truncated("again"))
    proxy.inject(status(200, body), path=LIST[scheme])
    if names or scheme == "s3":
        refused(f"{scheme}://bucket/c", "no end")
        assert proxy.count("GET") <= 1000 / len(NAMES) + 2
        return
    bucket = open_objects(f"{scheme}://bucket/c", timeouts=Timeouts(whole=0.5))
    with pytest.raises(Transient, match="in time") as caught:
        list(bucket.list())
    assert caught.value.file == f"{scheme}://bucket/c"


def test_empty_pages_that_say_something_new_each_time(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_EMPTY_PAGES", 5)
    count = iter(range(1000))

    def act(exchange: Any) -> None:
        exchange.reply(Reply(200, (), page([], truncated(f"t{next(count)}"))))

    proxy.inject(act, path=LIST["s3"])
    refused("s3://bucket/c", "no end")
    assert proxy.count("GET") == 6


def test_empty_pages_between_others_are_no_end(proxy: FaultProxy) -> None:
    proxy.inject(status(200, page(NAMES[:2], truncated("one"))), path=LIST["s3"], times=1)
    proxy.inject(status(200, page([], truncated("two"))), path="token=one")
    proxy.inject(status(200, page([], truncated("three"))), path="token=two")
    proxy.inject(status(200, page(NAMES[2:])), path="token=three")
    assert [item.name for item in open_objects("s3://bucket/c").list()] == NAMES


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_object_that_is_listed_twice(proxy: FaultProxy, scheme: str) -> None:
    body = azure([*NAMES, NAMES[2]]) if scheme == "az" else page([*NAMES, NAMES[2]])
    proxy.inject(status(200, body), path=LIST[scheme])
    refused(f"{scheme}://bucket/c", "repeats itself")


# What is no listing.

NO_SENSE = {
    "empty": b"",
    "not closed": page(NAMES)[:-9],
    "html": b"<html><body>Welcome</body></html>",
    "no word on whether it goes on": page(NAMES, ""),
    "another word": page(NAMES, "<IsTruncated>perhaps</IsTruncated>"),
    "another prefix": page(NAMES, at="other/"),
    "no size": page(NAMES).replace(b"<Size>7</Size>", b"", 1),
    "a negative size": page(NAMES).replace(b"<Size>7<", b"<Size>-7<", 1),
    "no key": page(NAMES).replace(b"<Key>c/" + NAMES[0].encode() + b"</Key>", b""),
    "no date": page(NAMES).replace(b"2026-11-30T10:00:00.000Z", b"yesterday", 1),
}


@pytest.mark.parametrize("case", NO_SENSE)
def test_what_is_no_listing(proxy: FaultProxy, case: str) -> None:
    proxy.inject(status(200, NO_SENSE[case]), path=LIST["s3"])
    refused("s3://bucket/c", "makes no sense")


def test_an_error_in_a_reply_that_says_200(proxy: FaultProxy) -> None:
    proxy.inject(status(200, b"<Error><Code>InternalError</Code></Error>"), path=LIST["s3"])
    with pytest.raises(Transient, match="InternalError"):
        list(open_objects("s3://bucket/c").list())


def test_keys_that_are_no_names_are_passed_over(proxy: FaultProxy) -> None:
    """Marks of folders, which consoles make, and what other tools put there."""
    keys = ["", "deltas/", "a//b", "./c", "d/../e", "/f", *NAMES]
    proxy.inject(status(200, page(keys)), path=LIST["s3"])
    assert [item.name for item in open_objects("s3://bucket/c").list()] == NAMES


@pytest.mark.parametrize("name", ["a+b c%20d", "ü/名前", "x&y<z>'\"", "#?[]{}*"])
def test_keys_are_taken_as_they_are(proxy: FaultProxy, name: str) -> None:
    proxy.inject(status(200, page([name])), path=LIST["s3"])
    assert list(open_objects("s3://bucket/c").list()) == [Object(name, 7)]
    assert "encoding-type" not in proxy.requests[-1].path


# What it means for a chain.


def test_a_chain_whose_listing_is_cut_is_not_an_older_chain(
    s3_server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    url = s3_server.new_url()
    for step in write_steps(tmp_path / "steps", states(3)):
        push(step, open_bucket(url))
    assert read_chain(open_bucket(url)).tip == 3

    def cut(exchange: Any) -> None:
        """The last object goes, and what the server says of the end is another."""
        body = exchange.forward().body
        last = body.rindex(b"<Contents>")
        body = body[:last] + body[body.index(b"</Contents>", last) + len(b"</Contents>") :]
        body = body.replace(b"<IsTruncated>false<", b"<IsTruncated>true<")
        exchange.reply(Reply(200, (), body))

    proxy.inject(cut, path=LIST["s3"])
    with pytest.raises(Malformed, match="not whole") as caught:
        read_chain(open_bucket(url))
    assert caught.value.file == url


def test_without_keys_a_public_bucket_is_listed(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    proxy.inject(status(200, page(NAMES)), path=LIST["s3"])
    assert len(list(open_objects("s3://bucket/c").list())) == len(NAMES)
    assert "authorization" not in proxy.requests[-1].headers
    proxy.clear()
    with pytest.raises(NotAllowed):
        list(open_objects(f"s3://{BUCKET}/c").list())
