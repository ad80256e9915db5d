"""Deltas that look like checkpoints, ours and those of other systems, told by what is in them."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from deltactl.checkpoint.model_names import ADAPTER_FIX
from deltactl.codec.bits import Bytes
from deltactl.core.errors import DeltactlError, NotFound, Unsupported, listed
from deltactl.files.json_bounds import TABLE
from deltactl.files.safetensors import Header
from deltactl.files.untrusted import open_regular, parse_json, read_index
from deltactl.format.delta_header import says_delta
from deltactl.format.delta_index import DELTA_INDEX

_KEPT = r"(lr_)?(optim|scheduler|scaler|rng_state|random_states|recipe_state|extra_state)"
TRAINER_STATE = re.compile(
    rf"{_KEPT}[\w-]*\.(pt|pth|bin|pkl)|training_args\.bin|trainer_state\.json"
    r"|global_step\d+|optimizer_\d+|.*\.distcp|.*_(model|optim)_states\.pt"
)
"""Names of files and directories in which trainers keep what they go on with."""

_ZSTD = b"\x28\xb5\x2f\xfd"
_HEX = re.compile(r"[0-9a-f]{8,64}")
_LOOKED_AT = 64  # tensors whose first bytes are looked at: of a delta all are frames
_MAX_CONTENTS = 1 << 22  # bytes of a zip archive's list, which takes some ten times that in memory
_END_RECORD = 22 + (1 << 16)  # bytes: a zip archive's last record, and the longest comment
_XOR_FAMILY = "a delta as slime, SGLang and ModelExpress write"
_FULL = "name the checkpoint that these deltas were applied to, or a full version"


def check_container(header: Header, data: Bytes, path: Path) -> None:
    """Raise Unsupported for a safetensors file that is a delta, and no checkpoint.

    Ours and TRL's say so; of the XOR deltas of others each tensor is a zstd frame, 1-D U8, and some
    have its checksum in the metadata.
    """
    if says_delta(header):
        raise _own(path)
    entries = list(header.entries.values())
    if not entries or any(e.dtype != "U8" or len(e.shape) != 1 or not e.nbytes for e in entries):
        return
    sums = all(_HEX.fullmatch(header.metadata.get(entry.name, "")) for entry in entries)
    if sums or all(_is_frame(data, entry.start) for entry in entries[:_LOOKED_AT]):
        family = _XOR_FAMILY if sums else f"{_XOR_FAMILY}, or SkyRL"
        what = f"{family}, and no checkpoint: each of its tensors is a compressed change"
        raise Unsupported(what, file=path, tensor=entries[0].name, hint=_FULL)


def _is_frame(data: Bytes, start: int) -> bool:
    return data[start : start + len(_ZSTD)].tobytes() == _ZSTD


def _own(path: Path) -> Unsupported:
    return Unsupported(
        "a delta, and no checkpoint",
        file=path,
        hint=f"deltactl apply {quote(str(path))} BASE -o OUT makes a checkpoint of it",
    )


def check_index_metadata(metadata: object, index: Path) -> None:
    """Raise Unsupported where an index says that its shards are changes."""
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        base = str(metadata.get("base_version", "?"))[:40]
        what = f"{_XOR_FAMILY}, upon version {base}, and no checkpoint"
        raise Unsupported(what, file=index.parent, hint=_FULL)


def check_directory(directory: Path, names: Sequence[str]) -> None:
    """Raise Unsupported for a directory that is a delta; ``names`` are those of what is in it."""
    if DELTA_INDEX in names:
        raise _own(directory)
    if "delta_metadata.json" in names or "delta_sparse.bin.zst" in names:
        raise Unsupported("a delta of grail (PULSE), and no checkpoint", file=directory, hint=_FULL)
    if "manifest.json" in names and _is_skyrl(directory / "manifest.json"):
        raise Unsupported("a delta of SkyRL, and no checkpoint", file=directory, hint=_FULL)


def _is_skyrl(manifest: Path) -> bool:
    try:
        document: dict[str, Any] = parse_json(read_index(manifest), manifest, bounds=TABLE)
    except DeltactlError:
        return False
    return "base_version" in document and isinstance(document.get("tensors"), list)


def no_weights(directory: Path, names: Sequence[str], expected: str) -> DeltactlError:
    """The error for a directory without weights that can be read: what it is instead, if known."""

    def unsupported(what: str, hint: str) -> Unsupported:
        return Unsupported(what, file=directory, hint=hint)

    def inside(pattern: str) -> str | None:
        return max((n for n in names if re.fullmatch(pattern, n)), key=_by_number, default=None)

    if inside(r".*\.distcp"):
        convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        what = "a distributed checkpoint, which is not read yet"
        return unsupported(what, f"{convert} {directory} weights.pt")
    if inside(r"zero_to_fp32\.py|.*_model_states\.pt|global_step\d+"):
        home = directory if "zero_to_fp32.py" in names else directory.parent
        what = "a checkpoint of DeepSpeed, in parts"
        return unsupported(what, f"python {home}/zero_to_fp32.py {home} OUT")
    if {"anchors", "deltas"} & set(names):
        what = "a bucket with a chain, and no checkpoint"
        return unsupported(what, f"deltactl pull {quote(str(directory))} DEST")
    if found := inside(r"weight_v\d+|v\d+|delta-\d{8}"):
        what = f"a directory of versions such as {found}, and no checkpoint"
        return unsupported(what, _FULL)
    if "FULL" in names or "DELTA" in names:
        hint = f"name {directory / 'FULL'}" if "FULL" in names else _FULL
        return unsupported("a checkpoint of grail (PULSE)", hint)
    if found := inside(r".*\.(gguf|h5|msgpack|onnx|npz|tflite)"):
        what = f"weights in another format, {found}"
        return unsupported(what, "take the model's safetensors, or save it with save_pretrained")
    if "adapter_model.bin" in names:
        return unsupported("a LoRA adapter in a PyTorch file, and no model", ADAPTER_FIX)
    hint = f"ls {directory}"
    if "snapshots" in names and "blobs" in names:
        hint = f"name one of {directory}/snapshots"
    elif found := inside(r"checkpoint-\d+|step[_-]?\d+"):
        hint = f"name one of its checkpoints, as {directory / found}"
    return NotFound(
        "no weights in this directory",
        file=directory,
        expected=expected,
        found=listed(names) or "an empty directory",
        hint=hint,
    )


def _by_number(name: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", name)[:18]
    return int(digits or 0), name


def check_torch_name(path: Path) -> None:
    """Raise Unsupported for what a trainer keeps for itself, by its name."""
    if TRAINER_STATE.fullmatch(path.name):
        what = "a trainer's own state, and no weights"
        hint = f"name the checkpoint beside it: {path.parent}"
        if path.name.endswith("_states.pt"):
            home = path.parent.parent
            hint = f"python {home}/zero_to_fp32.py {home} OUT"
        raise Unsupported(what, file=path, hint=hint)


def check_zip(path: Path) -> None:
    """Raise Unsupported for a zip archive that is none of PyTorch's.

    One that is torn, or has a list of contents too long to be read for this, is let through.
    """
    try:
        with open_regular(path) as file:
            if _contents_bytes(file) > _MAX_CONTENTS:
                return
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return
    if any(name.endswith("data.pkl") for name in names):
        return
    is_numpy = bool(names) and all(name.endswith(".npy") for name in names)
    what = "a NumPy archive" if is_numpy else "a zip archive"
    hint = "take the model's safetensors" if is_numpy else "unpack it, and name what is inside"
    shown = listed([name[:80] for name in names])
    raise Unsupported(f"{what}, and no checkpoint", file=path, found=shown, hint=hint)


def _contents_bytes(file: BinaryIO) -> int:
    """How long a zip archive's list of contents is, by the record at its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_RECORD))
    end = file.read(_END_RECORD)
    at = end.rfind(b"PK\x05\x06")
    return int.from_bytes(end[at + 12 : at + 16], "little") if at >= 0 else _MAX_CONTENTS + 1
