"""What every encoding of a sparse tensor offers: blocks encoded one by one, parts, a decoder.

A tensor's elements are cut into blocks of BLOCK elements. While two checkpoints are compared each
block with changes is encoded for itself, in any order and on any thread (``encode``); when all
blocks are known the encoding turns them into the parts of the tensor in the delta (``parts``).
Reading goes the same way: ``decoder`` checks the parts against the tensor, and its ``block`` gives
one block's changes, so that no reader holds more than a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deltactl.codec.bits import Bits, Bytes, Positions, touch_sum
from deltactl.core.dtypes import element_bytes, nbytes_of
from deltactl.files.atomic import Segment, Spool

BLOCK = 1 << 23
"""Elements a block. Large enough that a block's own tables cost less than a hundredth, small enough
to bound memory and to spread one tensor over many cores."""


_PIECE = 1 << 19  # elements whose changes are looked at together


def block_count(elements: int) -> int:
    """Blocks of a tensor of ``elements`` elements."""
    return -(-elements // BLOCK)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The changes of one block: its number, how many they are, and the encoding's streams."""

    number: int
    count: int
    streams: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a delta file: key ``name + suffix``, dtype, shape, and its bytes in pieces."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[bytes]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as read from a file: dtype, shape and the mapped bytes, shape (n,)."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True)
class Target:
    """The tensor that changes belong to; ``file`` and ``name`` are for messages."""

    file: str
    name: str
    dtype: str
    elements: int


class BlockChanges(Protocol):
    """One block's changes, decoded."""

    @property
    def positions(self) -> Positions:
        """Within the block, strictly rising, shape (k,). May be made anew each time."""
        ...

    def within(self, start: int, length: int) -> Positions:
        """Those in ``length`` elements from ``start`` on, in any order."""
        ...

    def new_bits(self, before: Bits) -> Bits:
        """The bits at ``positions`` afterwards, shape (k,).

        ``before``: those there in the state before, shape (k,), and of the tensor's width; the only
        ones that are looked at, so that who holds no base need but gather them.
        """
        ...

    def put(self, elements: Bits, start: int) -> None:
        """Make the changes among the block's elements from ``start`` on, in place.

        ``elements``: a contiguous part of the block in the state before, of any length.
        """
        ...


class Decoder(Protocol):
    """One tensor's changes, block by block."""

    count: int
    """Changed elements of the whole tensor."""

    needs_base: bool
    """Whether ``block`` looks at the base; if not it only takes its length."""

    def numbers(self) -> Sequence[int]:
        """The numbers of the blocks that have changes, rising."""
        ...

    def count_in(self, number: int) -> int:
        """Changed elements of one block."""
        ...

    def block(self, number: int, base: Bits) -> BlockChanges:
        """The changes of one block. ``base``: its elements in the state before, shape (up to
        BLOCK,). Every position is below that length. Raises Malformed."""
        ...


def unseen(dtype: str, length: int) -> Bits:
    """What stands for the ``length`` elements of a block's base where nobody has it and only its
    length counts (``needs_base`` is False): read-only zeros, which take no memory."""
    return np.broadcast_to(np.zeros(1, f"<u{element_bytes(dtype)}"), (length,))


def touch_sum_of(changes: BlockChanges, block: Bits, index: int) -> int:
    """The touch sum of a block's bits where it changes; ``index``: of its first element."""
    pieces = (changes.within(start, _PIECE) for start in range(0, block.size, _PIECE))
    return sum(touch_sum(at, block.take(at), index) for at in pieces) % (1 << 64)


class Encoding(Protocol):
    """One way to write a sparse tensor."""

    name: str
    suffixes: tuple[str, ...]
    dense_if_smaller: bool
    """Whether a tensor is carried whole where that takes no more bytes."""

    needs_base: bool
    """Whether even the positions of the changes are only known with the base at hand. Where not,
    ``encode`` looks at none of the base's elements."""

    def encode(
        self, base: Bits, positions: Positions, before: Bits, after: Bits, dtype: str
    ) -> tuple[bytes, ...]:
        """The streams of one block: all its elements in the state before, shape (up to BLOCK,);
        positions in it (k,), k > 0, and the bits there before and after."""
        ...

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        """The tensor's parts, from all blocks that have changes, in order of their numbers."""
        ...

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> Decoder:
        """Check ``parts`` (by suffix) and open them. Raises Malformed."""
        ...


def concatenated(spool: Spool, blocks: Sequence[EncodedBlock], stream: int) -> Iterator[bytes]:
    """One stream of every block, in order."""
    for block in blocks:
        yield spool.read(block.streams[stream])
