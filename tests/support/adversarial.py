"""Bit patterns that go wrong where floats are used, positions at the edges, and small blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from deltactl.codec import absolute, base, bits, golomb, integers, ulp, ulp_ctx
from tests.support.checkpoints import BITS

Bits = npt.NDArray[np.unsignedinteger]

LAYOUTS = {
    "F8_E5M2": (5, 2), "F8_E4M3": (4, 3), "F8_E5M2FNUZ": (5, 2), "F8_E4M3FNUZ": (4, 3),
    "F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52),
}  # fmt: skip
"""Bits of exponent and mantissa of the floats that have a sign on top."""


def width_of(dtype: str) -> int:
    """Bytes of an element; packed types have elements of one byte."""
    return max(BITS[dtype] // 8, 1)


def unsigned(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The numpy type of an element."""
    return np.dtype(f"<u{width_of(dtype)}")


def special_bits(dtype: str) -> Bits:
    """Zeros, denormals, infinities, NaNs of many payloads, edges of exponents; in either sign."""
    kind = unsigned(dtype)
    top = 1 << (8 * kind.itemsize - 1)
    found = {0, 1, 2, top - 1, top >> 1}
    if dtype in LAYOUTS:
        exponent, mantissa = LAYOUTS[dtype]
        infinity = ((1 << exponent) - 1) << mantissa
        found |= {infinity, infinity + 1, infinity + (1 << (mantissa - 1)), infinity - 1}
        for power in (1, 2, (1 << (exponent - 1)) - 1, 1 << (exponent - 1)):
            found |= {power << mantissa, (power << mantissa) - 1, (power << mantissa) + 1}
    return np.array(sorted(found | {bits | top for bits in found}), kind)


PATTERNS = ("none", "one", "first and last", "all", "run", "some", "edges")


@st.composite
def pairs(draw: st.DrawFn, dtype: str, most: int = 200, block: int = 8) -> tuple[Bits, Bits]:
    """Old and new elements of one tensor, shape (0 to ``most``,), with a pattern of changes."""
    size = draw(st.integers(0, most) | st.sampled_from([0, 1, block - 1, block, block + 1]))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = _bits(random, dtype, size)
    new = old.copy()
    at = _positions(random, draw(st.sampled_from(PATTERNS)), size, block)
    fresh = _bits(random, dtype, at.size)
    steps = random.integers(-3, 4, at.size).astype(f"<i{old.itemsize}").view(old.dtype)
    near = random.random(at.size) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    new[at] = np.where(near, old[at] + steps, fresh)
    new[at] ^= (new[at] == old[at]).astype(old.dtype)
    return old, new


def _bits(random: np.random.Generator, dtype: str, size: int) -> Bits:
    kind = unsigned(dtype)
    bits = np.frombuffer(random.bytes(size * kind.itemsize), kind).copy()
    special = random.random(size) < 0.5
    bits[special] = random.choice(special_bits(dtype), int(special.sum()))
    return bits


def _positions(
    random: np.random.Generator, pattern: str, size: int, block: int
) -> npt.NDArray[np.int64]:
    every = np.arange(size)
    if not size or pattern == "none":
        return every[:0]
    if pattern == "one":
        return every[[random.integers(size)]]
    if pattern == "first and last":
        return np.unique(every[[0, -1]])
    if pattern == "run":
        start = int(random.integers(size))
        return every[start : start + 1 + int(random.integers(size))]
    if pattern == "some":
        return every[random.random(size) < 0.1]
    if pattern == "edges":
        return every[(every % block == 0) | (every % block == block - 1)]
    return every


@contextmanager
def small_blocks(size: int, chunk: int = 1 << 20) -> Iterator[None]:
    """Make all of the library cut tensors into blocks of ``size`` elements, and look at as few of
    them together as can be.

    ``chunk``: indices that the absolute encodings look at together.
    """
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("deltactl.") and hasattr(module, "BLOCK")
    ]
    places = [(module, "BLOCK", size) for module in modules] + [(absolute, "_CHUNK", chunk)]
    places += [(module, "_PIECE", 16) for module in (base, bits, golomb, integers, ulp, ulp_ctx)]
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)
