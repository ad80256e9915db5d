"""A writer of TRL's chains: links as its trainer leaves them in a bucket, with no digest of ours.

Step 1 and every tenth is an anchor, which holds all parameters, and has no delta beside it; every
other step is a delta on the one before. Dialects are ``trl-1`` (pull request 5417) and, of the
second (5932, 5937), ``raw`` and ``gap_delta``. It imports nothing of deltactl.

    write_chain(tmp_path / "bucket", states, "gap_delta")
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.checkpoints import BITS, Spec, read_metadata, read_tensors, write_safetensors

DIALECTS = ("trl-1", "raw", "gap_delta")
ANCHOR_EVERY = 10

Tensors = dict[str, Spec]


def write_chain(
    bucket: Path,
    states: Sequence[Mapping[str, Spec]],
    dialect: str,
    *,
    anchor_every: int = ANCHOR_EVERY,
) -> Path:
    """Write the states of steps 1, 2, ... as a chain; returns ``bucket``."""
    for step, state in enumerate(states, 1):
        if step == 1 or step % anchor_every == 0:
            write_anchor(bucket, step, state, dialect)
        else:
            write_delta(bucket, step, states[step - 2], state, dialect, anchor_every=anchor_every)
    return bucket


def anchor_path(bucket: Path, step: int) -> Path:
    return bucket / "anchors" / f"step_{step:06d}.safetensors"


def delta_path(bucket: Path, step: int) -> Path:
    return bucket / "deltas" / f"step_{step:06d}.safetensors"


def write_anchor(bucket: Path, step: int, state: Mapping[str, Spec], dialect: str) -> Path:
    """The step's whole state as a link."""
    total = sum(map(_elements, state.values()))
    metadata = _metadata(dialect, step, sparse=False, params=len(state), changed=total, total=total)
    if dialect == "trl-1":
        metadata |= _first_metadata(-1, step, state, [])
    return write_safetensors(anchor_path(bucket, step), state, metadata)


def write_delta(
    bucket: Path,
    step: int,
    base: Mapping[str, Spec],
    result: Mapping[str, Spec],
    dialect: str,
    *,
    anchor_every: int = ANCHOR_EVERY,
) -> Path:
    """What changed from the state of the step before, of tensors with one dtype and shape."""
    parts: Tensors = {}
    changes = {name: _changes(base[name], result[name]) for name in sorted(result)}
    names = [name for name, (positions, _) in changes.items() if positions.size]
    suffixes = (".indices", ".values") if dialect == "trl-1" else (".idx", ".val")
    for name in names:
        positions, values = changes[name]
        parts[name + suffixes[0]] = _indices(positions, dialect)
        parts[name + suffixes[1]] = (result[name][0], (positions.size,), values.tobytes())
    metadata = _metadata(
        dialect,
        step,
        sparse=True,
        params=len(names),
        changed=sum(positions.size for positions, _ in changes.values()),
        total=sum(map(_elements, result.values())),
    )
    if dialect == "trl-1":
        anchor = max(1, step // anchor_every * anchor_every)
        metadata |= _first_metadata(step - 1, anchor, result, names)
    return write_safetensors(delta_path(bucket, step), parts, metadata)


def rewrite(
    path: Path,
    edit: Callable[[Tensors, dict[str, str]], object],
) -> None:
    """Damage a link: write it anew after ``edit(tensors, metadata)`` changed both in place."""
    tensors, metadata = read_tensors(path), read_metadata(path)
    edit(tensors, metadata)
    write_safetensors(path, tensors, metadata)


def indices_of(spec: Spec) -> npt.NDArray[np.int64]:
    """What an entry of indices or gaps holds."""
    return np.frombuffer(spec[2], _NUMPY[spec[0]]).astype(np.int64)


def as_indices(dtype: str, values: Sequence[int] | npt.NDArray[np.int64]) -> Spec:
    """An entry of indices or gaps."""
    return dtype, (len(values),), np.asarray(values, _NUMPY[dtype]).tobytes()


_NUMPY = {"I32": "<i4", "U16": "<u2", "U32": "<u4"}


def _elements(spec: Spec) -> int:
    return len(spec[2]) * 8 // BITS[spec[0]]


def _changes(
    base: Spec, result: Spec
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.unsignedinteger]]:
    """Positions and new bits. TRL compares floats, and takes -0.0 for +0.0; this compares bits."""
    assert base[:2] == result[:2]
    old, new = (np.frombuffer(spec[2], f"<u{BITS[spec[0]] // 8}") for spec in (base, result))
    positions = np.flatnonzero(old != new)
    return positions, new[positions]


def _indices(positions: npt.NDArray[np.int64], dialect: str) -> Spec:
    if dialect != "gap_delta":
        return as_indices("I32", positions)
    gaps = np.diff(positions, prepend=-1) - 1
    return as_indices("U16" if gaps.max() < 1 << 16 else "U32", gaps)


def _metadata(
    dialect: str, step: int, *, sparse: bool, params: int, changed: int, total: int
) -> dict[str, str]:
    """What both dialects have; all values are strings, spelled as Python's ``str`` spells them."""
    metadata = {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": str(sparse),
        "model_version": str(step),
        "num_changed_params": str(params),
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": str(1.0 - changed / max(total, 1)),
    }
    return metadata if dialect == "trl-1" else metadata | {"encoding": dialect}


def _first_metadata(
    before: int, anchor: int, state: Mapping[str, Spec], names: Sequence[str]
) -> dict[str, str]:
    """What the first dialect has beside; its checksum: the result's bytes, in order of name."""
    checksum = hashlib.sha256()
    for name in sorted(state):
        checksum.update(state[name][2])
    return {
        "prev_model_version": str(before),
        "anchor_step": str(anchor),
        "base_model_id": "tiny/model",
        "checksum_sha256": checksum.hexdigest(),
        "changed_params": json.dumps(names),
    }
