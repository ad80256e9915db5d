"""Training that waits for the bucket says so, and not longer than it was told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.bucket.retrying import RetryingBucket
from deltactl.chain.store import Object
from deltactl.core.errors import NotAllowed, Transient, UsageError
from deltactl.trainer import Publisher
from deltactl.trainer.upload.waiting import AT_ONCE, Waiting
from deltactl.trainer.upload.worker import Worker
from tests.support.publishing import MoodyBucket, assert_chain, bits_of, small


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def busy(gate: threading.Event) -> Iterator[Worker]:
    """A worker that has no room until the gate opens."""
    worker = Worker("test", 1, lambda error, last: None)
    worker.put(lambda: void(gate.wait(60)))
    yield worker
    gate.set()
    worker.close()


def void(_: object) -> None:
    return None


def test_it_says_how_long_again_and_again(
    busy: Worker, gate: threading.Event, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("deltactl.trainer.upload.waiting._FIRST_WORD", 0.01)
    found: list[bool] = []
    training = threading.Thread(target=lambda: found.append(Waiting("wait").room(busy)))
    training.start()
    while len(caplog.records) < 3:
        training.join(0.01)
        assert training.is_alive()
    gate.set()
    training.join()
    assert found == [True]
    *waits, goes_on = [record.getMessage() for record in caplog.records]
    assert all(w.startswith("training has been waiting for the bucket for ") for w in waits)
    assert goes_on.startswith("training goes on, having waited ")


def test_a_short_wait_is_not_worth_a_word(
    busy: Worker, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    gate.set()
    assert Waiting("wait").room(busy)
    assert caplog.records == []


def test_after_max_wait_it_does_not_wait_again_until_there_was_room(
    busy: Worker, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting("wait", 0.01)
    assert not waiting.room(busy)
    assert not waiting.room(busy)
    (record,) = caplog.records
    assert "steps get no links of their own" in record.getMessage()
    gate.set()
    while not AT_ONCE.room(busy):
        pass
    assert waiting.room(busy)
    gate.clear()
    busy.put(lambda: void(gate.wait(60)))
    assert not waiting.room(busy)
    assert len(caplog.records) == 2


def test_max_wait_merges_steps_and_drops_no_change(tmp_path: Path, gate: threading.Event) -> None:
    bucket, model = MoodyBucket(tmp_path / "bucket"), small()
    bucket.before = lambda name: void(gate.wait(60))
    publisher = Publisher(model, bucket, max_wait=0.01)
    expected = {}
    for step in range(1, 11):
        model[0].weight.data[0, 0] += 1
        publisher.publish()
        if step in (1, 2, 3, 4, 10):
            expected[step] = bits_of(model.state_dict())
    gate.set()
    publisher.close()
    assert_chain(bucket, expected, tmp_path)
    merged = {p.step: p.merged_steps for p in publisher.history if p.kind == "delta"}
    assert merged == {2: 0, 3: 0, 4: 0, 10: 5}


def test_a_bucket_that_is_away_when_a_publisher_is_made_is_waited_for_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(LocalBucket):
        left = 4

        def list(self) -> Iterator[Object]:
            self.left -= 1
            if self.left >= 0:
                raise Transient("the server cannot be reached", file=self.url)
            return super().list()

    inner, now = Away(tmp_path / "bucket"), [0.0]
    bucket = RetryingBucket(
        inner,
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
        draw=lambda: 1.0,
    )
    with Publisher(small(), bucket):
        pass
    assert inner.left < 0
    word = f"waiting for the bucket, for up to 57 s more: {inner.url}: the server cannot be reached"
    assert [m for m in caplog.messages if "waiting" in m] == [word]


@pytest.mark.parametrize(
    "options", [{"max_wait": -1}, {"max_wait": float("nan")}, {"when_busy": "merge", "max_wait": 3}]
)
def test_what_is_no_time_to_wait(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="max_wait"):
        Publisher(small(), tmp_path / "bucket", **options)  # type: ignore[arg-type]


class Waits:
    """What a worker waits between its tries: as long as it likes, and no time at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[float] = []
        wait_for = threading.Condition.wait_for

        def short(condition: threading.Condition, predicate: object, timeout: float | None = None):  # type: ignore[no-untyped-def]
            if timeout is None:
                return wait_for(condition, predicate)  # type: ignore[arg-type]
            self.asked.append(timeout)
            return predicate()  # type: ignore[operator]

        monkeypatch.setattr(threading.Condition, "wait_for", short)


@pytest.mark.parametrize(
    ("error", "longest"), [(Transient("away"), 5.0), (NotAllowed("no"), 60.0), (OSError(), 60.0)]
)
def test_a_bucket_that_is_away_is_tried_soon_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, longest: float
) -> None:
    waits, failures, done = Waits(monkeypatch), [error] * 12, threading.Event()

    def job() -> None:
        if failures:
            raise failures.pop()
        done.set()

    worker = Worker("test", 1, lambda error, last: None)
    worker.put(job)
    assert done.wait(60)
    worker.close()
    assert waits.asked[:3] == [1.0, 2.0, 4.0]
    assert len(waits.asked) == 12
    assert max(waits.asked) == waits.asked[-1] == longest
