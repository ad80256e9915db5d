"""A checkpoint written out from a base and deltas: the base's shard layout, every bit checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.core.digest import TensorState, digest_of, hasher, state_digest
from deltactl.core.dtypes import DTYPES
from deltactl.core.errors import Malformed
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.atomic import atomic_file, copy_file, start_writing, write_at
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.files.safetensors import make_header
from deltactl.format.delta import Delta
from deltactl.format.header import PLACEHOLDER, is_ours, seal, utf8
from deltactl.replay.states import Stack, final_stacks

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
"""What PEFT, and servers that load adapters, look for."""


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that was written: its tensors' states in order of name, and its files' sizes.

    ``weight_map``: tensor name to shard file; ``headers``: shard file to the BLAKE3 of its header.
    """

    tensors: tuple[TensorState, ...]
    files: dict[str, int]
    weight_map: dict[str, str]
    headers: dict[str, str]

    @property
    def state(self) -> str:
        return state_digest(self.tensors)


@dataclass(frozen=True, slots=True)
class _Shard:
    file: str
    stacks: tuple[Stack, ...]
    metadata: dict[str, str]


def write_directory(
    base: Checkpoint,
    deltas: Sequence[Delta],
    directory: Path,
    *,
    aux: Mapping[str, Path],
    progress: Progress = silent,
) -> Written:
    """Write the state that ``deltas`` lead to from ``base`` into an empty directory.

    As a Hugging Face directory: the base's shards by their names, the files ``aux`` by their
    relative paths, and an index where there is more than one shard. Files are synced; the directory
    is for the caller to put in place. Raises Malformed, Conflict.
    """
    shards = _lay_out(base, final_stacks(base, deltas))
    written = _write_shards(shards, directory, progress)
    if len(shards) > 1:
        total = sum(s.nbytes for shard in shards for s in shard.stacks)
        metadata = base.index_metadata or {}
        kept = {} if is_ours(metadata) else metadata  # an anchor's says what the anchor is
        write_index(directory / INDEX, {**kept, "total_size": total}, written.weight_map)
    copy_aux(aux, directory)
    return written


def write_file(
    base: Checkpoint,
    deltas: Sequence[Delta],
    file: IO[bytes],
    *,
    metadata: Callable[[tuple[TensorState, ...]], dict[str, str]] | None = None,
    progress: Progress = silent,
) -> Written:
    """The same as one safetensors file, written into an empty open file.

    ``metadata`` gives the file's metadata, sealed if it has a place for that, from the tensors'
    states, of a length that only their names, dtypes and shapes decide; by default it is that of
    the base's first shard, without the keys of links.
    """
    (shard,) = _lay_out(base, final_stacks(base, deltas), single=True)
    if metadata is not None:
        unknown = (TensorState(s.name, s.dtype, s.shape, PLACEHOLDER) for s in shard.stacks)
        shard = replace(shard, metadata=metadata(_in_order(unknown)))
    header = _header(shard)
    file.write(header)
    file.flush()
    states = _write_tensors({file.fileno(): (shard.stacks, len(header))}, progress)
    if metadata is not None:
        header = seal(_header(replace(shard, metadata=metadata(states))))
        file.seek(0)
        file.write(header)
    file.seek(0, os.SEEK_END)
    return Written(states, {shard.file: file.tell()}, {}, {shard.file: digest_of(header)})


def write_index(path: Path, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> None:
    """A Hugging Face index, synced."""
    ordered = {name: weight_map[name] for name in sorted(weight_map, key=utf8)}
    text = json.dumps({"metadata": metadata, "weight_map": ordered}, indent=2, ensure_ascii=False)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")


def copy_aux(aux: Mapping[str, Path], directory: Path) -> None:
    """Copy a checkpoint's other files into a new directory, by relative paths, and sync them."""
    for name, source in aux.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            copy_file(source, file)
            file.flush()
            os.fsync(file.fileno())


def _lay_out(base: Checkpoint, stacks: dict[str, Stack], single: bool = False) -> list[_Shard]:
    """Spread the tensors over shards as the base has them; new ones go into the last shard."""
    left = dict(stacks)
    shards = []
    for shard in base.shards:
        kept = [left.pop(name) for name in shard.tensors if name in left]
        shards.append((shard, kept))
    shards[-1][1].extend(left.values())
    shards = [(shard, kept) for shard, kept in shards if kept] or shards[:1]
    if single:
        shards = [(base.shards[0], [stack for _, kept in shards for stack in kept])]
    names = _file_names([shard.file for shard, _ in shards])
    return [
        _Shard(name, _aligned(kept), _plain_metadata(shard.metadata))
        for name, (shard, kept) in zip(names, shards, strict=True)
    ]


def _file_names(files: Sequence[str]) -> list[str]:
    if len(files) == 1:
        return [ADAPTER if Path(files[0]).stem == Path(ADAPTER).stem else SINGLE]
    if all(file.endswith(".safetensors") for file in files):
        return list(files)
    return [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]


def _aligned(stacks: Iterable[Stack]) -> tuple[Stack, ...]:
    """In order, but wide elements before narrow ones, so that each is aligned to its width."""
    return tuple(sorted(stacks, key=lambda stack: -DTYPES[stack.dtype].bits))


def _plain_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """A checkpoint's metadata; that of an anchor says what the anchor is, not what it holds."""
    if is_ours(metadata) or "model_version" in metadata:
        return {"format": "pt"}
    return dict(metadata) or {"format": "pt"}


def _header(shard: _Shard) -> bytes:
    return make_header([(s.name, s.dtype, s.shape) for s in shard.stacks], shard.metadata)


def _write_shards(shards: Sequence[_Shard], directory: Path, progress: Progress) -> Written:
    headers = {shard.file: _header(shard) for shard in shards}
    with ExitStack() as stack:
        files = {
            shard.file: stack.enter_context(open(directory / shard.file, "xb")) for shard in shards
        }
        work = {}
        for shard in shards:
            file, header = files[shard.file], headers[shard.file]
            file.write(header)
            file.flush()
            work[file.fileno()] = (shard.stacks, len(header))
        states = _write_tensors(work, progress)
        for file in files.values():
            os.fsync(file.fileno())
    return Written(
        states,
        {name: (directory / name).stat().st_size for name in files},
        {stack.name: shard.file for shard in shards for stack in shard.stacks},
        {name: digest_of(header) for name, header in headers.items()},
    )


def _write_tensors(
    work: Mapping[int, tuple[Sequence[Stack], int]], progress: Progress
) -> tuple[TensorState, ...]:
    """Write each file's tensors from its offset on, on all cores; states in order of name."""
    places = []
    for fd, (stacks, at) in work.items():
        for stack in stacks:
            places.append((fd, at, stack))
            at += stack.nbytes
        os.ftruncate(fd, at)
    sizes = [stack.nbytes for _, _, stack in places]
    meter = Meter(progress, "writing", sum(sizes))

    def write(place: tuple[int, int, Stack]) -> TensorState:
        fd, at, stack = place
        digest = hasher(hash_threads(stack.nbytes, sizes))
        for offset, chunk in stack.chunks():
            data = chunk.view(np.uint8).data
            digest.update(data)
            write_at(fd, data, at + offset)
            start_writing(fd, at + offset, data.nbytes)
            meter.add(data.nbytes)
        return TensorState(stack.name, stack.dtype, stack.shape, digest.hexdigest())

    states = map_largest_first(write, places, lambda place: place[2].nbytes)
    return _in_order(states)


def _in_order(states: Iterable[TensorState]) -> tuple[TensorState, ...]:
    return tuple(sorted(states, key=lambda state: utf8(state.name)))


def check_tensors(written: Written, deltas: Sequence[Delta]) -> None:
    """Compare each tensor with the digest that the last delta to it names. Raises Malformed."""
    found = {state.name: state.digest for state in written.tensors}
    expected = {}
    for delta in deltas:
        for record in delta.records.values():
            expected[record.name] = (record.digest, delta)
    for name, (digest, delta) in expected.items():
        if digest is not None and name in found and found[name] != digest:
            raise Malformed(
                "the rebuilt tensor does not have the digest that the delta names",
                file=delta.path,
                tensor=name,
                step=delta.header.step,
                expected=digest,
                found=found[name],
            )
