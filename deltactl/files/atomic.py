"""Files and directories that appear whole or not at all, and a spool for what has no place yet."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from deltactl.core.errors import UsageError
from deltactl.files.mapped import sound_sources
from deltactl.files.temporary import NEW, OLD, aside, held_aside, lock_held, recover, remove

__all__ = [
    "Segment",
    "Spool",
    "atomic_directory",
    "atomic_file",
    "check_exchangeable",
    "copy_file",
    "recover",
    "remove",
    "rename_new",
    "start_writing",
    "sync_directory",
    "temporary_directory",
    "temporary_file",
    "write_at",
]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_SYNC_FILE_RANGE_WRITE = 2


def start_writing(fd: int, offset: int, count: int) -> None:
    """Have bytes that were written go to the disk from now on, so that a later fsync waits less.

    Linux's sync_file_range; elsewhere nothing happens. It promises nothing.
    """
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        wide = ctypes.c_int64
        call(fd, wide(offset), wide(count), _SYNC_FILE_RANGE_WRITE)


_PIECE = 1 << 18


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes from ``offset`` on, many threads at once if need be.

    In pieces: writes of 2 MiB and more took up to several times as long in a virtual machine, it
    seems because page cache then comes in huge pages, which the host has to give back first.
    """
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view[:_PIECE], offset)
        view, offset = view[count:], offset + count


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """An open file beside ``path`` and its name; removed in the end if it has that name still."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with held_aside(path, NEW, _make_file) as (name, fd):
        try:
            with open(fd, "w+b", closefd=False) as file:
                yield file, name
        finally:
            remove(name)


@contextlib.contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """A new directory beside ``path``; what has its name in the end is removed as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with held_aside(path, NEW, _make_directory) as (name, _):
        try:
            yield name
        finally:
            remove(name)


def check_exchangeable(path: Path) -> None:
    """Raise UsageError for a directory that the system does not give up, or that this process, and
    the shell it came from, stand in: they would stay behind in the old one."""
    if path.is_mount():
        raise UsageError(
            "the directory is a mount point, and cannot be exchanged as a whole",
            file=path,
            hint=f"name a directory in it, such as {path / 'model'}",
        )
    if path.is_dir() and Path.cwd().is_relative_to(path):
        raise UsageError(
            "the directory is the working directory, or holds it, and is exchanged as a whole",
            file=path,
            hint="go to another directory first",
        )


def _make_file(name: Path) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _make_directory(name: Path) -> int:
    name.mkdir()
    return os.open(name, os.O_RDONLY)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the name ``path`` when the block ends well, and vanishes
    otherwise.

    Synced to disk; replaces what had the name, and has its permissions, or else those that the
    umask gives. Raises UsageError where the name is that of a directory or a device, Malformed
    where a file that was mapped meanwhile was torn.
    """
    if path.exists() and not path.is_file():
        raise UsageError("the output is there and is no regular file", file=path)
    with temporary_file(path) as (file, name):
        with sound_sources():
            yield file
        file.flush()
        os.fsync(file.fileno())
        _keep_mode(path, name)
        os.replace(name, path)
        sync_directory(path.parent)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new directory to fill that takes the name ``path`` when the block ends well.

    A directory that had the name is exchanged for the new one in a single step where the system can
    (Linux's renameat2), else renamed away first; then it is removed. If the block fails, the new
    one is removed and the old one stays. Files put into it must have been synced by who wrote them.
    """
    path = path.resolve()  # the directory behind a symbolic link, not the link
    check_exchangeable(path)
    with temporary_directory(path) as temporary:
        with sound_sources():
            yield temporary
        for directory, _, _ in os.walk(temporary):
            sync_directory(Path(directory))
        _keep_mode(path, temporary)
        _install(temporary, path)
        sync_directory(path.parent)


def _keep_mode(old: Path, new: Path) -> None:
    """A checkpoint that only some may read does not become everybody's by being replaced."""
    with contextlib.suppress(FileNotFoundError):
        os.chmod(new, stat.S_IMODE(old.stat().st_mode))


def _install(new: Path, path: Path) -> None:
    """Give ``new`` the name ``path``; afterwards what had the name, if anything, is at ``new``."""
    if not path.exists():
        os.rename(new, path)
        return
    if _exchange(new, path):
        return
    with lock_held(path):  # a process that dies here leaves the old one for ``recover``
        old = aside(path, OLD)
        os.rename(path, old)
        try:
            os.rename(new, path)
        except BaseException:
            os.rename(old, path)
            raise
        os.rename(old, new)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system has no such call."""
    return _renameat2(a, b, _RENAME_EXCHANGE)


def rename_new(old: Path, new: Path) -> bool:
    """Rename unless ``new`` is taken, in one step; False where there is no such call.

    Raises FileExistsError where it is taken.
    """
    return _renameat2(old, new, _RENAME_NOREPLACE)


def _renameat2(a: Path, b: Path, flags: int) -> bool:
    call = getattr(_libc(), "renameat2", None)
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flags):
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


_SLOW_PIECE = 1 << 18


def copy_file(source: Path, target: IO[bytes], before: Callable[[int], None] | None = None) -> None:
    """Append a file's bytes to an open file, by the file system's own means where it has them.

    ``before``: called with the size of each piece of 256 kB before it is copied; it may wait.
    """
    target.flush()
    with open(source, "rb") as file:
        if before is not None:
            while piece := file.read(_SLOW_PIECE):
                before(len(piece))
                target.write(piece)
            return
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
        write_at(self._file.fileno(), data, segment.offset)
        return segment

    def read(self, segment: Segment) -> bytes:
        return os.pread(self._file.fileno(), segment.size, segment.offset)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
