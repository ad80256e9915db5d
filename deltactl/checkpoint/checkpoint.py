"""Open a checkpoint: names, dtypes, shapes and mapped bytes of its tensors.

A checkpoint is one safetensors file, one PyTorch file, or a Hugging Face directory of either. Only
headers are read; the bytes of the tensors are mapped and reach memory when someone looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltactl.checkpoint.foreign import check_container, check_torch_name, check_zip
from deltactl.checkpoint.hf_directory import TORCH_SUFFIXES, Weights, aux_files, find_weights
from deltactl.checkpoint.torch_file import read_torch
from deltactl.codec.bits import Bits, elements
from deltactl.core.dtypes import element_bytes
from deltactl.core.errors import DeltactlError, Malformed, NotFound
from deltactl.files.mapped import check_mapped, hold, let_go
from deltactl.files.safetensors import map_file
from deltactl.files.signatures import SAMPLE, foreign, unknown
from deltactl.files.untrusted import open_regular, os_errors


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: ``data`` is 1-D, little-endian, and need not be aligned; a checkpoint's on disk
    is mapped, and read-only.

    ``dtype`` is a safetensors code such as "BF16"; ``shape`` is in elements of that dtype.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def bits(self) -> Bits:
        """Its elements, a view, shape (n,)."""
        return elements(self.data, self.dtype)

    @property
    def elements(self) -> int:
        """Units of 1, 2, 4 or 8 bytes; of a dtype below a byte, its bytes."""
        return self.data.nbytes // element_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint: plain name, tensors in order of offset, its ``__metadata__``."""

    file: str
    tensors: tuple[str, ...]
    metadata: dict[str, str]


class Checkpoint:
    """An open checkpoint, and a context manager that closes it, and raises Malformed where a file
    was torn meanwhile.

    ``tensors`` is in order of the names' UTF-8 bytes, ``shards`` in order of file name.
    ``index_metadata`` is the index's "metadata", None where there is no index. ``nbytes`` and
    ``total_elements`` are sums over the tensors, and outlive ``close``.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        shards: tuple[Shard, ...],
        *,
        is_directory: bool = False,
        index_metadata: dict[str, object] | None = None,
    ) -> None:
        self.path = path
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=str.encode)}
        self.shards = shards
        self.is_directory = is_directory
        self.index_metadata = index_metadata
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.total_elements = sum(tensor.elements for tensor in tensors.values())
        for data in self._mapped():
            hold(data)

    @cached_property
    def aux(self) -> dict[str, Path]:
        """Relative posix path -> file of all that travels with the weights; walks on first use.

        Raises Malformed, NotAllowed. Empty for a single file.
        """
        return aux_files(self.path) if self.is_directory else {}

    def close(self) -> None:
        """Let go of the tensors. A file stays mapped while a view of its bytes lives elsewhere, and
        nobody is told any more if it is torn."""
        for data in self._mapped():
            let_go(data)
        self.tensors = {}

    def _mapped(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Some bytes of each file."""
        for shard in self.shards:
            held = (self.tensors[name].data for name in shard.tensors if name in self.tensors)
            yield from islice((data for data in held if data.size), 1)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                check_mapped()  # before anybody believes what was read, or what was said of it
        finally:
            self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the file or directory at ``path``; an index is checked against its shards.

    Raises NotFound, NotAllowed, Malformed; Unsupported for what is sound but cannot be read.
    """
    with os_errors(path, "no such checkpoint", _missing_hint(path)):
        path.stat()
    if not path.is_dir():
        shard, tensors = _open_file(path)
        return Checkpoint(path, {tensor.name: tensor for tensor in tensors}, (shard,))
    weights = find_weights(path)
    found, shards = _open_shards(path, weights)
    return Checkpoint(path, found, shards, is_directory=True, index_metadata=weights.index_metadata)


def _missing_hint(path: Path) -> str:
    is_file = path.suffix in (".safetensors", *TORCH_SUFFIXES)
    if len(path.parts) == 2 and not path.parent.exists() and not is_file:  # a name on the Hub
        return f"hf download {path} --local-dir {path.name}"
    return f"ls {path.parent}"


def _open_file(path: Path) -> tuple[Shard, Sequence[Tensor]]:
    if _is_torch(path):
        tensors = [Tensor(*parts) for parts in read_torch(path)]
        return Shard(path.name, tuple(tensor.name for tensor in tensors), {}), tensors
    header, data = map_file(path)
    check_container(header, data, path)
    tensors = [
        Tensor(entry.name, entry.dtype, entry.shape, data[entry.start : entry.stop])
        for entry in header.entries.values()
    ]
    return Shard(path.name, tuple(header.entries), header.metadata), tensors


def _is_torch(path: Path) -> bool:
    """By the file's name where that says it, by its first bytes where it does not.

    Raises Unsupported for what is neither, Malformed for a page or text in the place of a file.
    """
    if path.suffix == ".safetensors":
        return False
    with open_regular(path) as file:
        start = file.read(SAMPLE)
    if start[:4] == b"PK\x03\x04":
        check_zip(path)
        check_torch_name(path)
        return True
    if path.suffix not in TORCH_SUFFIXES:
        if start[8:9] != b"{":
            raise foreign(start, path) or unknown(path)
        return False
    if (error := foreign(start, path)) is not None:
        raise error
    check_torch_name(path)
    return True


def _open_shards(directory: Path, weights: Weights) -> tuple[dict[str, Tensor], tuple[Shard, ...]]:
    tensors: dict[str, Tensor] = {}
    home: dict[str, str] = {}  # tensor -> the shard that holds it
    shards = []
    for file in weights.files:
        shard, held = _open_shard(directory / file, weights)
        for tensor in held:
            first = home.setdefault(tensor.name, file)
            if first != file:
                what = "the tensor is in two shards"
                raise _mismatch(what, directory / file, tensor.name, f"only in {first}", file)
            tensors[tensor.name] = tensor
        shards.append(shard)
    if weights.weight_map is not None and weights.index is not None:
        _check_index(weights.index, weights.weight_map, home)
    return tensors, tuple(shards)


def _open_shard(path: Path, weights: Weights) -> tuple[Shard, Sequence[Tensor]]:
    try:
        return _open_file(path)
    except NotFound:
        named_by = weights.index.name if weights.index is not None else "the directory"
        raise Malformed(
            "a shard is missing",
            file=path,
            expected=f"the file that {named_by} names",
            found="a link to nothing" if path.is_symlink() else "no file",
            hint=f"copy or download it into {path.parent}",
        ) from None


def _check_index(index: Path, weight_map: Mapping[str, str], home: dict[str, str]) -> None:
    for tensor, file in home.items():
        named = weight_map.get(tensor)
        if named != file:
            what = "the index does not name a tensor of the shard"
            found = "nothing" if named is None else named
            raise _mismatch(what, index, tensor, file, found)
    for tensor, file in weight_map.items():
        if tensor not in home:
            what = "the shard lacks a tensor that the index puts there"
            raise _mismatch(what, index.with_name(file), tensor, f"in {file}", "nowhere")


def _mismatch(what: str, file: Path, tensor: str, expected: object, found: object) -> DeltactlError:
    hint = "the shards are of different checkpoints, or one was half written: save or copy it again"
    return Malformed(what, file=file, tensor=tensor, expected=expected, found=found, hint=hint)
