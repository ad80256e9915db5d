"""A checkpoint copied, digested and described, ready to be put into a bucket as an anchor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.core.digest import digest_of
from deltactl.core.progress import Progress
from deltactl.files.mapped import map_bytes, sound_sources
from deltactl.format.anchor import INDEX, AnchorFile, anchor_index, anchor_metadata
from deltactl.format.link_names import anchor_directory, anchor_file_name
from deltactl.replay.rebuild import SINGLE, Written, write_directory, write_file


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``name`` is the object that makes the link visible, ``path`` the file to put there;
    ``files`` are the objects, by name, that have to be there before it."""

    step: int
    state: str
    name: str
    path: Path
    files: dict[str, Path]


def take_snapshot(
    checkpoint: Checkpoint, step: int, directory: Path, progress: Progress
) -> Snapshot:
    """Copy a checkpoint into an empty directory, in the form that its anchor has.

    A directory becomes a directory with a sealed index; a single file becomes a single file with
    the anchor's header. Either way the result is a checkpoint that can be opened.
    """
    if checkpoint.is_directory:
        aux = checkpoint.aux
        written = write_directory(checkpoint, [], directory, aux=aux, progress=progress)
        return directory_snapshot(written, step, directory, aux)
    path = directory / SINGLE
    with open(path, "w+b") as file:
        metadata = partial(anchor_metadata, step)
        written = write_file(checkpoint, [], file, metadata=metadata, progress=progress)
    return Snapshot(step, written.state, anchor_file_name(step), path, {})


def directory_snapshot(
    written: Written, step: int, directory: Path, aux: Iterable[str]
) -> Snapshot:
    """Describe a directory that has been written, with the files ``aux`` by their relative paths,
    in a sealed index."""
    files = [
        AnchorFile(name, size, written.headers[name], True) for name, size in written.files.items()
    ]
    files += [described(directory / name, name) for name in aux]
    index = directory / INDEX
    index.write_bytes(anchor_index(step, written.tensors, written.weight_map, tuple(files)))
    prefix = anchor_directory(step)
    paths = {f"{prefix}/{file.name}": directory / file.name for file in files}
    return Snapshot(step, written.state, f"{prefix}/{INDEX}", index, paths)


def described(path: Path, name: str) -> AnchorFile:
    """A file that travels with an anchor, by the name ``name``."""
    data = map_bytes(path)
    with sound_sources(data):
        return AnchorFile(name, data.size, digest_of(data), False)
