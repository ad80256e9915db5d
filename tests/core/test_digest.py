"""Digests: known answers, and states that must not be taken for each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.core.digest import TensorState, hasher, is_digest, state_digest
from tests.support.checkpoints import BITS

ZEROS = blake3(bytes(12)).hexdigest()
ONE = TensorState("w", "BF16", (2, 3), ZEROS)


def record(tensor: TensorState) -> bytes:
    """What one tensor adds to the stream that a state is the digest of."""

    def u64(number: int) -> bytes:
        return number.to_bytes(8, "little")

    name = tensor.name.encode()
    shape = b"".join(map(u64, (len(tensor.shape), *tensor.shape)))
    dtype = tensor.dtype.encode()
    return u64(len(name)) + name + u64(len(dtype)) + dtype + shape + bytes.fromhex(tensor.digest)


# Known answers.


def test_a_tensors_digest_is_blake3() -> None:
    """The first vectors of BLAKE3's authors."""
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert hasher().hexdigest() == empty
    zero = "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"
    assert hasher().update(b"\0").hexdigest() == zero


def test_states_that_are_known() -> None:
    assert state_digest([]) == hasher().hexdigest()
    assert state_digest([ONE]) == "0f7bd7b2a14e032b0ac7cc040df1691efa594b6f93b4ae23e9bd678cb4f03bb6"
    many = [
        TensorState("b", "F32", (), blake3(bytes(4)).hexdigest()),
        TensorState("a", "U8", (0, 7), blake3(b"").hexdigest()),
        TensorState("é", "F4", (1 << 40,), ZEROS),
    ]
    assert state_digest(many) == "132a0825cf13e886f42f3965b8fb9d8bc85b2ecd345b508916d1c13c9895d81f"


def test_the_stream_is_byte_for_byte_this() -> None:
    stream = bytes.fromhex(
        "0100000000000000 77"
        "0400000000000000 42463136"
        "0200000000000000 0200000000000000 0300000000000000" + ZEROS
    )
    assert record(ONE) == stream
    assert state_digest([ONE]) == blake3(stream).hexdigest()


# What makes a state, and what does not.

NAMES = st.text(max_size=6)
TENSORS = st.builds(
    TensorState,
    name=NAMES,
    dtype=st.sampled_from(sorted(BITS)),
    shape=st.lists(st.integers(0, (1 << 64) - 1), max_size=3).map(tuple),
    digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
)
STATES = st.lists(TENSORS, max_size=5, unique_by=lambda tensor: tensor.name)
SOME = settings(max_examples=150)


@given(STATES)
@SOME
def test_a_state_is_the_digest_of_its_records_in_order_of_name(state: list[TensorState]) -> None:
    ordered = sorted(state, key=lambda tensor: tensor.name.encode())
    assert state_digest(state) == blake3(b"".join(map(record, ordered))).hexdigest()


@given(STATES, st.randoms())
@SOME
def test_order_does_not_enter(state: list[TensorState], random: object) -> None:
    shuffled = state.copy()
    random.shuffle(shuffled)
    assert state_digest(shuffled) == state_digest(state)
    assert state_digest(iter(state)) == state_digest(state)


def test_names_are_ordered_by_their_bytes() -> None:
    """U+FF5E comes before U+1F600 in UTF-8, and after it in UTF-16."""
    low, high = (TensorState(name, "U8", (1,), ZEROS) for name in ("\uff5e", "\U0001f600"))
    assert state_digest([high, low]) == blake3(record(low) + record(high)).hexdigest()


@given(STATES, STATES)
@SOME
def test_different_states_have_different_digests(
    one: list[TensorState], other: list[TensorState]
) -> None:
    assert (state_digest(one) == state_digest(other)) == (set(one) == set(other))


@given(TENSORS, st.data())
@SOME
def test_every_part_of_a_tensor_enters(tensor: TensorState, data: st.DataObject) -> None:
    other = data.draw(TENSORS)
    for part in ("name", "dtype", "shape", "digest"):
        changed = replace(tensor, **{part: getattr(other, part)})
        assert (state_digest([changed]) == state_digest([tensor])) == (changed == tensor)


def test_nothing_shifts_from_one_part_into_the_next() -> None:
    """Pairs that would share a stream if any length were left out."""
    a, b = "61" * 32, "62" * 32
    states = [
        [TensorState("w", "F16", (), a)],
        [TensorState("wF", "16", (), a)],
        [TensorState("", "wF16", (), a)],
        [TensorState("wF16", "", (), a)],
        [TensorState("w", "F16", (0,), a)],
        [TensorState("w", "F16", (0, 0), a)],
        [TensorState("w", "F16", (1,), a)],
        [TensorState("w", "F16", (1, 1), a)],
        [TensorState("w", "F16", (256,), a)],
        [TensorState("w", "F16", (1 << 32,), a)],
        [TensorState("w", "F16", (2, 3), a)],
        [TensorState("w", "F16", (3, 2), a)],
        [TensorState("w", "F16", (6,), a)],
        [TensorState("w", "F16", (), b)],
        [TensorState("w", "BF16", (), a)],
        [TensorState("w\0", "F16", (), a)],
        [TensorState("v", "F16", (), a), TensorState("w", "F16", (), b)],
        [TensorState("v", "F16", (), b), TensorState("w", "F16", (), a)],
        [TensorState("vw", "F16", (), a)],
        [TensorState("", "F16", (), a), TensorState("vw", "F16", (), b)],
        # The record of a second tensor as the name of a first.
        [TensorState("w" + record(TensorState("x", "F16", (), a)).decode(), "F16", (), a)],
        [TensorState("w", "F16", (), a), TensorState("x", "F16", (), a)],
    ]
    for one, other in combinations(states, 2):
        assert state_digest(one) != state_digest(other)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
@SOME
def test_a_digest_is_of_the_bytes_not_of_their_pieces(data: bytes, cuts: list[int]) -> None:
    digest = hasher()
    ends = [0, *sorted(cuts), len(data)]
    for start, stop in pairwise(ends):
        digest.update(data[start:stop])
    assert digest.hexdigest() == hasher(2).update(data).hexdigest()


# What looks like a digest.


@pytest.mark.parametrize(
    "text",
    [
        ZEROS[:-1],
        ZEROS + "0",
        ZEROS.upper(),
        "g" + ZEROS[1:],
        " " + ZEROS[1:],
        "",
        None,
        1,
        [ZEROS],
    ],
)
def test_what_is_no_digest(text: object) -> None:
    assert not is_digest(text)


def test_what_is_one() -> None:
    assert is_digest(ZEROS)
    assert is_digest("0" * 64)
