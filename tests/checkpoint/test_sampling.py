"""Samples of a pair: bounded, spread over all of it, the same places in both."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.checkpoint.sampling import sample_pair
from tests.support.checkpoints import BITS, changed, random_tensor, write_safetensors


def opened(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Checkpoint:
    return open_checkpoint(write_safetensors(path, tensors))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    old = {f"t{i}": random_tensor("BF16", (size,), seed=i) for i, size in enumerate((50, 4000, 9))}
    new = {name: changed(spec, 0.1) for name, spec in old.items()}
    old["gone"] = new["come"] = old["reshaped"] = random_tensor("BF16", (500,))
    new["reshaped"] = random_tensor("BF16", (5, 100))
    return opened(tmp_path / "a.safetensors", old), opened(tmp_path / "b.safetensors", new)


@pytest.mark.parametrize(("pieces", "piece_bytes"), [(1, 64), (4, 1000), (7, 1024), (100, 8)])
def test_slices_are_bounded_apart_and_the_same_on_both_sides(
    pair: tuple[Checkpoint, Checkpoint], pieces: int, piece_bytes: int
) -> None:
    a, b = sample_pair(*pair, pieces=pieces, piece_bytes=piece_bytes)
    assert list(a.tensors) == list(b.tensors)
    assert 0 < len(a.tensors) <= pieces
    spans = []
    for key, tensor in a.tensors.items():
        name, _, start = key.rpartition("@")
        at = int(start)
        assert tensor.nbytes <= piece_bytes
        assert tensor.shape == (tensor.nbytes // 2,)
        for sample, whole in ((a, pair[0]), (b, pair[1])):
            expected = whole.tensors[name].data[at : at + tensor.nbytes]
            assert sample.tensors[key].data.tobytes() == expected.tobytes()
        spans.append((name, at, at + tensor.nbytes))
    spans.sort()
    for (name, _, stop), (other, start, _) in pairwise(spans):
        assert name != other or stop <= start


def test_slices_are_spread_over_the_bytes(pair: tuple[Checkpoint, Checkpoint]) -> None:
    a, _ = sample_pair(*pair, pieces=8, piece_bytes=64)
    starts = sorted(int(key.split("@")[1]) for key in a.tensors if key.startswith("t1@"))
    assert len(starts) >= 7
    assert starts[0] < 1000 < 7000 < starts[-1]


def test_a_small_pair_comes_whole_without_what_only_one_side_has(
    pair: tuple[Checkpoint, Checkpoint],
) -> None:
    a, b = sample_pair(*pair, pieces=10, piece_bytes=1 << 20)
    for sample, whole in ((a, pair[0]), (b, pair[1])):
        assert list(sample.tensors) == ["t0@0", "t1@0", "t2@0"]
        for key, tensor in sample.tensors.items():
            assert tensor.data.tobytes() == whole.tensors[key[:2]].data.tobytes()


def test_nothing_alike_gives_an_empty_sample(tmp_path: Path) -> None:
    a = opened(
        tmp_path / "a.safetensors", {"x": random_tensor("BF16", (8,)), "e": ("U8", (0,), b"")}
    )
    b = opened(
        tmp_path / "b.safetensors", {"y": random_tensor("BF16", (8,)), "e": ("U8", (0,), b"")}
    )
    assert [sample.nbytes for sample in sample_pair(a, b, pieces=4, piece_bytes=8)] == [0, 0]


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    whole = opened(tmp_path / "a.safetensors", {"x": random_tensor(dtype, (480,))})
    a, _ = sample_pair(whole, whole, pieces=2, piece_bytes=80)
    assert [tensor.nbytes for tensor in a.tensors.values()] == [80, 80]
    assert all(t.elements * max(BITS[dtype] // 8, 1) == 80 for t in a.tensors.values())
    assert all(t.dtype == (dtype if BITS[dtype] >= 8 else "U8") for t in a.tensors.values())
