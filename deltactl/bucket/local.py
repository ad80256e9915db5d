"""A local directory, also on a network file system, as a bucket."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from deltactl.core.errors import NotFound, UsageError
from deltactl.core.files import copy_file, sync_directory
from deltactl.core.store import Object

_TEMPORARY = ".tmp"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalBucket:
    """Implements core.store.Bucket. Creation is atomic: of two that put one name, one gets True."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        return str(self._root.resolve())

    def list(self) -> Iterator[Object]:
        if not self._root.is_dir():
            raise NotFound("no such bucket", file=self._root)
        for directory, names, files in os.walk(self._root):
            names[:] = [name for name in names if not name.startswith(".")]
            for file in files:
                path = Path(directory, file)
                if file.endswith(_TEMPORARY) or file.startswith(".") or not path.is_file():
                    continue
                yield Object(path.relative_to(self._root).as_posix(), path.stat().st_size)

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise UsageError("the object's name would leave the bucket", file=name)
        return self._root / name

    def read(self, name: str, start: int, stop: int) -> bytes:
        try:
            with open(self._place(name), "rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except FileNotFoundError:
            raise NotFound("no such object", file=self._place(name)) from None

    def fetch(self, name: str, target: Path) -> None:
        try:
            with open(target, "xb") as file:
                copy_file(self._place(name), file)
        except FileNotFoundError:
            raise NotFound("no such object", file=self._place(name)) from None

    def path(self, name: str) -> Path | None:
        return self._place(name)

    def put(self, name: str, source: Path) -> bool:
        target = self._place(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            with open(temporary, "xb") as file:
                copy_file(source, file)
                file.flush()
                os.fsync(file.fileno())
            created = _link(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
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


def _link(temporary: Path, target: Path) -> bool:
    """Give the file its name unless that is taken: link(2) creates or fails, in one step."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _claim(temporary, target)
    return True


def _claim(temporary: Path, target: Path) -> bool:
    """For file systems without hard links: the claim decides who writes, the rename shows it whole."""
    claim = target.with_name(f".{target.name}.claim")
    try:
        claim.mkdir()
    except FileExistsError:
        return False
    try:
        if target.exists():
            return False
        os.replace(temporary, target)
    finally:
        shutil.rmtree(claim, ignore_errors=True)
    return True
