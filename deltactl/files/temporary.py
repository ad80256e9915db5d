"""Temporary names beside a target, and what processes that died left under such names.

An aside is called ``.<target>.<host>.<random>.<what>.tmp``, and its maker holds a lock on it for as
long as it lives; the kernel drops the lock with the process, however that ends. So whoever next
writes to the same target can tell left-overs from work in hand: same host, and nobody holds the
lock. Those of other hosts are left to ``clear`` and somebody who knows their age, as some file
systems keep such locks to one host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

NEW = "new"
"""What is being written, and has no other name yet."""

OLD = "old"
"""What had the target's name until now; the only copy of it, where nothing has that name."""

Outcome = Literal["removed", "given back", "in use", "kept"]
"""What became of a left-over. "given back": the old content has its name again; "kept": it may be
the only copy of something, and whose is not known."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What somebody who writes has in hand, or left behind when it died; ``list`` does not show it.

    ``kind``: temporary, old content (that has no other name), upload, download or claim. ``name``:
    the object that it was to become, None where that is not known or it is none; ``place``: where
    it lies, for people; ``size``: in bytes; ``touched``: when it last was, in seconds since
    1970 by the clock of where it lies; ``key``: for the bucket alone.
    """

    kind: str
    name: str | None
    place: str
    size: int
    touched: float
    key: Any = field(default=None, compare=False, repr=False)


_LONGEST_STEM = 150  # bytes: a name has 255, and the rest of an aside's takes some
_ATTEMPTS = 8
_REMOVALS = 4
_ASIDE = re.compile(rf"\.(.+)\.[0-9a-f]{{8}}\.[0-9a-f]{{8}}\.({NEW}|{OLD})\.tmp", re.DOTALL)
_HASHED = re.compile(r"[0-9a-f]{64}")


def aside(path: Path, what: str) -> Path:
    """A name beside ``path`` that nothing has."""
    return path.with_name(f".{stem(path)}.{_host()}.{secrets.token_hex(4)}.{what}.tmp")


def stem(path: Path) -> str:
    """What the names of things beside ``path`` have of its own: never too long for one."""
    raw = os.fsencode(path.name)
    return path.name if len(raw) <= _LONGEST_STEM else hashlib.blake2s(raw).hexdigest()


@cache
def _host() -> str:
    """Eight digits for this machine. Containers that share a machine have names of their own."""
    name = socket.gethostname()
    for file in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            name += "\n" + Path(file).read_text()
            break
    return hashlib.blake2s(name.encode(), digest_size=4).hexdigest()


@contextlib.contextmanager
def held_aside(path: Path, what: str, make: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """A new aside of ``path`` under this process's lock, and its file descriptor.

    ``make`` creates what the name it is given shall have, and opens it. The descriptor is closed in
    the end; removing what then has the name is for the caller. First clears what others left.
    """
    recover(path)
    for attempt in itertools.count(1):
        name = aside(path, what)
        try:
            fd = make(name)
        except FileNotFoundError:  # taken for a left-over in the moment before it is locked
            if attempt == _ATTEMPTS:
                raise
            continue
        try:
            if lock_now(fd, name) is False and attempt < _ATTEMPTS:
                continue
            yield name, fd
            return
        finally:
            os.close(fd)


@contextlib.contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """Hold the lock of a directory that gets an aside's name, where there are such locks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        lock_now(fd, path)
        yield
    finally:
        os.close(fd)


def lock_now(fd: int, name: Path) -> bool | None:
    """Lock what ``fd`` is; False if somebody has it, or has removed it; None: no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    try:
        return os.path.samestat(os.lstat(name), os.fstat(fd))
    except FileNotFoundError:
        return False


def recover(path: Path) -> None:
    """Clear what dead processes of this host left beside ``path``.

    If one died between moving the old content away and giving the new one its name, the old content
    gets its name back. Errors are for the next one who comes: nothing here is needed for
    correctness.
    """
    pattern = rf"\.{re.escape(stem(path))}\.{_host()}\.[0-9a-f]{{8}}\.({NEW}|{OLD})\.tmp"
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(path.parent) if re.fullmatch(pattern, name)]
        for name in sorted(names, reverse=True):  # any "old" is dealt with either way
            with contextlib.suppress(OSError):
                clear(path.with_name(name), path)


def is_aside(name: str) -> bool:
    """Whether a file's name is that of an aside, of whatever host."""
    return _ASIDE.fullmatch(name) is not None


def is_old(name: str) -> bool:
    """Whether an aside is what its target was until it was replaced."""
    return name.endswith(f".{OLD}.tmp")


def target_of(name: Path) -> Path | None:
    """What an aside lies beside; None where its name was too long to be told."""
    match = _ASIDE.fullmatch(name.name)
    known = match is not None and not _HASHED.fullmatch(match[1])
    return name.with_name(match[1]) if match and known else None


def clear(name: Path, path: Path | None, *, without_locks: bool = False) -> Outcome:
    """Remove an aside of ``path`` that nobody holds, or give the old content its name back.

    ``without_locks``: also where the file system has none, so that only its age speaks. Raises
    OSError.
    """
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        locked = lock_now(fd, name)
        if locked is False or (locked is None and not without_locks):
            return "in use"
        if is_old(name.name):
            if path is None:
                return "kept"
            if not os.path.lexists(path):
                os.rename(name, path)
                return "given back"
        remove(name)
        return "removed"
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all it holds, as far as that goes.

    A directory more than once if need be: a thread that nobody waits for may put a last file there.
    """
    with contextlib.suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            return
        for _ in range(_REMOVALS):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                return
