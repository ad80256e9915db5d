"""Where the elements of a part lie, and who watches and writes what."""

from __future__ import annotations

import threading
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import Conflict, DeltactlError, Malformed, Unsupported, UsageError
from deltactl.files.safetensors import read_header
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.ranks.layout import Layout, Part, lay_out
from deltactl.trainer.ranks.piece import Piece, _cut, whole_of
from deltactl.trainer.ranks.shard import ShardFile, states_in
from deltactl.trainer.ranks.watch import Watch
from tests.support.checkpoints import flip_bit, write_safetensors


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A shape, and its parts on a mesh of two dimensions that each may cut a dimension of it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = [draw(st.integers(1, 4)) for _ in range(2)]
    cuts = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
    order = draw(st.permutations([0, 1]))
    pieces = []
    for at in np.ndindex(*mesh):
        held = list(whole_of(shape).held)
        for dim in order:
            cut = cuts[dim]
            if cut is not None:
                held[cut] = _cut(held[cut], mesh[dim], at[dim])
        pieces.append(Piece(shape, tuple(held)))
    return shape, pieces


@given(cut_tensors())
def test_positions_are_where_numpy_finds_the_elements(
    made: tuple[tuple[int, ...], list[Piece]],
) -> None:
    shape, pieces = made
    whole = np.arange(prod(shape))
    back = np.full(prod(shape), -1)
    for piece in pieces:
        if not piece.elements:
            continue
        local = np.arange(piece.elements)
        positions = piece.positions(local)
        assert positions.dtype == np.int64
        assert np.all(np.diff(positions) > 0)
        np.testing.assert_array_equal(piece.take(whole), positions)
        some = local[::3]
        np.testing.assert_array_equal(piece.positions(some), positions[::3])
        piece.put(back, positions)
    np.testing.assert_array_equal(back, whole)


def test_a_scalar_is_whole() -> None:
    piece = whole_of(())
    assert piece.elements == 1
    assert piece.positions(np.array([0])).tolist() == [0]
    assert piece.take(np.array([7])).tolist() == [7]


@given(cut_tensors())
def test_parts_are_cut_as_torch_cuts_them(made: tuple[tuple[int, ...], list[Piece]]) -> None:
    import torch

    length, count = made[0][0], 1 + len(made[1]) % 5
    chunks = [c.tolist() for c in torch.arange(length).chunk(count)] if length else []
    ours = [
        [n for span in _cut(((0, length),), count, number) for n in range(*span)]
        for number in range(count)
    ]
    assert [part for part in ours if part] == [part for part in chunks if part]


@given(cut_tensors())
def test_each_part_has_one_reader_and_each_tensor_one_owner(
    made: tuple[tuple[int, ...], list[Piece]],
) -> None:
    shape, pieces = made
    held = [{"w": Part("BF16", piece), "b": Part("F32", whole_of((3,)))} for piece in pieces]
    layouts = [lay_out(held, rank) for rank in range(len(held))]
    assert all(layout.tensors == layouts[0].tensors for layout in layouts)
    b, w = layouts[0].tensors
    assert (w.name, w.shape, b.name) == ("w", shape, "b")
    assert b.readers.keys() == {b.owner}  # the shortest way
    watched = [piece.elements for piece in w.readers.values()]
    assert sum(watched) == prod(shape)
    assert all(w.readers[rank] == pieces[rank] for rank in w.readers)
    assert sum(len(layout.owned) for layout in layouts) == 2


def test_tensors_are_dealt_out_by_their_bytes() -> None:
    part = {f"w{n:02d}": Part("BF16", whole_of((1000 + 37 * n,))) for n in range(40)}
    held = [part] * 4
    loads = [
        sum(prod(tensor.shape) for tensor in lay_out(held, rank).owned.values())
        for rank in range(4)
    ]
    assert max(loads) - min(loads) < 1000 + 37 * 40


def test_ranks_that_do_not_hold_all_of_a_tensor() -> None:
    half = Piece((4,), (((0, 2),),))
    other = Piece((4,), (((1, 4),),))
    for parts in ([half], [half, other]):
        with pytest.raises(Unsupported, match="not all of it, once") as caught:
            lay_out([{"w": Part("BF16", piece)} for piece in parts], 0)
        assert caught.value.tensor == "w"


@pytest.mark.parametrize("other", [Part("F32", whole_of((4,))), Part("BF16", whole_of((2, 2)))])
def test_ranks_that_differ_in_what_a_tensor_is(other: Part) -> None:
    with pytest.raises(UsageError, match="ranks differ"):
        lay_out([{"w": Part("BF16", whole_of((4,)))}, {"w": other}], 0)


def test_some_ranks_have_tensors_that_others_lack() -> None:
    held = [{"a": Part("BF16", whole_of((4,)))}, {"b": Part("BF16", whole_of((4,)))}]
    layout: Layout = lay_out(held, 1)
    assert layout.read.keys() == {"b"}
    assert {tensor.name for tensor in layout.tensors} == {"a", "b"}


# What others put.


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    (tmp_path / "bucket").mkdir()
    return LocalBucket(tmp_path / "bucket")


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_headers_of_any_length_are_found(bucket: LocalBucket, count: int) -> None:
    state = {f"a.rather.long.name.of.a.tensor.{n:05d}": ("U8", (2,), b"ab") for n in range(count)}
    path = write_safetensors(Path(bucket.url, "part"), state)
    found = Watch(bucket).headers(["part"], 1)
    assert found == {"part": read_header(path)}


def test_what_comes_later_is_waited_for(bucket: LocalBucket) -> None:
    watch, found = Watch(bucket), []
    thread = threading.Thread(target=lambda: found.append(watch.headers(["a", "b"], 1)))
    thread.start()
    for name in ("b", "a"):
        assert not found
        path = write_safetensors(Path(bucket.url).parent / name, {"w": ("U8", (1,), b"x")})
        assert bucket.put(name, path)
    thread.join()
    assert found[0].keys() == {"a", "b"}


def test_a_step_that_is_taken_back_is_not_waited_for(bucket: LocalBucket) -> None:
    watch, found = Watch(bucket), []
    thread = threading.Thread(target=lambda: found.append(watch.headers(["a"], 7)))
    thread.start()
    watch.take_back(7)
    thread.join()
    assert found == [None]


def test_nothing_is_waited_for_once_it_is_given_up(bucket: LocalBucket) -> None:
    watch = Watch(bucket)
    write_safetensors(Path(bucket.url, "there"), {"w": ("U8", (1,), b"x")})
    watch.give_up()
    found = watch.headers(["there"], 1)
    assert found is not None and found.keys() == {"there"}
    with pytest.raises(Conflict, match="another rank") as caught:
        watch.headers(["there", "not.there"], 1)
    assert caught.value.file == "not.there"


@pytest.mark.parametrize("cut", [1, 4, -1])
def test_an_object_of_another_size_is_none(bucket: LocalBucket, cut: int) -> None:
    path = write_safetensors(Path(bucket.url, "part"), {"w": ("U8", (9,), bytes(9))})
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut] if cut > 0 else raw + b"\0")
    with pytest.raises(Malformed):
        Watch(bucket).headers(["part"], 1)


def test_a_shard_says_what_its_tensors_are(tmp_path: Path) -> None:
    mirror = Mirror("memory", tmp_path)
    mirror.add([("w", "BF16", (3, 2)), ("b", "F32", ())])
    for held in mirror.tensors.values():
        held.data[:] = 7
    shard = ShardFile(tmp_path / "shard").write(mirror.checkpoint())
    header = read_header(shard.path)
    assert states_in(header, "shard") == shard.tensors
    assert [tensor.name for tensor in shard.tensors] == ["b", "w"]
    for offset in range(8, len(header.raw)):
        flip_bit(shard.path, offset, offset % 8)
        with pytest.raises(DeltactlError):
            states_in(read_header(shard.path), "shard")
        flip_bit(shard.path, offset, offset % 8)


def test_a_rank_without_tensors_has_an_empty_shard(tmp_path: Path) -> None:
    shard = ShardFile(tmp_path / "shard").write(Mirror("memory", tmp_path).checkpoint())
    assert states_in(read_header(shard.path), "shard") == ()
