"""How many requests and bytes the headers of a chain cost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.header_reader import HeaderReader
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import Malformed
from deltactl.format.link_names import delta_name
from deltactl.ops.diff import diff
from deltactl.ops.push import push
from tests.support.chains import Tensors, write
from tests.support.checkpoints import random_tensor, write_safetensors
from tests.support.remote import RemoteBucket, meeting

LINKS = 200
TENSORS = 90  # changed ones: their rows make a header of more than the first guess


@pytest.fixture(scope="module")
def long_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket of an anchor and 199 deltas whose headers are all of one size, as in training."""
    root = tmp_path_factory.mktemp("long")
    tensors: Tensors = {
        f"model.layers.{n}.mlp.weight": random_tensor("BF16", (4, 4), n) for n in range(TENSORS)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(root / "cache"))
        patch.setattr(os, "fsync", lambda _: None)
        push(write(root / "1", tensors, shards=1), LocalBucket(root / "bucket"))
        (root / "bucket/deltas").mkdir()
        for step in range(2, LINKS + 1):
            tensors = {
                name: (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
                for name, (dtype, shape, data) in tensors.items()
            }
            before = open_checkpoint(root / f"{step - 1}")
            after = open_checkpoint(write(root / f"{step}", tensors, shards=1))
            out = root / "bucket" / delta_name(step)
            diff(before, after, out, step=step, base_step=step - 1)
    return root / "bucket"


def header_sizes(bucket: RemoteBucket) -> list[int]:
    chain = read_chain(bucket)
    found = [link.header.header_bytes for link in chain.deltas.values()]  # type: ignore[union-attr]
    bucket.forget()
    return found


def test_a_chain_of_200_links_takes_hardly_more_than_its_headers(long_chain: Path) -> None:
    bucket = RemoteBucket(long_chain, jobs=8)
    sizes = header_sizes(bucket)
    assert len(sizes) == LINKS - 1
    assert min(sizes) > 1 << 13, "or nothing is learned"
    bucket.faults = [meeting(bucket)]
    chain = read_chain(bucket)
    assert (len(chain.links), chain.problems, chain.tip) == (LINKS, (), LINKS)
    anchor = next(size for name, _, size in bucket.reads if name.startswith("anchors/"))
    # The listing, one request a link, and one more for each of those that were under way before
    # the first header was known.
    assert chain.requests == 1 + len(bucket.reads)
    assert LINKS + 1 <= chain.requests <= LINKS + 1 + bucket.jobs
    assert chain.bytes_read == bucket.bytes_read
    assert chain.bytes_read <= anchor + sum(-(-size // 4096) * 4096 for size in sizes)


def test_one_at_a_time_learns_from_the_first(long_chain: Path) -> None:
    bucket = RemoteBucket(long_chain, jobs=1)
    chain = read_chain(bucket)
    assert chain.requests == LINKS + 2


def test_short_headers_take_one_request_each(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "bucket" / "a", {"w": random_tensor("F32", (8,), 1)})
    reader = HeaderReader(RemoteBucket(tmp_path / "bucket"))
    size = path.stat().st_size
    assert list(reader.header("delta", "a", size).entries) == ["w"]
    assert (reader.requests, reader.bytes_read) == (1, size)


def test_a_long_header_is_read_in_two_requests_and_the_next_in_one(tmp_path: Path) -> None:
    many = {f"tensor.{n:04d}": random_tensor("U8", (40,), n) for n in range(600)}
    size = write_safetensors(tmp_path / "bucket" / "a", many).stat().st_size
    bucket = RemoteBucket(tmp_path / "bucket")
    reader = HeaderReader(bucket)
    length = len(reader.header("anchor", "a", size).raw)
    assert [(start, stop) for _, start, stop in bucket.reads] == [(0, 8192), (8192, length)]
    reader.header("anchor", "a", size)
    assert bucket.reads[2:] == [("a", 0, -(-length // 4096) * 4096)]
    reader.header("delta", "a", size)
    assert bucket.reads[3][1:] == (0, 8192), "another kind of link has headers of another size"


def test_what_is_no_header_teaches_nothing(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a").write_bytes((90_000_000).to_bytes(8, "little") + b"{" + b" " * 99_999)
    bucket = RemoteBucket(tmp_path / "bucket")
    reader = HeaderReader(bucket)
    for _ in range(2):
        with pytest.raises(Malformed):
            reader.header("delta", "a", 100_008)
    assert [reads[1:] for reads in bucket.reads] == [(0, 8192), (8192, 100_008)] * 2


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    bucket = RemoteBucket(tmp_path)
    with pytest.raises(Malformed, match="too large"):
        HeaderReader(bucket).whole("a", 1 << 40)
    assert bucket.reads == []


def test_faulty_links_are_counted_too(tmp_path: Path) -> None:
    bucket = RemoteBucket(tmp_path / "bucket")
    place = tmp_path / "bucket" / delta_name(1)
    place.parent.mkdir(parents=True)
    place.write_bytes(b"no header at all")
    chain = read_chain(bucket)
    assert (len(chain.problems), chain.bytes_read, chain.requests) == (1, 16, 2)
