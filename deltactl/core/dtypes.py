"""The dtypes that safetensors names, a row each, and the size of a tensor that has one.

An *element* is an unsigned integer of 1, 2, 4 or 8 bytes. Packed types of less than a byte (F4, F6)
are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Float(NamedTuple):
    """How a float's bits lie below its sign: bits of the exponent, and of the mantissa below it;
    the exponent's bias. The bits rise with the magnitude, and from ``not_finite`` on are infinite
    or NaN; None: only the sign with nothing below it is NaN, and nothing is infinite."""

    exponent: int
    mantissa: int
    bias: int
    not_finite: int | None

    @property
    def highest(self) -> int:
        """The highest exponent, as its bits say it."""
        return (1 << self.exponent) - 1


class Dtype(NamedTuple):
    """``bits``: of one element; ``torch``: what torch calls it, None where it has none such;
    ``float``: None for what is no float with a sign."""

    bits: int
    torch: str | None = None
    float: Float | None = None

    @property
    def is_packed(self) -> bool:
        """Whether an element is less than a byte."""
        return self.bits < 8


DTYPES: Mapping[str, Dtype] = {
    "BOOL": Dtype(8, "bool"),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "U16": Dtype(16, "uint16"),
    "I16": Dtype(16, "int16"),
    "U32": Dtype(32, "uint32"),
    "I32": Dtype(32, "int32"),
    "U64": Dtype(64, "uint64"),
    "I64": Dtype(64, "int64"),
    "F4": Dtype(4, "float4_e2m1fn_x2"),
    "F6_E2M3": Dtype(6),
    "F6_E3M2": Dtype(6),
    "F8_E4M3": Dtype(8, "float8_e4m3fn", Float(4, 3, 7, 0x7F)),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz", Float(4, 3, 8, None)),
    "F8_E5M2": Dtype(8, "float8_e5m2", Float(5, 2, 15, 0x7C)),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz", Float(5, 2, 16, None)),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F16": Dtype(16, "float16", Float(5, 10, 15, 0x7C00)),
    "BF16": Dtype(16, "bfloat16", Float(8, 7, 127, 0x7F80)),
    "F32": Dtype(32, "float32", Float(8, 23, 127, 0x7F80_0000)),
    "F64": Dtype(64, "float64", Float(11, 52, 1023, 0x7FF << 52)),
    "C64": Dtype(64, "complex64"),
}
"""By safetensors' code."""

FLOATS: Mapping[str, Float] = {code: row.float for code, row in DTYPES.items() if row.float}
"""Those whose top bit is a sign and whose other bits rise with the magnitude."""

OF_TORCH: Mapping[str, str] = {row.torch: code for code, row in DTYPES.items() if row.torch}
"""By torch's name: safetensors' code."""

MAX_SIZE = (1 << 63) - 1
"""Bytes that no file has more of."""


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor.

    Raises ValueError for an unknown dtype, a size that is no whole byte, and one beyond any file.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype}")
    bits = DTYPES[dtype].bits
    for length in shape:
        bits *= length
        if bits > 8 * MAX_SIZE:  # at once, or a hostile shape costs a product of millions of digits
            raise ValueError("the tensor is larger than any file")
    if bits % 8:
        raise ValueError("the tensor does not fill whole bytes")
    return bits // 8


def element_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``: 1, 2, 4 or 8."""
    return max(DTYPES[dtype].bits // 8, 1)


def element_dtype(dtype: str) -> str:
    """The dtype of elements alone, without their tensor: of packed ones their bytes'."""
    return "U8" if DTYPES[dtype].is_packed else dtype


def elements_of(dtype: str, shape: Iterable[int]) -> int:
    """Elements of a tensor; of a dtype below a byte, its bytes. Raises as ``nbytes_of``."""
    return nbytes_of(dtype, shape) // element_bytes(dtype)
