"""Files and directories that appear whole or not at all, and a spool for what has no place yet."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _aside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{what}.tmp")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the name ``path`` when the block ends well, and vanishes otherwise.

    Readable by its owner's umask, synced to disk, replaces what had the name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _aside(path, "new")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new directory to fill that takes the name ``path`` when the block ends well.

    A directory that had the name is exchanged for the new one in a single step where the system can
    (Linux's renameat2), else renamed away first; then it is removed. If the block fails, the new one
    is removed and the old one stays. Files put into it must have been synced by who wrote them.
    """
    path = path.resolve()  # the directory behind a symbolic link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _aside(path, "new")
    temporary.mkdir()
    try:
        yield temporary
        sync_directory(temporary)
        _install(temporary, path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _install(new: Path, path: Path) -> None:
    """Give ``new`` the name ``path``; afterwards what had the name, if anything, is at ``new``."""
    if not path.exists():
        os.rename(new, path)
        return
    if _exchange(new, path):
        return
    old = _aside(path, "old")
    os.rename(path, old)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(old, path)
        raise
    os.rename(old, new)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if not renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def copy_file(source: Path, target: IO[bytes]) -> None:
    """Append a file's bytes to an open file, by the file system's own means where it has them."""
    target.flush()
    with open(source, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            try:
                count = os.copy_file_range(file.fileno(), target.fileno(), left)
            except (OSError, AttributeError) as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise
                shutil.copyfileobj(file, target, 1 << 20)
                return
            if not count:
                return
            left -= count


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes in a Spool."""

    offset: int
    size: int


class Spool:
    """A nameless temporary file that many threads append to; for streams of sizes not yet known."""

    def __init__(self, directory: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by close()
        self._lock = threading.Lock()
        self._end = 0

    def append(self, data: bytes) -> Segment:
        with self._lock:
            segment = Segment(self._end, len(data))
            self._end += len(data)
        view, at = memoryview(data), segment.offset
        while view:
            count = os.pwrite(self._file.fileno(), view, at)
            view, at = view[count:], at + count
        return segment

    def read(self, segment: Segment) -> bytes:
        return os.pread(self._file.fileno(), segment.size, segment.offset)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
