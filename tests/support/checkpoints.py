"""Small checkpoints for tests, written and read without deltactl's own code.

A checkpoint in memory is a dict ``name -> (dtype, shape, data)``: the safetensors dtype code, a
tuple of ints, and little-endian bytes::

    tensors = {"a": random_tensor("BF16", (4, 8), seed=1), "b": ("F32", (), bytes(4))}
    write_safetensors(tmp_path / "one.safetensors", tensors)
    write_hf_directory(tmp_path / "model", tensors, shards=2, aux={"config.json": b"{}"})
    assert read_tensors(tmp_path / "model") == tensors

Nothing is checked, so that malformed files can be made too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from random import Random
from typing import Any

Spec = tuple[str, tuple[int, ...], bytes]
"""One tensor: dtype code, shape, little-endian bytes."""

BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Every dtype that safetensors 0.8 names, with the bits of one element."""


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Spec:
    """Random bits of that dtype and shape (NaNs and infinities among them; BOOL is 0 or 1)."""
    data = Random(seed).randbytes(prod(shape) * BITS[dtype] // 8)
    return dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def random_weights(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Spec:
    """Random bits of BF16, F16 or F32 that are finite: the exponent's highest bit is 0."""
    _, _, data = random_tensor(dtype, shape, seed)
    width = BITS[dtype] // 8
    top = (byte & 0xBF if at % width == width - 1 else byte for at, byte in enumerate(data))
    return dtype, shape, bytes(top)


def changed(spec: Spec, fraction: float = 0.01, seed: int = 0) -> Spec:
    """The same tensor with about ``fraction`` of its elements one up in their lowest byte.

    At least one changes unless the tensor is empty; for sub-byte dtypes an element is a byte.
    """
    dtype, shape, data = spec
    width = max(BITS[dtype] // 8, 1)
    count = len(data) // width
    new = bytearray(data)
    for at in Random(seed).sample(range(count), min(count, max(1, round(fraction * count)))):
        low = at * width
        new[low] = new[low] ^ 1 if dtype == "BOOL" else (new[low] + 1) & 0xFF
    return dtype, shape, bytes(new)


def pack_safetensors(
    tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a safetensors file with the tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        at += len(data)
    return raw_safetensors(header, b"".join(data for _, _, data in tensors.values()))


def raw_safetensors(header: object, payload: bytes = b"") -> bytes:
    """A file with exactly this header (bytes as they are, anything else as JSON) and payload."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def write_safetensors(
    path: Path, tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write one file, its directory too; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_safetensors(tensors, metadata))
    return path


def write_hf_directory(
    path: Path,
    tensors: Mapping[str, Spec],
    shards: int = 2,
    aux: Mapping[str, bytes | str] | None = None,
) -> Path:
    """Write a Hugging Face directory; returns ``path``.

    ``shards=1`` gives ``model.safetensors`` alone; more give ``model-00001-of-0000N.safetensors``
    with the tensors dealt out in turn, and the index. ``aux`` is every other file: relative path to
    content.
    """
    path.mkdir(parents=True, exist_ok=True)
    for name, content in (aux or {}).items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
        return path
    weight_map = {}
    for n in range(shards):
        file = path / f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[n::shards]
        write_safetensors(file, {name: tensors[name] for name in names}, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file.name))
    total = sum(len(data) for _, _, data in tensors.values())
    write_index(path, weight_map, {"total_size": total})
    return path


def write_index(
    directory: Path,
    weight_map: object,
    metadata: object = None,
    name: str = "model.safetensors.index.json",
) -> Path:
    """Write an index file with these parts, right or wrong; returns its path."""
    path = directory / name
    path.write_text(json.dumps({"metadata": metadata or {}, "weight_map": weight_map}))
    return path


def read_tensors(path: Path) -> dict[str, Spec]:
    """All tensors of a safetensors file, or of every ``*.safetensors`` of a directory, by name."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return {name: spec for file in files for name, spec in read_tensors(file).items()}
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8:start]), raw[start:]
    header.pop("__metadata__", None)
    return {
        name: (e["dtype"], tuple(e["shape"]), body[slice(*e["data_offsets"])])
        for name, e in header.items()
    }


def read_metadata(path: Path) -> dict[str, str]:
    """The ``__metadata__`` of a safetensors file; empty where there is none."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return dict(header.get("__metadata__", {}))


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
