"""A trainer's tensors as the bits that are published of them, chunk by chunk.

Only this module and ``staging`` touch the elements of torch tensors. What they hand on are numpy
arrays of elements, as codec.bits has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltactl.checkpoint.torch_dtypes import torch_dtypes
from deltactl.codec.bits import Bits, elements
from deltactl.core.dtypes import nbytes_of
from deltactl.core.errors import Unsupported, UsageError

CHUNK = 1 << 22
"""Bytes of each side looked at together, as in ops.diff."""

_CAST = 1 << 14
"""Elements rounded at a time: below the size at which torch would start threads of its own, which
would only get into the way of ours."""

_CODES = {dtype: code for code, dtype in torch_dtypes().items()}

_LEFT_OUT = "names={...: None}"


@dataclass(frozen=True, slots=True)
class Live:
    """One tensor as it is published.

    ``flat``: its elements in order, 1-D, contiguous, on any device; a view of the tensor itself
    unless that is not contiguous. ``dtype``: the safetensors code of what is published; where that
    is BF16 and ``flat`` is float32 each element is rounded to the nearest, ties to even, as torch's
    ``.to(torch.bfloat16)`` does. ``shape``: in elements of ``dtype``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    flat: torch.Tensor

    @property
    def rounded(self) -> bool:
        """Whether what is published is a rounded view."""
        return self.flat.dtype != torch.bfloat16 and self.dtype == "BF16"

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    def elements_in(self, nbytes: int) -> int:
        """How many of its elements take so many bytes."""
        return nbytes // max(1, self.nbytes // max(1, self.flat.numel()))


def live_tensors(tensors: Mapping[str, torch.Tensor], dtype: str | None) -> dict[str, Live]:
    """``tensors``, by name, as what is published of them.

    ``dtype``: "bfloat16" to publish float32 tensors rounded; None to publish every one as it is.
    Raises Unsupported for a tensor that no safetensors file can hold.
    """
    check_view(dtype)
    return {name: _live(name, tensor, dtype) for name, tensor in tensors.items()}


def check_not_empty(elements: int) -> None:
    """Raise Unsupported for a model that has no elements at all."""
    if not elements:
        what = "the model has no weights to publish: its tensors have no elements"
        raise Unsupported(what, hint="make the publisher when the weights are there; see names=")


def check_view(dtype: str | None) -> None:
    """Raise UsageError for a view that is none."""
    if dtype not in (None, "bfloat16"):
        what = "there is no such view of the weights"
        raise UsageError(what, expected="None or 'bfloat16'", found=dtype)


def _live(name: str, tensor: torch.Tensor, dtype: str | None) -> Live:
    if hasattr(tensor, "to_local"):  # a DTensor
        what = "a tensor is spread over ranks since the publisher was made"
        hint = "make the Publisher after fully_shard and the like, on every rank"
        raise Unsupported(what, tensor=name, found=type(tensor).__name__, hint=hint)
    if (missing := _missing(tensor)) is not None:
        hint = f"make the publisher when the weights are there, or leave it out: {_LEFT_OUT}"
        raise Unsupported(
            "the tensor's elements are not there", tensor=name, found=missing, hint=hint
        )
    if tensor.dtype not in _CODES or tensor.layout != torch.strided:
        raise Unsupported(
            "a tensor of this kind cannot be published",
            tensor=name,
            found=f"{tensor.dtype}, {tensor.layout}, on {tensor.device}",
            hint=f"leave it out: {_LEFT_OUT}",
        )
    rounds = dtype is not None and tensor.dtype == torch.float32
    code = "BF16" if rounds else _CODES[tensor.dtype]
    return Live(name, code, tuple(tensor.shape), tensor.detach().reshape(-1))


def _missing(tensor: torch.Tensor) -> str | None:
    """What there is in place of a tensor's elements, where somebody has taken them away or not
    brought them yet; None where they are there."""
    if tensor.is_meta:
        return f"{list(tensor.shape)} on the meta device"
    if isinstance(tensor, torch.nn.Parameter) and tensor.shape == (0,):
        return "a parameter of no elements, as what shards a model leaves it"
    if tensor.layout == torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes():
        return f"{list(tensor.shape)} whose memory has been freed"
    return None


def bytes_of(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous 1-D tensor; a view."""
    return flat.view(torch.uint8)


def host_chunks(live: Live, start: int, stop: int) -> Iterator[tuple[int, Bits]]:
    """Of a tensor in the host's memory, from element ``start`` to ``stop``: each chunk's first
    element and its bits, valid until the next. Nothing is copied but what is rounded."""
    size = live.elements_in(CHUNK)
    buffer = torch.empty(min(size, stop - start) if live.rounded else 0, dtype=torch.bfloat16)
    for at in range(start, stop, size):
        piece = live.flat[at : min(at + size, stop)]
        if live.rounded:
            piece = _rounded(piece, buffer)
        yield at, elements(_numpy(piece), live.dtype)


def _rounded(piece: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    for at in range(0, piece.numel(), _CAST):
        part = piece[at : at + _CAST]
        buffer[at : at + part.numel()].copy_(part)
    return buffer[: piece.numel()]


def _numpy(piece: torch.Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = bytes_of(piece).numpy()
    return found
