"""Where downloads lie that shall survive the process that made them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deltactl.core.errors import DeltactlError, NotAllowed, NotFound, Transient
from deltactl.files.atomic import temporary_directory
from deltactl.files.temporary import lock_now, remove, stem

UNUSABLE = ".new"
"""The suffix of what a bucket fetches by its own means: of a dead process it is of no use."""

SUFFIX = ".deltactl-download"
"""What the names of such directories end with."""

_LOCK = "lock"
_ATTEMPTS = 8
_WORTH_KEEPING = (Transient, NotFound, NotAllowed, KeyboardInterrupt)
"""After these the same command may succeed later. A faulty chain stays so; and on a full disk what
is kept would stand in the way of the result, and of everybody else."""


def download_place(dest: Path) -> Path:
    """The directory beside ``dest`` that holds what has been fetched for it."""
    return dest.with_name(f".{stem(dest)}{SUFFIX}")


@contextlib.contextmanager
def kept_downloads(dest: Path) -> Iterator[Path]:
    """``download_place(dest)`` under a lock.

    Afterwards it is gone, unless the block was interrupted or failed in a way that may pass; a
    process that is killed leaves it, too.

    Where another holds it, or there are no such locks, a temporary directory takes its place.
    """
    place = download_place(dest)
    fd = _hold(place)
    if fd is None:
        with temporary_directory(dest) as place:
            yield place
        return
    try:
        yield place
    except _WORTH_KEEPING as error:
        if isinstance(error, DeltactlError) and error.hint is None:
            error.hint = f"run the command again: what was fetched is kept in {place}"
        raise
    except BaseException:
        remove(place)
        raise
    else:
        remove(place)
    finally:
        os.close(fd)


def discard_downloads(dest: Path) -> None:
    """Remove what was kept for ``dest``, unless somebody is at it."""
    discard_place(download_place(dest))


def discard_place(place: Path) -> bool:
    """Remove such a directory; False where somebody is at it, or it is not this user's."""
    if not place.is_dir() or (fd := _hold(place)) is None:
        return False
    remove(place)
    os.close(fd)
    return True


def _hold(place: Path) -> int | None:
    """Make the directory and lock it; None where that cannot be, or it is not this user's."""
    for _ in range(_ATTEMPTS):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(place):
                return None
            fd = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # its holder removed it in this moment
            continue
        except (FileExistsError, NotADirectoryError, PermissionError):
            return None
        if lock_now(fd, place / _LOCK):
            return fd
        os.close(fd)
        if (place / _LOCK).exists():
            return None
    return None


def _is_ours(place: Path) -> bool:
    """Whether nobody else can exchange what lies there after it was checked."""
    status = place.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def discard_others(place: Path, ids: set[str]) -> None:
    """Remove what an earlier run kept and nobody wants now, or can go on with."""
    for path in place.iterdir():
        if path.name != _LOCK and path.name.removesuffix(".partial") not in ids:
            remove(path)
    for path in place.glob(f"*.partial/*{UNUSABLE}"):
        remove(path)
