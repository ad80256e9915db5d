"""A checkpoint copied, digested and described, ready to be put into a bucket as an anchor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TypeVar

from deltactl.chain.store import Bucket, holds_bytes
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.core.digest import hasher
from deltactl.core.errors import Conflict, NotFound
from deltactl.core.progress import Meter, Progress
from deltactl.core.threads import map_requests
from deltactl.format.anchor import INDEX, AnchorFile, anchor_index, anchor_metadata
from deltactl.format.link_names import anchor_directory, anchor_file_name, step_of
from deltactl.replay.rebuild import SINGLE, Written, write_directory, write_file

R = TypeVar("R")

_PIECE = 1 << 22
_LOOKS = 3


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
    digest = hasher()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return AnchorFile(name, path.stat().st_size, digest.hexdigest(), False)


def put_whole(
    bucket: Bucket, snapshot: Snapshot, put_index: Callable[[], bool], progress: Progress
) -> tuple[dict[str, int], bool]:
    """Put a link's files, and its index last; returns the sizes of the files, and what
    ``put_index`` says.

    A file that an unfinished push left is kept if it has the same bytes. Raises Conflict otherwise,
    and what ``put_index`` raises.
    """
    _check_strangers(bucket, snapshot)
    sizes = {name: path.stat().st_size for name, path in snapshot.files.items()}
    meter = Meter(progress, "pushing", sum(sizes.values()))

    def put(names: Iterable[str]) -> None:
        for name in names:  # in turn: of two at once one loses, and stops there
            path = snapshot.files[name]
            if not bucket.put(name, path) and not holds_bytes(bucket, name, path):
                raise _other_content(bucket, name, snapshot)

    for name, size in sizes.items():
        put([name])
        meter.add(size)
    return sizes, put_between(bucket, snapshot.name, sizes, put_index, put)


def put_between(
    bucket: Bucket,
    name: str,
    sizes: Mapping[str, int],
    put_index: Callable[[], R],
    again: Callable[[Iterable[str]], None] | None = None,
) -> R:
    """Put the index ``name`` of a link between two looks at its files, by name with their sizes.

    Somebody may have taken them for left-overs meanwhile (ops/clean.py). Those are put ``again``;
    raises Conflict where that cannot be, or they do not stay.
    """
    _look(bucket, name, sizes, again)
    done = put_index()
    _look(bucket, name, sizes, again)
    return done


def _look(
    bucket: Bucket,
    name: str,
    sizes: Mapping[str, int],
    again: Callable[[Iterable[str]], None] | None,
) -> None:
    if not sizes:
        return
    files = [*sizes.items()]
    for _ in range(_LOOKS):
        there = map_requests(lambda file: _is_there(bucket, *file), files, bucket.jobs)
        gone = [file for (file, _), found in zip(files, there, strict=True) if not found]
        if not gone:
            return
        if again is None:
            break
        again(gone)
    raise Conflict(
        "a file of the link was removed while the link was put",
        file=gone[0],
        step=step_of(name),
        hint=f"remove what is left of {name.rsplit('/', 1)[0]}, its index first, and publish the "
        f"step again; then deltactl verify {quote(bucket.url)}",
    )


def _is_there(bucket: Bucket, name: str, size: int) -> bool:
    """Whether an object is there in its size; asks for its end, as a listing may be long."""
    try:
        return len(bucket.read(name, max(size - 1, 0), size + 1)) == min(size, 1)
    except NotFound:
        return False


def _check_strangers(bucket: Bucket, snapshot: Snapshot) -> None:
    """Refuse to finish an anchor among files not its own: readers might take them for it."""
    if not snapshot.name.endswith("/" + INDEX):
        return
    prefix = snapshot.name.removesuffix(INDEX)
    with contextlib.suppress(NotFound):
        for item in bucket.list():
            ours = item.name == snapshot.name or item.name in snapshot.files
            if item.name.startswith(prefix) and not ours:
                raise _other_content(bucket, item.name, snapshot)


def _other_content(bucket: Bucket, name: str, snapshot: Snapshot) -> Conflict:
    return Conflict(
        "a link of other content, finished or not, has the step's place",
        file=name,
        step=snapshot.step,
        hint=f"somebody may be publishing it now: see deltactl log {quote(bucket.url)}; push a "
        f"later step, or, if nobody is, remove {snapshot.name.rsplit('/', 1)[0]}",
    )
