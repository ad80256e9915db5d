"""A delta that was made before, with the steps that it has in a chain."""

from __future__ import annotations

import shutil
from pathlib import Path

from deltactl.files.safetensors import make_header, read_header
from deltactl.format.delta_header import parse_delta
from deltactl.format.header import HEADER_DIGEST, PLACEHOLDER, seal


def restamped(source: Path, out: Path, step: int, base_step: int) -> int:
    """Copy a delta with its step and its base's step in the header; returns its size."""
    header = read_header(source)
    parse_delta(header, source)
    metadata = header.metadata | {
        "model_version": str(step),
        "prev_model_version": str(base_step),
        HEADER_DIGEST: PLACEHOLDER,
    }
    entries = [(e.name, e.dtype, e.shape) for e in header.entries.values()]
    payload = len(header.raw)
    with open(out, "wb") as target, open(source, "rb") as file:
        target.write(seal(make_header(entries, metadata)))
        file.seek(payload)
        shutil.copyfileobj(file, target, 1 << 20)
        return target.tell()
