"""Links put into a bucket: each object once, the one that makes the link visible last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TypeVar

from deltactl.chain.store import Bucket, holds_bytes
from deltactl.chain.transfer.snapshot import Snapshot
from deltactl.core.errors import Conflict, DeltactlError, NotFound
from deltactl.core.progress import Meter, Progress, silent
from deltactl.core.threads import map_requests
from deltactl.format.anchor import INDEX
from deltactl.format.link_names import step_of

R = TypeVar("R")

_LOOKS = 3


def put_object(
    bucket: Bucket, name: str, path: Path, other: Callable[[], DeltactlError | None]
) -> bool:
    """Create an object from a file; False where it is there with the same bytes, put by somebody
    faster, or by a try whose answer was lost.

    Where it has other bytes raises what ``other`` gives; None: they are as good.
    """
    if bucket.put(name, path):
        return True
    if not holds_bytes(bucket, name, path) and (error := other()) is not None:
        raise error
    return False


def put_snapshot(
    bucket: Bucket,
    snapshot: Snapshot,
    other: Callable[[], DeltactlError | None],
    progress: Progress = silent,
) -> tuple[dict[str, int], bool]:
    """Put a link's files, and the object that makes it visible last; returns the sizes of all, and
    False where that was there already.

    A file that an unfinished push left is kept if it has the same bytes. Raises Conflict otherwise;
    ``other``: of that object, as ``put_object`` has it.
    """
    _check_strangers(bucket, snapshot)
    sizes = {name: path.stat().st_size for name, path in snapshot.files.items()}
    last = snapshot.path.stat().st_size
    meter = Meter(progress, "pushing", sum(sizes.values()) + last)

    def put(names: Iterable[str]) -> None:
        for name in names:  # in turn: of two at once one loses, and stops there
            path = snapshot.files[name]
            put_object(bucket, name, path, partial(_taken, bucket, name, snapshot))

    for name, size in sizes.items():
        put([name])
        meter.add(size)
    index = partial(put_object, bucket, snapshot.name, snapshot.path, other)
    written = put_between(bucket, snapshot.name, sizes, index, put)
    meter.add(last)
    return {**sizes, snapshot.name: last}, written


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
                raise _taken(bucket, item.name, snapshot)


def _taken(bucket: Bucket, name: str, snapshot: Snapshot) -> Conflict:
    return Conflict(
        "a link of other content, finished or not, has the step's place",
        file=name,
        step=snapshot.step,
        hint=f"somebody may be publishing it now: see deltactl log {quote(bucket.url)}; push a "
        f"later step, or, if nobody is, remove {snapshot.name.rsplit('/', 1)[0]}",
    )
