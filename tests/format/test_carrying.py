"""How a delta carries a tensor, whoever found out what changed of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from blake3 import blake3

from deltactl.codec import encoding_named
from deltactl.codec.base import EncodedBlock
from deltactl.core.digest import TensorState
from deltactl.files.atomic import Spool
from deltactl.format.carrying import Sparse, carry
from deltactl.format.header import Record

OLD = np.arange(64, dtype=np.uint16)


def state(bits: np.ndarray, dtype: str = "BF16", shape: tuple[int, ...] = (8, 8)) -> TensorState:
    return TensorState("w", dtype, shape, blake3(bits.tobytes()).hexdigest())


def data(bits: np.ndarray) -> np.ndarray:
    return np.frombuffer(bits.tobytes(), np.uint8)


@pytest.fixture
def spool() -> Iterator[Spool]:
    with Spool() as found:
        yield found


def sparse(new: np.ndarray, spool: Spool, encoding: str) -> Sparse:
    positions = np.flatnonzero(new != OLD)
    before, after = OLD[positions], new[positions]
    streams = encoding_named(encoding).encode(OLD, positions, before, after, "BF16")
    block = EncodedBlock(0, positions.size, tuple(map(spool.append, streams)))
    return Sparse([block], (1 << 64) + 5, 7)


def whole(bits: np.ndarray) -> bytes:
    return bits.tobytes()


def test_a_removed_tensor(spool: Spool) -> None:
    record, parts = carry(state(OLD), None, None, None, encoding_named("ulp"), spool)
    assert (record, parts) == (Record("w", "removed", "BF16", (8, 8), 0), ())


def test_an_added_tensor(spool: Spool) -> None:
    after = state(OLD)
    record, (part,) = carry(None, after, data(OLD), None, encoding_named("ulp"), spool)
    assert record == Record("w", "added", "BF16", (8, 8), 64, after.digest)
    assert (part.suffix, part.dtype, part.shape) == (".dense", "BF16", (8, 8))
    assert b"".join(part.pieces) == whole(OLD)


@pytest.mark.parametrize("before", [("F16", (8, 8)), ("BF16", (64,)), ("U8", (4, 2))])
def test_one_of_another_dtype_or_shape(before: tuple[str, tuple[int, ...]], spool: Spool) -> None:
    after = state(OLD)
    old = TensorState("w", *before, "0" * 64)
    record, (part,) = carry(old, after, data(OLD), None, encoding_named("ulp"), spool)
    assert record == Record(
        "w", "dense", "BF16", (8, 8), 64, after.digest, base_dtype=before[0], base_shape=before[1]
    )
    assert b"".join(part.pieces) == whole(OLD)


def test_one_whose_changes_are_not_known(spool: Spool) -> None:
    """A row names the base's dtype and shape only where they are other ones."""
    new = OLD + 1
    record, _ = carry(state(OLD), state(new), data(new), None, encoding_named("ulp"), spool)
    assert record == Record("w", "dense", "BF16", (8, 8), 64, state(new).digest)


def test_one_that_did_not_change(spool: Spool) -> None:
    nothing = Sparse([], 0, 0)
    carried = carry(state(OLD), state(OLD), data(OLD), nothing, encoding_named("ulp"), spool)
    assert carried == (None, ())


@pytest.mark.parametrize("encoding", ["raw", "gap_delta", "ulp"])
def test_what_changed_and_the_sums_over_it(encoding: str, spool: Spool) -> None:
    new = OLD.copy()
    new[[3, 40]] ^= 1
    codec = encoding_named(encoding)
    after = state(new)
    record, parts = carry(state(OLD), after, data(new), sparse(new, spool, encoding), codec, spool)
    assert record == Record("w", "sparse", "BF16", (8, 8), 2, after.digest, 5, 7)
    assert [part.suffix for part in parts] == list(codec.suffixes)


def test_whole_where_that_takes_no_more(spool: Spool) -> None:
    """Then its row counts the elements that changed, and has no sums."""
    new = np.random.default_rng(1).integers(0, 1 << 16, 64, dtype=np.uint16)
    changed = int(np.count_nonzero(new != OLD))
    codec = encoding_named("ulp")
    record, (part,) = carry(
        state(OLD), state(new), data(new), sparse(new, spool, "ulp"), codec, spool
    )
    assert record == Record("w", "dense", "BF16", (8, 8), changed, state(new).digest)
    assert (part.suffix, b"".join(part.pieces)) == (".dense", whole(new))
