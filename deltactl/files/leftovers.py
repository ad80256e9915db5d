"""Temporary files of this machine that whoever wrote them may have left: found, dated, removed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deltactl.files.downloads import SUFFIX, discard_place
from deltactl.files.temporary import Outcome, Unfinished, clear, is_aside, is_old, stem, target_of

CLAIM = ".claim"
"""The suffix of the directory by which a name is claimed where a file system has no hard links."""


def leftovers(root: Path) -> Iterator[Unfinished]:
    """What lies in a directory and below it, and beside it under its own name; ``name`` is relative
    to it. Links are not followed; what cannot be looked into is passed over."""
    yield from _beside(root)
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            yield from _found(Path(directory, name), root)
        names[:] = [name for name in names if not name.startswith(".")]


def _beside(root: Path) -> Iterator[Unfinished]:
    with contextlib.suppress(OSError):
        for name in os.listdir(root.parent):
            if name.startswith(f".{stem(root)}."):
                for item in _found(root.with_name(name), root):
                    if target_of(item.key) == root or item.kind == "download":
                        yield item


def _found(path: Path, root: Path) -> Iterator[Unfinished]:
    kind, target = _kind(path)
    if kind is None:
        return
    with contextlib.suppress(OSError):
        size, touched = measure(path)
        name = None
        if target is not None and target != root and target.is_relative_to(root):
            name = target.relative_to(root).as_posix()
        yield Unfinished(kind, name, str(path), size, touched, path)


def _kind(path: Path) -> tuple[str | None, Path | None]:
    """What a left-over of this name is, and of what."""
    name = path.name
    if is_aside(name):
        target = target_of(path)
        only = is_old(name) and not (target is not None and os.path.lexists(target))
        return "old content" if only else "temporary", target
    if name.startswith(".") and name.endswith(SUFFIX):
        return "download", None
    if name.startswith(".") and name.endswith(CLAIM) and path.is_dir() and not path.is_symlink():
        return "claim", path.with_name(name[1 : -len(CLAIM)])
    return None, None


def measure(path: Path) -> tuple[int, float]:
    """The bytes of a file, or of all files of a directory, and when the newest was written to.
    Raises OSError where there is none."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size, status.st_mtime
    size, touched = 0, status.st_mtime
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            with contextlib.suppress(FileNotFoundError):
                status = Path(directory, name).lstat()
                touched = max(touched, status.st_mtime)
                size += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return size, touched


def discard(path: Path, before: float) -> Outcome:
    """Remove a left-over that ``leftovers`` found, unless somebody holds it or touched it at
    ``before`` or later. Raises OSError where this user may not."""
    kind, target = _kind(path)
    outcome: Outcome = "removed"
    try:
        if kind is None or measure(path)[1] >= before:
            return "in use"
        if kind == "download":
            outcome = "removed" if discard_place(path) else "in use"
        elif kind == "claim":
            path.rmdir()
        else:
            outcome = clear(path, target, without_locks=True)
    except FileNotFoundError:  # whoever had it has ended, or cleaned up too
        return "removed"
    if outcome == "removed" and os.path.lexists(path):
        raise PermissionError(1, "not permitted to remove it", str(path))
    return outcome
