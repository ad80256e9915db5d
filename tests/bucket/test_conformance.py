"""What the protocol promises (chain/store.py), of every kind of bucket."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Barrier

import pytest

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket, Object
from deltactl.core.errors import NotFound, UsageError
from tests.bucket.conftest import OpenBucket

NAMES = [
    "a",
    "deltas/step_000011.safetensors",
    "anchors/step_000010/model.safetensors.index.json",
    "anchors/step_000010/sub/deeper/vocab.txt",
    "with space/plus+percent%20hash#question?.json",
    "ünïcödé/名前.txt",
    "brackets[1]/*/{x}",
]

NO_NAMES = [
    "",
    "/",
    "/a",
    "..",
    "../a",
    "a/../b",
    "a/..",
    ".",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "a\0b",
]


def source(directory: Path, content: bytes, name: str = "source") -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def listed(bucket: Bucket) -> dict[str, int]:
    found = list(bucket.list())
    assert len({item.name for item in found}) == len(found)
    return {item.name: item.size for item in found}


def whole(bucket: Bucket, name: str) -> bytes:
    return bucket.read(name, 0, 1 << 30)


def test_where_nothing_was_put_there_is_no_bucket_or_an_empty_one(bucket: Bucket) -> None:
    with suppress(NotFound):
        assert listed(bucket) == {}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_put_is_listed_read_and_fetched(bucket: Bucket, tmp_path: Path, name: str) -> None:
    content = Random(1).randbytes(1000)
    assert bucket.put(name, source(tmp_path, content))
    assert list(bucket.list()) == [Object(name, 1000)]
    assert whole(bucket, name) == content
    bucket.fetch(name, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


def test_all_names_side_by_side(bucket: Bucket, tmp_path: Path) -> None:
    for n, name in enumerate(NAMES):
        assert bucket.put(name, source(tmp_path, b"x" * n))
    assert listed(bucket) == {name: n for n, name in enumerate(NAMES)}
    assert all(whole(bucket, name) == b"x" * n for n, name in enumerate(NAMES))


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_plain_name_is_refused(bucket: Bucket, tmp_path: Path, name: str) -> None:
    path = source(tmp_path, b"content")
    with pytest.raises(UsageError):
        bucket.put(name, path)
    with pytest.raises(UsageError):
        bucket.read(name, 0, 1)
    with pytest.raises(UsageError):
        bucket.fetch(name, tmp_path / "target")
    with pytest.raises(UsageError):
        bucket.delete(name)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 10), (0, 1), (9, 10), (3, 7), (0, 99), (9, 99), (5, 5), (10, 20), (50, 60)],
)
def test_ranges(bucket: Bucket, tmp_path: Path, start: int, stop: int) -> None:
    bucket.put("object", source(tmp_path, b"0123456789"))
    assert bucket.read("object", start, stop) == b"0123456789"[start:stop]


def test_an_empty_object(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.put("object", source(tmp_path, b""))
    assert listed(bucket) == {"object": 0}
    assert whole(bucket, "object") == b""
    bucket.fetch("object", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b""


def test_a_large_object(bucket: Bucket, tmp_path: Path) -> None:
    content = Random(2).randbytes(20_000_001)
    assert bucket.put("object", source(tmp_path, content))
    assert listed(bucket) == {"object": len(content)}
    assert bucket.read("object", 19_999_990, 1 << 30) == content[19_999_990:]
    bucket.fetch("object", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


@pytest.mark.parametrize("content", [b"first", b"other", b""])
def test_nothing_is_overwritten(bucket: Bucket, tmp_path: Path, content: bytes) -> None:
    assert bucket.put("object", source(tmp_path, b"first"))
    assert not bucket.put("object", source(tmp_path, content))
    assert whole(bucket, "object") == b"first"
    assert listed(bucket) == {"object": 5}


def test_of_many_who_put_one_name_one_succeeds(open_at: OpenBucket, tmp_path: Path) -> None:
    count = 8
    barrier = Barrier(count)
    buckets = [open_at() for _ in range(count)]
    paths = [source(tmp_path, bytes([n]) * 5000, f"source-{n}") for n in range(count)]
    for name in (f"object-{turn}" for turn in range(5)):

        def put(bucket: Bucket, path: Path, name: str = name) -> bool:
            barrier.wait(60)
            return bucket.put(name, path)

        with ThreadPoolExecutor(count) as pool:
            created = list(pool.map(put, buckets, paths))
        winners = [path.read_bytes() for path, won in zip(paths, created, strict=True) if won]
        assert len(winners) == 1 or not buckets[0].atomic_create
        assert whole(open_at(), name) in winners


def test_what_is_not_there(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("directory/object", source(tmp_path, b"content"))
    for name in ("nothing", "directory", "directory/nothing", "directory/object/below", "no/thing"):
        with pytest.raises(NotFound):
            bucket.read(name, 0, 1)
        with pytest.raises(NotFound):
            bucket.fetch(name, tmp_path / "target")
        assert not (tmp_path / "target").exists(), name
    bucket.delete("nothing")
    bucket.delete("no/thing")
    assert listed(bucket) == {"directory/object": 7}


def test_what_is_deleted_is_gone_and_its_name_free(bucket: Bucket, tmp_path: Path) -> None:
    path = source(tmp_path, b"content")
    bucket.put("object", path)
    bucket.put("other", path)
    bucket.delete("object")
    assert listed(bucket) == {"other": 7}
    with pytest.raises(NotFound):
        whole(bucket, "object")
    assert bucket.put("object", source(tmp_path, b"again"))
    assert whole(bucket, "object") == b"again"


def test_no_source_no_object(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("other", source(tmp_path, b"content"))
    with pytest.raises(OSError, match="No such file"):
        bucket.put("object", tmp_path / "nothing")
    assert listed(bucket) == {"other": 7}


def test_others_see_it_at_once_under_the_same_address(open_at: OpenBucket, tmp_path: Path) -> None:
    first, second = open_at(), open_at()
    assert first.url == second.url
    first.put("object", source(tmp_path, b"content"))
    assert whole(second, "object") == b"content"
    third = open_bucket(first.url)
    assert third.url == first.url
    assert whole(third, "object") == b"content"


def test_prefixes_do_not_see_each_other(open_at: OpenBucket, tmp_path: Path) -> None:
    prefixes = ["a", "ab", "b/c"]
    for prefix in prefixes:
        assert open_at(prefix).put(f"of-{prefix[0]}", source(tmp_path, prefix.encode()))
    assert [listed(open_at(prefix)) for prefix in prefixes] == [
        {"of-a": 1},
        {"of-a": 2},
        {"of-b": 3},
    ]
    assert len({open_at(prefix).url for prefix in prefixes}) == 3


def test_a_path_is_given_only_where_the_bytes_are(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("directory/object", source(tmp_path, b"content"))
    path = bucket.path("directory/object")
    assert path is None or path.read_bytes() == b"content"


def test_more_objects_than_a_page_of_a_listing(
    bucket: Bucket, more_than_a_page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = source(tmp_path, b"content")
    names = [f"deltas/step_{n:06d}.safetensors" for n in range(more_than_a_page)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda name: bucket.put(name, path), names))
    assert listed(bucket) == dict.fromkeys(names, 7)
