"""Large objects at Google's and Microsoft's stores: uploaded aside, in parallel, then copied to
their name by the store itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from obstore import exceptions

from deltactl.bucket.cloud.creation import TOKEN, Source
from deltactl.bucket.cloud.obstore_errors import translated
from deltactl.bucket.cloud.refusals import Place
from deltactl.files.temporary import Outcome, Unfinished

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from deltactl.bucket.cloud.listing import Listing

PREFIX = ".upload-"
"""What the names of unfinished uploads begin with; whoever lists a bucket leaves them out."""

_PART = 1 << 24


class TemporaryUpload:
    """Both stores copy within themselves, an object of any size, on the condition that the target
    does not exist, and judge that in the step that makes it visible: of two that copy to one name
    one is refused. (Google's multipart uploads take no condition, and obstore gives Microsoft's
    none.) A process that is killed leaves a ``.upload-`` object, which nobody sees as a link and
    ``unfinished`` shows; what had not been sent whole is in no listing, and Microsoft's store drops
    it after a week.
    """

    def __init__(self, store: ObjectStore, place: Place, listing: Listing, jobs: int) -> None:
        self._store, self._place, self._listing, self._jobs = store, place, listing, jobs

    def create(self, name: str, source: Source, token: str) -> bool:
        aside = f"{PREFIX}{token}/{name}"
        with translated(self._place, name):
            try:
                self._store.put(
                    aside,
                    _pieces(source),
                    attributes={TOKEN: token},
                    use_multipart=True,
                    chunk_size=_PART,
                    max_concurrency=self._jobs,
                )
                self._store.copy(aside, name, overwrite=False)
            except exceptions.AlreadyExistsError:
                return False
            finally:
                with contextlib.suppress(exceptions.BaseError, FileNotFoundError):
                    self._store.delete(aside)
        return True

    def unfinished(self) -> Iterator[Unfinished]:
        for found in self._listing():
            if found.name.startswith(PREFIX):
                _, _, name = found.name.partition("/")
                where, touched = self._place.of(found.name), found.modified or 0.0
                yield Unfinished("upload", name or None, where, found.size, touched, found.name)

    def discard(self, item: Unfinished, before: float) -> Outcome:
        with translated(self._place, item.key), contextlib.suppress(FileNotFoundError):
            if self._store.head(item.key)["last_modified"].timestamp() >= before:
                return "in use"
            self._store.delete(item.key)
        return "removed"


def _pieces(source: Source) -> Iterator[bytes]:
    for start in range(0, source.size, _PART):
        yield source.piece(start, min(start + _PART, source.size))
