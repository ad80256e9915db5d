"""Digests: of a tensor, and of a state, the identity of a checkpoint's content."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from deltactl.core.dtypes import elements_of, nbytes_of

_PIECE = 1 << 22

HEX_DIGITS = 64
"""Digits of a digest: BLAKE3's 32 bytes in lower-case hexadecimal."""


@dataclass(frozen=True, slots=True)
class TensorState:
    """What of one tensor enters the state: its name, dtype, shape and the digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def elements(self) -> int:
        """See core.dtypes."""
        return elements_of(self.dtype, self.shape)


def hasher(threads: int = 1) -> Any:
    """A new BLAKE3 hasher: ``update(bytes-like)``, ``hexdigest()``."""
    return blake3(max_threads=threads)


def digest_of(data: Any, threads: int = 1, told: Callable[[int], object] | None = None) -> str:
    """The digest of contiguous bytes, or of an array of them; ``told`` how many were read, piece by
    piece."""
    digest, view = hasher(threads), memoryview(data)
    for at in range(0, len(view), _PIECE):
        piece = view[at : at + _PIECE]
        digest.update(piece)
        if told is not None:
            told(len(piece))
    found: str = digest.hexdigest()
    return found


def state_digest(tensors: Iterable[TensorState]) -> str:
    """The digest of a state, 64 hexadecimal digits.

    BLAKE3 over the tensors in order of the UTF-8 bytes of their names, each as: length of the name
    and the name, length of the dtype and the dtype, number of dimensions and the dimensions, 32
    bytes of digest; every number 8 bytes little-endian. The lengths keep two different states from
    sharing one stream of bytes. Names of files and shards do not enter.
    """
    state = blake3()
    for name, tensor in sorted(((t.name.encode(), t) for t in tensors), key=lambda pair: pair[0]):
        dtype = tensor.dtype.encode()
        state.update(struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(dtype)) + dtype)
        state.update(struct.pack(f"<{1 + len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
        state.update(bytes.fromhex(tensor.digest))
    return state.hexdigest()


def is_digest(text: object) -> bool:
    """Whether ``text`` is 64 lower-case hexadecimal digits."""
    return (
        isinstance(text, str)
        and len(text) == HEX_DIGITS
        and not set(text) - set("0123456789abcdef")
    )
