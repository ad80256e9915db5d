"""torch's dtypes by safetensors' code."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from deltactl.core.dtypes import DTYPES

if TYPE_CHECKING:
    import torch


@cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Those of whole bytes that this torch has. Imports torch."""
    import torch

    return {
        code: getattr(torch, row.torch)
        for code, row in DTYPES.items()
        if row.torch is not None and not row.is_packed and hasattr(torch, row.torch)
    }
