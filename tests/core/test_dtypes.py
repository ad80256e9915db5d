"""The table of dtypes is what numpy and torch say of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltactl.checkpoint.torch_dtypes import torch_dtypes
from deltactl.core.dtypes import (
    DTYPES,
    FLOATS,
    element_bytes,
    element_dtype,
    elements_of,
    nbytes_of,
)

_HALVES = {code for code in FLOATS if DTYPES[code].bits <= 16}


@pytest.mark.parametrize("code", torch_dtypes())
def test_torch_has_dtypes_of_this_width(code: str) -> None:
    assert 8 * torch_dtypes()[code].itemsize == DTYPES[code].bits
    assert torch_dtypes()[code].is_floating_point == (code in FLOATS or code == "F8_E8M0")


@pytest.mark.parametrize("code", sorted(_HALVES))
def test_each_element_of_a_narrow_float_is_what_its_fields_say(code: str) -> None:
    """All of them: exponent, mantissa, bias, and where NaN and infinities begin."""
    bits, row = DTYPES[code].bits, FLOATS[code]
    every = np.arange(1 << (bits - 1)).astype(f"<u{bits // 8}")
    held = torch.from_numpy(every.view(f"<i{bits // 8}")).view(torch_dtypes()[code])
    found = held.double().numpy()
    exponent, mantissa = every >> row.mantissa, every % (1 << row.mantissa)
    below = np.where(exponent == 0, 0, 1 << row.mantissa) + mantissa
    said = below * 2.0 ** (np.maximum(exponent.astype(int), 1) - row.bias - row.mantissa)
    limit = len(every) if row.not_finite is None else row.not_finite
    assert np.array_equal(found[:limit], said[:limit])
    assert not np.isfinite(found[limit:]).any()


@pytest.mark.parametrize(("code", "kind"), [("F32", np.float32), ("F64", np.float64)])
def test_wide_floats_lie_as_numpy_has_them(code: str, kind: type) -> None:
    info, row = np.finfo(kind), FLOATS[code]
    assert (info.iexp, info.nmant, info.maxexp - 1) == (row.exponent, row.mantissa, row.bias)
    assert row.not_finite == row.highest << row.mantissa


@pytest.mark.parametrize("code", DTYPES)
def test_an_element_is_a_byte_at_least(code: str) -> None:
    assert element_bytes(code) in (1, 2, 4, 8)
    assert elements_of(code, (4, 6)) * element_bytes(code) == nbytes_of(code, (4, 6))
    assert element_bytes(element_dtype(code)) == element_bytes(code)
    assert not DTYPES[element_dtype(code)].is_packed
    assert (element_dtype(code) == code) is not DTYPES[code].is_packed
