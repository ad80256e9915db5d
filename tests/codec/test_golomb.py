"""Golomb streams: any integers come back, in nearly as few bits as can be; nothing hostile does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.codec import golomb
from deltactl.codec.golomb import leb128, read_leb128
from deltactl.codec.integers import Reader, Undecodable

Values = npt.NDArray[np.uint64]

LIMIT = (1 << 63) - 1  # the largest that any caller has


def decoded(coded: bytes, count: int, limit: int = LIMIT) -> Values:
    """The values of a stream that is all there is."""
    reader = Reader(memoryview(coded))
    values = np.empty(count, np.uint64)
    golomb.decode(reader, values, limit)
    assert reader.at == len(coded)
    return values


def refused(coded: bytes, count: int, limit: int = LIMIT) -> bool:
    """Whether a stream is undecodable; if not, what it decodes to is within its limits."""
    found = 0
    try:
        for values in golomb.pieces(Reader(memoryview(coded)), count, limit):
            assert np.all(values < limit)
            found += values.size
    except Undecodable:
        return True
    assert found == count
    return False


def by_hand(values: Sequence[int], m: int) -> bytes:
    """The stream as the page describes it, bit by bit."""
    b, unary, firsts, extras = (m - 1).bit_length(), "", "", ""
    u = 2**b - m
    for value in values:
        quotient, r = divmod(value, m)
        unary += "0" * quotient + "1"
        first = r if r < u else (r + u) // 2
        firsts += format(first, f"0{b - 1}b")[::-1] if b > 1 else ""
        extras += str((r + u) % 2) if b and first >= u else ""
    return b"".join(
        [leb128(m), leb128(sum(v // m for v in values)), *map(packed, (unary, firsts, extras))]
    )


def packed(bits: str) -> bytes:
    """A string of 0 and 1 in bytes, from the lowest bit on."""
    return b"".join(int(bits[at : at + 8][::-1], 2).to_bytes() for at in range(0, len(bits), 8))


def geometric(mean: float, count: int, seed: int) -> Values:
    """Draws of so many failures before a success."""
    random = np.random.default_rng(seed)
    return (random.geometric(1 / (1 + mean), count) - 1).astype(np.uint64)


# Numbers.


@given(
    st.integers(0, LIMIT) | st.sampled_from([n for k in range(64) for n in (1 << k, (1 << k) - 1)])
)
def test_numbers_come_back(number: int) -> None:
    coded = leb128(number)
    assert len(coded) == max(1, -(-number.bit_length() // 7))
    reader = Reader(memoryview(coded + b"\x7f"))
    if number > LIMIT:
        with pytest.raises(Undecodable):
            read_leb128(reader)
        return
    assert read_leb128(reader) == number
    assert reader.at == len(coded)


@pytest.mark.parametrize("bad", [b"", b"\x80", b"\xff" * 8, b"\xff" * 9, b"\x80" * 9 + b"\1"])
def test_numbers_that_do_not_end(bad: bytes) -> None:
    with pytest.raises(Undecodable):
        read_leb128(Reader(memoryview(bad)))


# There and back.


@given(data=st.data())
@settings(max_examples=200)
def test_any_values_come_back(data: st.DataObject) -> None:
    numbers = st.integers(0, 62).flatmap(lambda n: st.integers(0, (1 << n) - 1))
    values = data.draw(st.lists(numbers | st.just(1 << 62), min_size=1, max_size=40))
    kind = data.draw(st.sampled_from(["<u1", "<u2", "<u4", "<u8"]))
    array = np.array(values, "<u8").astype(kind)
    array = np.tile(array, data.draw(st.sampled_from([1, 1, 300])))
    assert np.array_equal(decoded(golomb.encode(array), array.size), array)


@pytest.mark.parametrize("count", [1, 7, 8, 9, golomb._FIELDS, golomb._FIELDS + 1])
@pytest.mark.parametrize("value", [0, 1, 2, 3, 1000, 1 << 31, 1 << 62, LIMIT - 1])
def test_one_value_again_and_again(value: int, count: int) -> None:
    values = np.full(count, value, np.uint64)
    assert np.array_equal(decoded(golomb.encode(values), count), values)


@pytest.mark.parametrize("mean", [0.01, 0.5, 1, 3, 100, 1e6, 1e12, 1e17])
def test_geometric_values_come_back(mean: float) -> None:
    values = geometric(mean, 3 * golomb._PIECE + 5, seed=1)
    assert np.array_equal(decoded(golomb.encode(values), values.size), values)


def test_no_values() -> None:
    assert golomb.encode(np.empty(0, np.uint32)) == b""
    assert decoded(b"", 0).size == 0
    assert decoded(b"", 0, limit=0).size == 0


@pytest.mark.parametrize("m", [*range(1, 20), 255, 256, 257, (1 << 62) + 1, LIMIT])
def test_a_stream_by_hand(m: int) -> None:
    """Of any parameter, not only of the one that we should have taken."""
    values = [v for v in (0, 1, m - 1, m // 2, m, m + 1, 2 * m - 1, 0, 0) if v < LIMIT]
    assert decoded(by_hand(values, m), len(values)).tolist() == values


@pytest.mark.parametrize("values", [[0], [5], [0, 0, 0, 1], [3, 9, 1, 1], [40, 2, 200, 77, 1000]])
def test_what_is_written_is_what_the_page_says(values: list[int]) -> None:
    coded = golomb.encode(np.array(values, np.uint64))
    m = read_leb128(Reader(memoryview(coded)))
    assert coded == by_hand(values, m)


# How large it is.


@pytest.mark.parametrize("mean", [1, 1.3, 1.62, 2, 3, 5, 30, 99, 1000.5, 1e5, 1e9, 1e15])
def test_geometric_values_cost_little_more_than_their_entropy(mean: float) -> None:
    count = 200_000
    entropy = np.log2(1 + mean) + mean * np.log2((1 + mean) / mean)
    bits = 8 * len(golomb.encode(geometric(mean, count, seed=int(mean))))
    assert bits < (entropy + (0.05 if mean >= 2 else 0.11)) * count + 8 * 30


@given(
    mean=st.floats(0, 62).map(lambda power: 2**power),
    top=st.integers(2, 30),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=200)
def test_quotients_stay_within_what_a_reader_takes(mean: float, top: int, seed: int) -> None:
    """Whatever the values; what is past 2^53 too, where a float is no longer exact."""
    random = np.random.default_rng(seed)
    values = np.where(random.random(200) < top / 30, int(min(mean * 1.9, LIMIT - 1)), 0)
    values = values.astype(np.uint64)
    assert np.array_equal(decoded(golomb.encode(values), values.size), values)


def test_parameters_past_the_precision_of_a_float() -> None:
    """Here 1 - 1 / mean is rounded to another parameter, or to none."""
    for k in range(50):
        values = np.array([18_736_000_000_000_000 + k] * 80 + [0] * 20, np.uint64)
        assert np.array_equal(decoded(golomb.encode(values), 100), values)


# What is hostile.

GOOD = golomb.encode(geometric(12, 50, seed=3))


def test_every_truncation_is_undecodable() -> None:
    assert not refused(GOOD, 50)
    for size in range(len(GOOD)):
        assert refused(GOOD[:size], 50), size


def test_every_flipped_bit_is_undecodable_or_within_limits() -> None:
    found = 0
    for bit in range(8 * len(GOOD)):
        bad = bytearray(GOOD)
        bad[bit // 8] ^= 1 << bit % 8
        found += refused(bytes(bad), 50, limit=100)
    assert found > len(GOOD)


HOSTILE = {
    "nothing": b"",
    "a parameter of 0": b"\0\0\xff",
    "a parameter of twice the limit and one": leb128(201) + b"\0\xff" + bytes(8),
    "a parameter of 2^62": leb128(1 << 62) + b"\0\xff" + bytes(62),
    "quotients of more than twice the count": b"\1" + leb128(17) + bytes(2) + b"\xff\1",
    "quotients of 2^62": b"\1" + leb128(1 << 62) + b"\xff" * 20,
    "fewer ones than values": b"\1\2" + b"\xf8\1",
    "more ones than values": b"\1\1" + b"\xff\1",
    "zeros after the last one": b"\1\2" + b"\xff\0",
    "padding after the quotients": b"\1\1" + b"\xfe\3",
    "padding after the remainders": by_hand([0] * 4 + [1] * 4, 3)[:-1] + b"\x80",
    "no remainders": b"\5\0\xff",
    "a value of the limit": by_hand([100] + [0] * 7, 100),
    "a quotient past the limit": by_hand([100] + [0] * 7, 50),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_streams(case: str) -> None:
    assert refused(HOSTILE[case], 8, limit=100)


def test_the_largest_value_below_the_limit() -> None:
    for m in (1, 50, 99, 100, 200):
        values = [99, 0, 0, 0] if m > 1 else [7, 0, 0, 1]
        assert decoded(by_hand(values, m), 4, limit=100).tolist() == values


@given(st.binary(max_size=60), st.integers(1, 80), st.sampled_from([1, 2, 100, 1 << 20, LIMIT]))
@settings(max_examples=300)
def test_any_bytes_are_values_or_undecodable(data: bytes, count: int, limit: int) -> None:
    refused(data, count, limit)


@pytest.mark.parametrize(
    "data",
    [
        leb128(1) + leb128(1 << 24) + b"\xff" * 100,
        leb128(1 << 62) + b"\0" + b"\xff" * 100,
        leb128(LIMIT) + leb128(0) + b"\xff" * 1000,
    ],
)
def test_a_claim_costs_its_reader_nothing(data: bytes) -> None:
    tracemalloc.start()
    try:
        assert refused(data, 1 << 23)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_wide_values_do_not_take_a_byte_a_bit() -> None:
    values = np.random.default_rng(1).integers(0, 1 << 60, 1 << 17).astype(np.uint64)
    tracemalloc.start()
    try:
        coded = golomb.encode(values)
        _, writing = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert np.array_equal(decoded(coded, values.size), values)
        _, reading = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(writing, reading) < 7 * values.nbytes
