"""A local directory, also on a network file system, as a bucket."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from deltactl.bucket.throttle import Throttle
from deltactl.chain.store import Object
from deltactl.core.errors import NotAllowed, NotFound, Transient
from deltactl.files.atomic import copy_file, rename_new, sync_directory, temporary_file
from deltactl.files.leftovers import CLAIM, discard, leftovers
from deltactl.files.names import check_object_name
from deltactl.files.temporary import Outcome, Unfinished

_TEMPORARY = ".tmp"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalBucket:
    """Implements chain.store.Bucket. Creation is atomic: of two who put one name, one gets True."""

    def __init__(self, root: Path, jobs: int = 16, throttle: Throttle | None = None) -> None:
        self._root, self._jobs, self._throttle = root.absolute(), jobs, throttle

    @property
    def url(self) -> str:
        return str(self._root.resolve())

    @property
    def atomic_create(self) -> bool:
        return True

    @property
    def jobs(self) -> int:
        return self._jobs

    @property
    def part_bytes(self) -> int | None:
        return None

    def list(self) -> Iterator[Object]:
        if not self._root.is_dir():
            raise NotFound("no such bucket", file=self._root)
        for directory, names, files in os.walk(self._root, onerror=_unless_gone):
            names[:] = [name for name in names if not name.startswith(".")]
            for file in files:
                if not file.endswith(_TEMPORARY) and not file.startswith("."):
                    yield from self._object(Path(directory, file))

    def _object(self, path: Path) -> Iterator[Object]:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or a link to nothing
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                name = path.relative_to(self._root).as_posix()
                yield Object(name, found.st_size, found.st_mtime)

    def _place(self, name: str) -> Path:
        return self._root / check_object_name(name)

    def read(self, name: str, start: int, stop: int) -> bytes:
        place = self._place(name)
        with _errors(place), open(place, "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if self._throttle is not None:
            self._throttle.take(len(data))
        return data

    def fetch(self, name: str, target: Path) -> None:
        place = self._place(name)
        with _errors(place):
            os.close(os.open(place, os.O_RDONLY))  # or an empty target would be left
            if place.is_dir():
                raise IsADirectoryError
        with open(target, "xb") as file:
            self._copy(place, file)

    def _copy(self, source: Path, target: IO[bytes]) -> None:
        copy_file(source, target, self._throttle.take if self._throttle else None)

    def path(self, name: str) -> Path | None:
        return self._place(name)

    def put(self, name: str, source: Path) -> bool:
        target = self._place(name)
        try:
            with temporary_file(target) as (file, temporary):
                self._copy(source, file)
                file.flush()
                os.fsync(file.fileno())
                created = _link(temporary, target)
        except PermissionError:
            raise NotAllowed("permission denied", file=target) from None
        if created:
            self._sync_up(target.parent)
        return created

    def _sync_up(self, directory: Path) -> None:
        """Make the new name durable, and those of directories that may be new with it."""
        while directory.is_relative_to(self._root):
            sync_directory(directory)
            directory = directory.parent
        sync_directory(directory)

    def delete(self, name: str) -> None:
        self._place(name).unlink(missing_ok=True)

    def unfinished(self) -> Iterable[Unfinished]:
        """Also what lies beside the directory under its name, and downloads that were kept."""
        return leftovers(self._root)

    def discard(self, item: Unfinished, before: float) -> Outcome:
        return discard(item.key, before)


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise NotFound("no such object", file=path) from None
    except PermissionError:
        raise NotAllowed("permission denied", file=path) from None


def _unless_gone(error: OSError) -> None:
    """What is hidden from this user is not absent; what another process removed meanwhile is."""
    with _errors(Path(error.filename)), contextlib.suppress(FileNotFoundError):
        raise error


def _link(temporary: Path, target: Path) -> bool:
    """Give the file its name unless that is taken: link(2) creates or fails, in one step."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _rename(temporary, target)
    return True


def _rename(temporary: Path, target: Path) -> bool:
    """For file systems without hard links."""
    try:
        return rename_new(temporary, target) or _claim(temporary, target)
    except FileExistsError:
        return False


def _claim(temporary: Path, target: Path) -> bool:
    """For those without either: the claim decides who writes, the rename shows the object whole."""
    claim = target.with_name(f".{target.name}{CLAIM}")
    try:
        claim.mkdir()
    except FileExistsError:
        if target.exists():
            return False
        raise Transient(
            "somebody is writing this object, or died while writing it",
            file=target,
            hint=f"try again, or, if nobody is: rmdir {claim}",
        ) from None
    try:
        if target.exists():
            return False
        os.replace(temporary, target)
    finally:
        claim.rmdir()
    return True
