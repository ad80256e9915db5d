"""A reader of TRL's deltas, and of nothing else: it knows no key of ours, and proves nothing.

Both dialects, as TRL's trainer writes them and its inference side takes them: values are assigned
where the indices say. It imports nothing of deltactl.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.checkpoints import Spec, read_metadata, read_tensors

_INDICES = {"I32": "<i4", "I64": "<i8", "U16": "<u2", "U32": "<u4"}


def apply_trl(path: Path, base: dict[str, Spec]) -> dict[str, Spec]:
    """The checkpoint that a delta file of either dialect leads to from ``base``."""
    metadata, parts = read_metadata(path), read_tensors(path)
    assert metadata["format"] == "sparse_weight_patch"
    assert metadata["sparse"] == "True"
    if "changed_params" in metadata:
        return _first(json.loads(metadata["changed_params"]), parts, base)
    return _second(metadata["encoding"], parts, base)


def _first(names: list[str], parts: dict[str, Spec], base: dict[str, Spec]) -> dict[str, Spec]:
    """``{name}.indices``, int32 into the flat tensor, and ``{name}.values``."""
    state = dict(base)
    for name in names:
        dtype, _, indices = parts[f"{name}.indices"]
        assert dtype == "I32"
        _assign(state, name, np.frombuffer(indices, "<i4"), parts[f"{name}.values"])
    return state


def _second(encoding: str, parts: dict[str, Spec], base: dict[str, Spec]) -> dict[str, Spec]:
    """``{name}.idx``, encoded as the header says, and ``{name}.val``, whose keys give the names.

    What has another suffix is passed over.
    """
    state = dict(base)
    for key in parts:
        if not key.endswith(".val"):
            continue
        name = key.removesuffix(".val")
        dtype, _, data = parts[f"{name}.idx"]
        indices = np.frombuffer(data, _INDICES[dtype]).astype(np.int64)
        if encoding == "gap_delta":
            assert dtype in ("U16", "U32")
            indices = np.cumsum(indices + 1) - 1
        else:
            assert encoding == "raw"
            assert dtype in ("I32", "I64")
        _assign(state, name, indices, parts[key])
    return state


def _assign(
    state: dict[str, Spec], name: str, indices: npt.NDArray[np.integer], values: Spec
) -> None:
    dtype, shape, data = state[name]
    value_dtype, _, bits = values
    assert value_dtype == dtype
    assert len(indices) > 0
    width = f"V{len(bits) // len(indices)}"
    flat = np.frombuffer(data, width).copy()
    flat[indices] = np.frombuffer(bits, width)
    state[name] = (dtype, shape, flat.tobytes())
