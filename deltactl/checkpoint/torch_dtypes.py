"""torch's dtypes by safetensors' code. For what imports torch anyway."""

from __future__ import annotations

import torch

from deltactl.core.dtypes import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, row.torch)
    for code, row in DTYPES.items()
    if row.torch is not None and not row.is_packed and hasattr(torch, row.torch)
}
"""Those of whole bytes that this torch has."""
