"""The follower goes by the bucket alone: to the newest step, again where it may help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.core.errors import Conflict, DeltactlError, Transient
from deltactl.demo.loop import follower
from deltactl.server.apply import Applied
from deltactl.server.report import Replica


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that it says are served."""
    steps: list[int] = []
    monkeypatch.setattr(follower, "tell", lambda **event: steps.append(event["step"]))
    monkeypatch.setattr(follower.time, "sleep", lambda seconds: None)
    return steps


def publish(bucket: Bucket, place: Path, step: int) -> None:
    source = place / "link"
    source.write_text("a link")
    assert bucket.put(f"deltas/step_{step:06d}.safetensors", source)


def follow(
    place: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], DeltactlError | None]
) -> list[int]:
    """Follow a bucket in which steps 3 and 4 appear once 0 to 2 are applied; which steps were asked
    for. ``answer``: to what number of tries."""
    bucket, asked = open_bucket(str(place / "bucket")), list[int]()
    for step in range(3):
        publish(bucket, place, step)

    def stand_in(bucket: Bucket, step: int | None, urls: list[str]) -> Applied:
        assert (step, urls) == (None, ["http://server"])
        tip = max(int(object.name[12:18]) for object in bucket.list())
        asked.append(tip)
        error = answer(len(asked))
        if error is None and tip == 2:
            publish(bucket, place, 3)
            publish(bucket, place, 4)
        return Applied(tip, "state", [Replica("http://server", error=error)], False)

    monkeypatch.setattr(follower, "apply_to_servers", stand_in)
    follower.work({"bucket": str(place / "bucket"), "server": "http://server", "last": 4})
    return asked


def test_the_newest_step_is_gone_to_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    assert follow(tmp_path, monkeypatch, lambda tries: None) == [2, 4]
    assert told == [2, 4]


def test_what_may_pass_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    errors = {1: Transient("busy"), 2: Transient("busy"), 4: Transient("gone for a moment")}
    assert follow(tmp_path, monkeypatch, errors.get) == [2, 2, 2, 4, 4]
    assert told == [2, 4]


def test_what_does_not_pass_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    with pytest.raises(Conflict, match="another base"):
        follow(tmp_path, monkeypatch, lambda tries: Conflict("another base"))
    assert told == []


def test_rollouts_in_the_bucket_are_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    bucket, looks = open_bucket(str(tmp_path / "bucket")), list[float]()
    publish(bucket, tmp_path, 0)

    def wait(seconds: float) -> None:
        looks.append(seconds)
        (tmp_path / "batch").write_text("{}")
        bucket.put(f"rollouts/batch_{len(looks):06d}.json", tmp_path / "batch")
        if len(looks) == 3:
            publish(bucket, tmp_path, 1)

    asked: list[int] = []

    def stand_in(bucket: Bucket, step: int | None, urls: list[str]) -> Applied:
        asked.append(len(looks))
        return Applied(len(asked) - 1, "state", [Replica(urls[0])], False)

    monkeypatch.setattr(follower.time, "sleep", wait)
    monkeypatch.setattr(follower, "apply_to_servers", stand_in)
    settings: dict[str, Any] = {"bucket": str(tmp_path / "bucket"), "server": "s", "last": 1}
    follower.work(settings)
    assert asked == [0, 3]


def test_a_bucket_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    assert follower._links(open_bucket(str(tmp_path / "none"))) == frozenset()
