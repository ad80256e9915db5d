"""What is what in a Hugging Face directory: which files are the weights, and which travel along.

Weights, first match wins: ``model.safetensors.index.json``, ``model.safetensors``,
``pytorch_model.bin.index.json``, ``pytorch_model.bin``, the only ``*.safetensors.index.json``, the
only ``*.safetensors``. A second copy, Mistral's ``consolidated*``, counts only where it is alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltactl.checkpoint.foreign import (
    TRAINER_STATE,
    check_directory,
    check_index_metadata,
    no_weights,
)
from deltactl.core.errors import Malformed, NotFound, listed
from deltactl.files.json_bounds import INDEX
from deltactl.files.names import is_plain_name
from deltactl.files.untrusted import os_errors, parse_json, read_index

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_STANDARD = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"

# Never sent along: weights in any form (a stale second copy of them at worst), what a trainer keeps
# for itself, and what an interrupted copy left behind.
_WEIGHT_SUFFIXES = (
    ".safetensors", *TORCH_SUFFIXES, ".ckpt", ".gguf", ".h5", ".msgpack", ".ot", ".onnx",
    ".onnx_data", ".tflite", ".distcp", ".safetensors.index.json", ".bin.index.json",
    ".h5.index.json", ".msgpack.index.json",
)  # fmt: skip
_LEFTOVER_SUFFIXES = (".tmp", ".incomplete")
_LOGS = re.compile(r"events\.out\.tfevents\..*")
_TRAINER_FOLDERS = re.compile(r"global_step.*|checkpoint-\d+|__pycache__")


@dataclass(frozen=True, slots=True)
class Weights:
    """The files that hold the weights, in order of name, and what the index says about them.

    ``weight_map`` (tensor -> file), ``index`` and ``index_metadata`` are None without an index.
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    index: Path | None = None
    index_metadata: dict[str, object] | None = None


def find_weights(directory: Path) -> Weights:
    """Say which files of ``directory`` are the weights, and read their index; opens none of them.

    Raises NotFound where there are none, Malformed where it cannot be told or the index is wrong,
    Unsupported for a delta and for weights in another form, NotAllowed.
    """
    with os_errors(directory):
        names = sorted(f.name for f in directory.iterdir() if not f.name.startswith("."))
    check_directory(directory, names)
    for single in _STANDARD:
        if single + _INDEX in names:
            return _indexed(directory, single + _INDEX, names, single)
        if single in names:
            return Weights((single,))
    indices = _main(name for name in names if name.endswith(".safetensors" + _INDEX))
    if len(indices) == 1:
        return _indexed(directory, indices[0], names)
    files = _main(name for name in names if name.endswith(".safetensors"))
    if len(files) == 1:
        return Weights((_complete(directory, files[0]),))
    if files:
        raise Malformed(
            "several safetensors files and no index that says which are the weights",
            file=directory,
            expected=_STANDARD[0] + _INDEX,
            found=listed(files),
            hint="name one file, or add the index of the checkpoint",
        )
    looked_for = [name + end for name in _STANDARD for end in (_INDEX, "")]
    raise no_weights(directory, names, " or ".join([*looked_for, "one *.safetensors"]))


def _main(names: Iterable[str]) -> list[str]:
    found = list(names)
    return [name for name in found if not name.startswith("consolidated")] or found


def shard_of_several(name: str) -> str | None:
    """What a file is that by its name is one shard of several, in words; None for another."""
    part = re.search(r"-(\d+)-of-(\d+)\.(?:safetensors|bin)$", name)
    return f"one shard of {int(part[2])}" if part and int(part[2]) != 1 else None


def _complete(directory: Path, name: str) -> str:
    if (part := shard_of_several(name)) is not None:
        raise Malformed(
            f"{part}, without the others and their index",
            file=directory / name,
            expected=_STANDARD[0] + _INDEX,
            hint="copy or download the whole checkpoint",
        )
    return name


def _indexed(
    directory: Path, index: str, names: Sequence[str], single: str | None = None
) -> Weights:
    document = _read_index(directory / index)
    check_index_metadata(document.get("metadata"), directory / index)
    weight_map = _weight_map(directory / index, document.get("weight_map"))
    metadata = document.get("metadata", {})
    if not isinstance(metadata, dict):
        what = "the index's metadata is no JSON object"
        raise Malformed(what, file=directory / index, found=type(metadata).__name__)
    files = sorted(set(weight_map.values()))
    if single in names and single not in files:
        raise Malformed(
            f"both {single} and an index that does not name it: readers differ in which they take",
            file=directory / index,
            hint=f"remove the stale one, {single} or {index} with its shards",
        )
    return Weights(tuple(files), weight_map, directory / index, metadata)


def _read_index(path: Path) -> dict[str, Any]:
    return parse_json(read_index(path), path, what="the index", bounds=INDEX)


def _weight_map(index: Path, weight_map: object) -> dict[str, str]:
    if not isinstance(weight_map, dict) or not weight_map:
        found = "an empty one" if weight_map == {} else type(weight_map).__name__
        what = "the index has no weight_map"
        raise Malformed(what, file=index, expected="an object: tensor -> shard", found=found)
    suffixes = (".safetensors",) if ".safetensors." in index.name else TORCH_SUFFIXES
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard) or not shard.endswith(suffixes):
            raise Malformed(
                "the index names a shard that is no plain file name",  # so it is never opened
                file=index,
                tensor=tensor,
                expected=f"*{suffixes[0]} beside the index",
                found=ascii(shard)[:200],
            )
    return weight_map


def aux_files(directory: Path) -> dict[str, Path]:
    """Every file that travels with the weights: relative posix path -> file, in order of path.

    Subdirectories are walked, links to files followed and links to directories not; hidden names,
    weights in any format, trainer state and leftovers are skipped. Raises Malformed for a link to
    nothing and for a name that could not be written elsewhere, NotAllowed for a closed directory.
    """
    found: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(directory, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not _skipped_folder(name)]
        for name in names:
            path = Path(folder, name)
            if not _skipped_file(name) and _is_file(path):
                found[_relative(path, directory)] = path
    return dict(sorted(found.items()))


def _skipped_folder(name: str) -> bool:
    return name.startswith(".") or bool(_TRAINER_FOLDERS.fullmatch(name))


def _skipped_file(name: str) -> bool:
    skipped = name.endswith((*_WEIGHT_SUFFIXES, *_LEFTOVER_SUFFIXES))
    kept = TRAINER_STATE.fullmatch(name) or _LOGS.fullmatch(name)
    return skipped or name.startswith(".") or bool(kept)


def _raise(error: OSError) -> None:
    with os_errors(error.filename):
        raise error


def _is_file(path: Path) -> bool:
    try:
        with os_errors(path):
            return stat.S_ISREG(path.stat().st_mode)
    except NotFound:
        hint = "restore what it points to, or remove the link"
        raise Malformed("a link to nothing", file=path, hint=hint) from None


def _relative(path: Path, directory: Path) -> str:
    relative = path.relative_to(directory)
    if not all(map(is_plain_name, relative.parts)):
        what = "a file name that not every system can hold"
        raise Malformed(what, file=directory, found=ascii(str(relative)), hint="rename the file")
    return relative.as_posix()
