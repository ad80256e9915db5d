"""What is tried again, how long, and what is said in the end; the time is the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deltactl.bucket import _remote, open_bucket
from deltactl.bucket.local import LocalBucket
from deltactl.bucket.retrying import RetryingBucket, eager
from deltactl.chain.store import Object
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotAllowed, NotFound, Transient

CONTENT = Random(1).randbytes(9_000_000)


class Time:
    """A clock that stands still but for sleeping."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Shaky(LocalBucket):
    """Every call fails with the next of ``errors`` while there are any; ``late``: a put does what
    it should, and fails then."""

    def __init__(self, root: Path, late: bool = False) -> None:
        super().__init__(root)
        self.errors: list[DeltactlError] = []
        self.calls = 0
        self._late = late

    def _fail(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def list(self) -> Iterator[Object]:
        yield from super().list()
        self._fail()

    def read(self, name: str, start: int, stop: int) -> bytes:
        self._fail()
        return super().read(name, start, stop)

    def fetch(self, name: str, target: Path) -> None:
        self._fail()
        super().fetch(name, target)

    def put(self, name: str, source: Path) -> bool:
        if self._late:
            done = super().put(name, source)
            self._fail()
            return done
        self._fail()
        return super().put(name, source)

    def delete(self, name: str) -> None:
        self._fail()
        super().delete(name)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def over(bucket: LocalBucket, time: Time, draw: float = 1.0, **options: Any) -> RetryingBucket:
    return RetryingBucket(bucket, clock=time.clock, sleep=time.sleep, draw=lambda: draw, **options)


def busy(times: int, retry_after: float | None = None) -> list[DeltactlError]:
    errors = []
    for _ in range(times):
        error = Transient("the server is busy", file="object")
        error.retry_after = retry_after
        errors.append(error)
    return list[DeltactlError](errors)


CALLS: dict[str, Callable[[RetryingBucket, Path], object]] = {
    "list": lambda bucket, path: list(bucket.list()),
    "read": lambda bucket, path: bucket.read("there", 2, 5),
    "fetch": lambda bucket, path: bucket.fetch("there", path.with_name("target")),
    "put": lambda bucket, path: bucket.put("new", path),
    "delete": lambda bucket, path: bucket.delete("there"),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_tried_again(tmp_path: Path, source: Path, time: Time, call: str) -> None:
    inner = Shaky(tmp_path / "bucket")
    inner.put("there", source)
    inner.errors, inner.calls = busy(4), 0
    found = CALLS[call](over(inner, time), source)
    assert inner.calls == 5
    assert time.slept == [1, 2, 4, 8]
    if call == "list":
        assert found == [Object("there", len(CONTENT))]
    elif call == "read":
        assert found == CONTENT[2:5]
    elif call == "put":
        assert found is True
        assert LocalBucket(tmp_path / "bucket").read("new", 0, 1 << 30) == CONTENT
    elif call == "fetch":
        assert source.with_name("target").read_bytes() == CONTENT
    else:
        assert list(LocalBucket(tmp_path / "bucket").list()) == []


@pytest.mark.parametrize("call", CALLS)
def test_it_gives_up_and_says_how_often_it_tried(
    tmp_path: Path, source: Path, time: Time, call: str
) -> None:
    inner = Shaky(tmp_path / "bucket")
    inner.put("there", source)
    inner.errors, inner.calls = busy(9), 0
    with pytest.raises(Transient, match=r"the server is busy \(tried 7 times\)") as caught:
        CALLS[call](over(inner, time), source)
    assert caught.value.file == "object"
    assert inner.calls == 7, "for a minute: the seventh wait would end after that"
    assert not source.with_name("target").exists()


@pytest.mark.parametrize("kind", [NotFound, NotAllowed, Malformed, Conflict, DeltactlError])
def test_other_errors_are_not_tried_again(
    tmp_path: Path, source: Path, time: Time, kind: type[DeltactlError]
) -> None:
    inner = Shaky(tmp_path / "bucket")
    inner.errors = [kind("no")]
    with pytest.raises(kind, match=r"^no$"):
        over(inner, time).read("there", 0, 1)
    assert (inner.calls, time.slept) == (1, [])


def test_the_waits_are_random_parts_of_a_time_that_doubles(tmp_path: Path, time: Time) -> None:
    inner = Shaky(tmp_path)
    inner.errors = busy(6)
    with pytest.raises(NotFound):
        over(inner, time, draw=0.25, tries=9).read("nothing", 0, 1)
    assert time.slept == [0.25, 0.5, 1, 2, 4, 5]


def test_who_publishes_is_soon_there_when_the_bucket_is_back(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of 25 seconds; it has as much patience as others."""
    monkeypatch.setattr("deltactl.bucket.retrying.time", None)  # no clock but the test's own
    bucket = eager(Shaky(tmp_path))
    bucket._clock, bucket._sleep, bucket._draw = time.clock, time.sleep, lambda: 1.0
    began, tries = time.now, []

    def once() -> None:
        tries.append(time.now)
        if time.now - began < 25:
            raise Transient("away")

    bucket._again("ask", once)
    assert time.now - began <= 25 + 5
    assert max(time.slept) == 5
    for draw in (0.25, 1.0):
        bucket._draw = lambda draw=draw: draw
        began = time.now

        def never() -> None:
            raise Transient("away")

        with pytest.raises(Transient, match="tried"):
            bucket._again("ask", never)
        assert time.now - began > 45


def test_it_says_once_what_it_waits_for_and_how_long_at_most(
    tmp_path: Path, source: Path, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Shaky(tmp_path / "bucket")
    inner.put("there", source)
    bucket = over(inner, time)
    inner.errors = busy(2)
    list(bucket.list())
    assert (time.slept, caplog.messages) == ([1, 2], []), "not worth a word"
    inner.errors = busy(5)
    list(bucket.list())
    inner.errors = busy(5)
    list(bucket.list())  # soon after: of the same outage
    word = "waiting for the bucket, for up to 57 s more: object: the server is busy"
    assert caplog.messages == [word]
    time.now += 60
    inner.errors = busy(5)
    list(bucket.list())
    assert caplog.messages == [word, word]


def test_a_server_that_asks_for_time_gets_it(tmp_path: Path, time: Time) -> None:
    inner = Shaky(tmp_path)
    inner.errors = busy(2, retry_after=7.5)
    with pytest.raises(NotFound):
        over(inner, time, draw=0.0).read("nothing", 0, 1)
    assert time.slept == [7.5, 7.5]


def test_a_server_that_asks_for_more_than_there_is_patience(tmp_path: Path, time: Time) -> None:
    inner = Shaky(tmp_path)
    inner.errors = busy(2, retry_after=300)
    with pytest.raises(Transient, match="tried once") as caught:
        over(inner, time).read("nothing", 0, 1)
    assert time.slept == []
    assert caught.value.hint == "the server asks for 300 seconds of quiet"


def test_the_whole_time_is_bounded(tmp_path: Path, time: Time) -> None:
    inner = Shaky(tmp_path)
    inner.errors = busy(9, retry_after=25)
    with pytest.raises(Transient, match="tried 3 times"):
        over(inner, time).read("nothing", 0, 1)
    assert sum(time.slept) == 50


# A put whose answer was lost.


def test_a_put_that_went_well_though_it_failed(tmp_path: Path, source: Path, time: Time) -> None:
    inner = Shaky(tmp_path / "bucket", late=True)
    inner.errors = busy(1)
    assert over(inner, time).put("object", source)
    assert LocalBucket(tmp_path / "bucket").read("object", 0, 1 << 30) == CONTENT


@pytest.mark.parametrize("size", [0, 1 << 22, 1 << 23])
def test_of_any_size(tmp_path: Path, source: Path, time: Time, size: int) -> None:
    source.write_bytes(CONTENT[:size])
    inner = Shaky(tmp_path / "bucket", late=True)
    inner.errors = busy(1)
    assert over(inner, time).put("object", source)


@pytest.mark.parametrize(
    "other",
    [CONTENT[:-1], CONTENT + b"x", b"", CONTENT[:-1] + b"\0", b"\0" + CONTENT[1:]],
    ids=["shorter", "longer", "empty", "last", "first"],
)
def test_a_name_that_somebody_took_meanwhile_with_other_bytes(
    tmp_path: Path, source: Path, time: Time, other: bytes
) -> None:
    taken = tmp_path / "other"
    taken.write_bytes(other)
    inner = Shaky(tmp_path / "bucket")
    inner.put("object", taken)
    inner.errors = busy(1)
    assert not over(inner, time).put("object", source)


def test_a_name_that_was_taken_before_is_taken(tmp_path: Path, source: Path, time: Time) -> None:
    """Nothing is ambiguous where the first answer came: also not for the same bytes."""
    inner = Shaky(tmp_path / "bucket")
    inner.put("object", source)
    assert not over(inner, time).put("object", source)


def test_what_is_compared_is_read_with_patience_too(
    tmp_path: Path, source: Path, time: Time
) -> None:
    inner = Shaky(tmp_path / "bucket", late=True)
    inner.put("object", source)
    inner.errors = busy(1)
    reads = []

    def shaky_read(name: str, start: int, stop: int) -> bytes:
        reads.append(start)
        if len(reads) == 2:
            raise Transient("again")
        return LocalBucket.read(inner, name, start, stop)

    inner.read = shaky_read  # type: ignore[method-assign]
    assert over(inner, time).put("object", source)
    assert len(reads) == 5


def test_what_the_bucket_is_stays(tmp_path: Path, time: Time) -> None:
    inner = LocalBucket(tmp_path / "bucket", jobs=3)
    bucket = over(inner, time)
    assert (bucket.url, bucket.jobs, bucket.atomic_create) == (inner.url, 3, True)
    assert bucket.part_bytes is None
    assert bucket.path("a") == inner.path("a")


def test_what_is_behind_a_network_is_wrapped_and_a_directory_is_not(tmp_path: Path) -> None:
    assert isinstance(_remote(LocalBucket(tmp_path)), RetryingBucket)
    assert isinstance(open_bucket(str(tmp_path)), LocalBucket)
