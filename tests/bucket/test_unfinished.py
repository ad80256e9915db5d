"""What processes that were killed leave at stores, where no listing of objects shows it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deltactl.bucket import open_bucket
from deltactl.bucket.cloud.objects import SINGLE_BYTES
from deltactl.chain.store import Bucket
from deltactl.core.errors import Malformed, NotAllowed, Unsupported
from deltactl.format.link_names import delta_name
from deltactl.ops.clean import clean_bucket
from deltactl.ops.push import push
from tests.support.azure_server import AzureServer
from tests.support.chains import states, write_steps
from tests.support.fault_proxy import FaultProxy, status
from tests.support.s3_server import BUCKET, S3Server, use_s3

LARGE = Random(6).randbytes(SINGLE_BYTES + 1)
DAY = 86400.0
PART = "deltas/step_000002/delta-00001-of-00002.safetensors"
"""A name of step 2 that nothing has, as if a first try at it had died."""

PUT = (
    "import sys; from pathlib import Path; from deltactl.bucket.cloud.stores import open_objects; "
    "open_objects(sys.argv[1]).put(sys.argv[2], Path(sys.argv[3]))"
)


class Store:
    """A store behind a proxy, with a chain of three steps at ``url``."""

    def __init__(self, url: str, proxy: FaultProxy, steps: list[Path]) -> None:
        self.url, self.proxy = url, proxy
        for step in steps:
            push(step, self.bucket)

    @property
    def bucket(self) -> Bucket:
        return open_bucket(self.url)

    def killed(self, name: str, path: Path) -> None:
        """A process puts a large object, and is killed before the store makes it visible."""
        arrived = threading.Event()

        def hold(exchange: Any) -> None:
            arrived.set()
            exchange.wait_for_the_end()

        if self.url.startswith("s3"):
            self.proxy.inject(hold, method="POST", path="uploadId=")
        else:  # the copy to its name
            prefix = self.url.rpartition("/")[2]
            self.proxy.inject(hold, method="PUT", path=f"/{prefix}/{name}")
        child = subprocess.Popen([sys.executable, "-c", PUT, self.url, name, str(path)])
        assert arrived.wait(60)
        child.kill()
        child.wait()
        self.proxy.clear()


@pytest.fixture(params=["s3", "az"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    steps = write_steps(tmp_path / "steps", states(3))
    if request.param == "s3":
        s3: S3Server = request.getfixturevalue("s3_server")
        with FaultProxy(s3.endpoint) as proxy:
            use_s3(monkeypatch, proxy.url)
            yield Store(s3.new_url(), proxy, steps)
        return
    azure: AzureServer = request.getfixturevalue("azure_server")
    upstream, _, account = azure.endpoint.rpartition("/")
    with FaultProxy(upstream) as proxy:
        for name, value in AzureServer(f"{proxy.url}/{account}").environment.items():
            monkeypatch.setenv(name, value)
        yield Store(azure.new_url(), proxy, steps)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path


def at(days: float) -> float:
    return time.time() + days * DAY


def test_the_upload_of_a_process_that_was_killed(store: Store, large: Path) -> None:
    names = {item.name for item in store.bucket.list()}
    store.killed(PART, large)
    assert {item.name for item in store.bucket.list()} == names, "no listing shows it"
    (item,) = store.bucket.unfinished()
    assert (item.kind, item.name) == ("upload", PART)
    assert item.size == len(LARGE)
    assert abs(item.touched - time.time()) < 600

    (young,) = clean_bucket(store.bucket).items
    assert (young.kind, young.step, young.action) == ("upload", 2, "keep")
    (dry,) = clean_bucket(store.bucket, now=at(2), dry_run=True).items
    assert dry.action == "remove"
    assert len(list(store.bucket.unfinished())) == 1
    report = clean_bucket(store.bucket, now=at(2))
    assert [found.action for found in report.items] == ["remove"]
    assert report.errors == ()
    assert list(store.bucket.unfinished()) == []
    assert {item.name for item in store.bucket.list()} == names
    assert store.bucket.put(PART, large), "and the name is as free as it was"


def test_the_upload_of_a_step_above_the_tip_is_left(store: Store, large: Path) -> None:
    store.killed(delta_name(4), large)
    (item,) = clean_bucket(store.bucket, now=at(1000)).items
    assert (item.step, item.action) == (4, "keep")
    assert len(list(store.bucket.unfinished())) == 1
    assert store.bucket.put(delta_name(4), large), "who publishes it is not in its way"


def test_an_upload_that_goes_on_is_left(store: Store, large: Path) -> None:
    """It was old when it was listed; then a part comes."""
    store.killed(PART, large)
    (item,) = store.bucket.unfinished()
    assert store.bucket.discard(item, item.touched) == "in use"
    assert len(list(store.bucket.unfinished())) == 1
    assert store.bucket.discard(item, item.touched + 1) == "removed"
    assert store.bucket.discard(item, item.touched + 1) == "removed", "by whomever"
    assert list(store.bucket.unfinished()) == []


# At S3 alone.


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        use_s3(monkeypatch, proxy.url)
        yield proxy


def page(url: str, names: list[str], marks: str) -> bytes:
    """What S3 answers; SeaweedFS 4.48 gives no markers with its pages."""
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    uploads = "".join(
        f"<Upload><Key>{prefix}/{name}</Key><UploadId>id-of-{name}</UploadId>"
        "<Initiated>2026-11-30T10:00:00.000Z</Initiated></Upload>"
        for name in names
    )
    text = f"<ListMultipartUploadsResult>{marks}{uploads}</ListMultipartUploadsResult>"
    return text.encode()


def test_many_uploads_come_in_pages(s3_server: S3Server, proxy: FaultProxy) -> None:
    url = s3_server.new_url()
    names = [f"deltas/step_{n:06d}.safetensors" for n in range(5)]
    more = "<IsTruncated>true</IsTruncated><NextKeyMarker>k{0}</NextKeyMarker>"
    more += "<NextUploadIdMarker>u{0}</NextUploadIdMarker>"
    first, second = page(url, names[:2], more.format(1)), page(url, names[2:4], more.format(2))
    last = page(url, names[4:], "<IsTruncated>false</IsTruncated>")
    parts = b"<ListPartsResult><IsTruncated>false</IsTruncated></ListPartsResult>"
    proxy.inject(status(200, parts), method="GET", path="uploadId=")
    proxy.inject(status(200, first), method="GET", path="uploads", times=1)
    proxy.inject(status(200, second), method="GET", path="key-marker=k1", times=1)
    proxy.inject(status(200, last), method="GET", path="key-marker=k2", times=1)
    found = list(open_bucket(url).unfinished())
    assert [item.name for item in found] == names
    assert {item.touched for item in found} == {1796032800.0}
    assert proxy.count("GET", "upload-id-marker=u2") == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
         b"</ListMultipartUploadsResult>", "not from where"),
        (b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
         b"<NextKeyMarker>k</NextKeyMarker></ListMultipartUploadsResult>", "no end"),
        (b"<Hello/>", "no sense"),
    ],
)  # fmt: skip
def test_a_listing_of_uploads_that_is_not_whole_is_refused(
    s3_server: S3Server, proxy: FaultProxy, body: bytes, says: str
) -> None:
    proxy.inject(status(200, body), method="GET", path="uploads")
    with pytest.raises(Malformed, match=says):
        list(open_bucket(s3_server.new_url()).unfinished())
    assert proxy.count("GET") <= 3


@pytest.mark.parametrize(("code", "kind"), [(403, NotAllowed), (501, Unsupported)])
def test_uploads_that_may_not_be_listed(
    s3_server: S3Server,
    proxy: FaultProxy,
    code: int,
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    bucket = open_bucket(s3_server.new_url())
    for step in write_steps(tmp_path / "steps", states(2)):
        push(step, bucket)
    proxy.inject(status(code), method="GET", path="uploads")
    report = clean_bucket(bucket, now=at(2))
    assert [type(error) for error in report.errors] == [kind]
