"""The one checker of a link's bytes: in whatever pieces they come, and of files that are mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.bucket.local import LocalBucket
from deltactl.chain.check.objects import expected_in, faults_at
from deltactl.chain.reading import read_chain
from deltactl.core.errors import DeltactlError, Malformed
from deltactl.format.anchor import AnchorFile, AnchorHeader
from deltactl.format.checker import (
    Checker,
    Expected,
    expected_file,
    expected_of,
    has_file,
    mapped_faults,
    pieces_of,
    stream_faults,
)
from deltactl.format.delta import open_delta
from tests.support.chains import every_kind, first_state, make_chain, states
from tests.support.checkpoints import flip_bit
from tests.support.several import make_parts_chain
from tests.support.trl_writer import write_chain

Objects = Mapping[str, tuple[Expected, bytes]]


def objects_of(bucket: LocalBucket) -> Iterator[tuple[str, tuple[Expected, bytes]]]:
    for link in read_chain(bucket).links:
        for item in link.objects:
            yield item.name, (expected_in(link, item), Path(bucket.url, item.name).read_bytes())


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Of anchors and deltas of one file and of several, by the name of its kind and its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        steps = [first_state(), every_kind(first_state())]
        several = make_parts_chain(tmp_path_factory.mktemp("several"), steps)
        single = make_chain(tmp_path_factory.mktemp("single"), steps, shards=0)
        return {
            f"{kind}/{name}": found
            for kind, bucket in (("several", several), ("single", single))
            for name, found in objects_of(bucket)
        }


KINDS = [
    "several/anchors/step_000001/config.json",
    "several/anchors/step_000001/model-00001-of-00002.safetensors",
    "several/anchors/step_000001/model.safetensors.index.json",
    "several/anchors/step_000001/tokenizer/vocab.txt",
    "several/deltas/step_000002/delta-00003-of-00003.safetensors",
    "several/deltas/step_000002/delta.safetensors.index.json",
    "single/anchors/step_000001.safetensors",
    "single/deltas/step_000002.safetensors",
]


def facts(faults: list[DeltactlError]) -> list[dict[str, object]]:
    return [fault.facts() for fault in faults]


def in_pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for start, stop in pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
        yield data[start:stop]


def mapped(expected: Expected, data: bytes) -> list[DeltactlError]:
    return mapped_faults([(expected, np.frombuffer(data, np.uint8))])


@pytest.mark.parametrize("name", KINDS)
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=6))
def test_a_sound_object_in_any_pieces(name: str, cuts: list[int], objects: Objects) -> None:
    expected, data = objects[name]
    assert stream_faults(expected, in_pieces(data, cuts)) == []
    assert mapped(expected, data) == []


@pytest.mark.parametrize("name", KINDS)
@given(bit=st.integers(0, 1 << 20), cuts=st.lists(st.integers(0, 1 << 20), max_size=6))
def test_a_wrong_bit_is_the_same_fault_however_it_comes(
    name: str, bit: int, cuts: list[int], objects: Objects
) -> None:
    expected, sound = objects[name]
    data = bytearray(sound)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    faults = stream_faults(expected, in_pieces(bytes(data), cuts))
    assert len(faults) == 1
    assert (faults[0].file, faults[0].step) == (str(expected.file), expected.step)
    if "no place of its own" not in faults[0].what:  # of the digits that are to be the header's own
        assert faults[0].expected != faults[0].found
    assert facts(mapped(expected, bytes(data))) == facts(faults)


@pytest.mark.parametrize("name", KINDS)
@given(size=st.integers(0, 1 << 20))
def test_an_object_that_ends_early(name: str, size: int, objects: Objects) -> None:
    expected, data = objects[name]
    cut = data[: size % len(data)]
    (fault,) = stream_faults(expected, [cut])
    assert (fault.expected, fault.found) == (f"{len(data)} bytes", f"{len(cut)} bytes")
    assert facts(mapped(expected, cut)) == facts([fault])


@pytest.mark.parametrize("name", KINDS)
def test_an_object_that_goes_on(name: str, objects: Objects) -> None:
    expected, data = objects[name]
    (fault,) = stream_faults(expected, [data, b"x"])
    assert (fault.step, fault.found) == (expected.step, f"{len(data) + 1} bytes")
    assert facts(mapped(expected, data + b"x")) == facts([fault])


def test_a_fault_is_known_with_the_last_byte_of_its_tensor(objects: Objects) -> None:
    """And those after it are compared all the same."""
    expected, sound = objects["single/anchors/step_000001.safetensors"]
    spans = expected.spans(sound[: expected.header_end(sound)])
    spans = [span for span in spans if span.stop > span.start]
    data = bytearray(sound)
    for span in (spans[0], spans[-1]):
        data[span.start] ^= 1
    checker = Checker(expected)
    checker.feed(bytes(data[: spans[0].stop - 1]))
    assert checker.faults == []
    checker.feed(bytes(data[spans[0].stop - 1 : spans[0].stop]))
    assert len(checker.faults) == 1
    checker.feed(bytes(data[spans[0].stop :]))
    checker.finish()
    assert len({fault.tensor for fault in checker.faults}) == 2


def test_a_header_that_is_another_is_a_fault_before_the_payload_comes(objects: Objects) -> None:
    for name in ("single/deltas/step_000002.safetensors", KINDS[4]):
        expected, sound = objects[name]
        end = expected.header_end(sound)
        data = bytearray(sound)
        data[end - 1] ^= 1
        checker = Checker(expected)
        checker.feed(bytes(data[:end]))
        (fault,) = checker.faults
        assert isinstance(fault, Malformed)
        assert "header" in fault.what
        checker.feed(bytes(data[end:]))
        checker.finish()
        assert checker.faults == [fault], "nothing can be said of what comes after"


@pytest.mark.parametrize("size", [0, 1, 7])
def test_an_object_too_small_for_a_header(objects: Objects, size: int) -> None:
    """The index says so, and it is so."""
    sound, _ = objects["several/anchors/step_000001/model-00001-of-00002.safetensors"]
    expected = Expected(sound.file, sound.step, size, None, sound.spans)
    (fault,) = stream_faults(expected, [b"\xff" * size])
    assert facts(mapped(expected, b"\xff" * size)) == facts([fault])
    assert (fault.file, fault.step) == (sound.file, 1)


def test_a_header_of_another_length_is_not_waited_for(objects: Objects) -> None:
    expected, sound = objects["single/deltas/step_000002.safetensors"]
    checker = Checker(expected)
    checker.feed(bytes([sound[0] ^ 8]) + sound[1:8])
    (fault,) = checker.faults
    length = int.from_bytes(sound[:8], "little") + 8
    assert fault.expected == f"a header of {length} bytes"


@pytest.mark.parametrize("other", [("F16", (20, 40)), ("BF16", (40, 20, 1))])
def test_a_tensor_of_the_right_bits_and_another_dtype_or_shape(
    other: tuple[str, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    bucket = make_chain(tmp_path, states(1))
    (anchor,) = read_chain(bucket).links
    assert isinstance(anchor.header, AnchorHeader)
    tensors = tuple(
        replace(tensor, dtype=other[0], shape=other[1]) if tensor.name == "model.embed" else tensor
        for tensor in anchor.header.tensors
    )
    shard = next(f for f in anchor.header.files if f.is_shard)
    path = Path(bucket.url, "anchors/step_000001", shard.name)
    header = replace(anchor.header, tensors=tensors)
    expected = expected_of(header, shard.name, "shard", shard.nbytes)
    (fault,) = stream_faults(expected, pieces_of(path))
    assert (fault.tensor, fault.file, fault.step) == ("model.embed", "shard", 1)
    assert (fault.expected, fault.found) == (f"{other[0]} {list(other[1])}", "BF16 [40, 20]")


def test_what_has_no_digest_is_not_judged(tmp_path: Path) -> None:
    write_chain(tmp_path / "bucket", states(2), "raw", anchor_every=10)
    for _, (expected, data) in objects_of(LocalBucket(tmp_path / "bucket")):
        assert stream_faults(expected, [data[::-1]]) == []
        assert mapped(expected, data[::-1]) == []
        assert stream_faults(expected, [data[:-1]]) != [], "but for its size"


def test_a_file_beside_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    digest = "bb"  # of nothing
    assert not has_file(path, AnchorFile("config.json", 2, digest, False))
    (fault,) = stream_faults(
        expected_file(AnchorFile("config.json", 2, digest, False), path, 3), pieces_of(path)
    )
    assert (fault.step, fault.expected) == (3, digest)
    right = AnchorFile("config.json", 2, str(fault.found), False)
    assert has_file(path, right)
    assert not has_file(tmp_path / "none", right)
    path.write_bytes(b"{}\n")
    assert not has_file(path, right)


def test_every_fault_of_a_link_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its files, and a file that is gone is one."""
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    bucket = make_parts_chain(tmp_path, [first_state(), every_kind(first_state())])
    anchor, delta = read_chain(bucket).links
    place, root = Path(bucket.url, anchor.name).parent, Path(bucket.url)
    assert faults_at(anchor, place) == faults_at(delta, root / "deltas/step_000002") == []
    shards = sorted(place.glob("*.safetensors"))
    flip_bit(shards[0], 9)
    flip_bit(shards[1], shards[1].stat().st_size - 1)
    flip_bit(place / "config.json", 0)
    (place / "tokenizer/vocab.txt").unlink()
    found = {(fault.step, fault.file, bool(fault.tensor)) for fault in faults_at(anchor, place)}
    assert found == {
        (1, f"anchors/step_000001/{shards[0].name}", False),
        (1, f"anchors/step_000001/{shards[1].name}", True),
        (1, "anchors/step_000001/config.json", False),
        (1, "anchors/step_000001/tokenizer/vocab.txt", False),
    }


def test_every_part_of_a_delta_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    bucket = make_parts_chain(tmp_path, [first_state(), every_kind(first_state())])
    place = Path(bucket.url, "deltas/step_000002")
    parts = sorted(place.glob("*.safetensors"))
    for part in parts[:2]:
        flip_bit(part, part.stat().st_size - 1)
    delta = open_delta(place)
    assert [fault.file for fault in delta.payload_faults()] == [str(part) for part in parts[:2]]
    with pytest.raises(Malformed) as caught:
        delta.check_payload()
    assert (caught.value.file, caught.value.step) == (str(parts[0]), 2)
