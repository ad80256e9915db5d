"""A prefix of a bucket at an object store."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from obstore import exceptions

from deltactl.bucket.cloud.creation import TOKEN, Creation, Source
from deltactl.bucket.cloud.obstore_errors import is_out_of_range, refusal_of, translated
from deltactl.bucket.cloud.refusals import (
    NOT_IMPLEMENTED,
    Place,
    changed,
    cut_short,
    no_conditions,
)
from deltactl.bucket.cloud.temporary_upload import PREFIX as STAGED
from deltactl.bucket.throttle import Throttle
from deltactl.chain.store import Object
from deltactl.core.errors import NotFound, Transient
from deltactl.core.threads import map_settled
from deltactl.files.atomic import write_at
from deltactl.files.names import check_object_name
from deltactl.files.temporary import Outcome, Unfinished

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

    from deltactl.bucket.cloud.listing import Listing

PART_BYTES = 1 << 23
SINGLE_BYTES = 1 << 24
"""The largest file that is sent in one request, and so held in memory."""


class ObjectBucket:
    """Implements chain.store.Bucket. Creation is atomic where the store's conditions are.

    A file of up to 16 MiB is one PUT with the condition that the name is free (If-None-Match: *, or
    the store's own word for it), which the store judges in the step that makes the object visible.
    A larger one goes up in parts, several at once, by a ``Creation``, whose docstring
    says what is guaranteed: at S3 no more than the server does for completed uploads.

    If the reply to a ``put`` is lost, Transient is raised, and the object may be there or not.
    Every put therefore leaves a token of its own in the object's metadata: when the same bucket
    object is told to put the same file again and finds the name taken, it looks whose token it is,
    and gives True if that of the lost try. A store that keeps no metadata makes it False.

    No request is tried again here, except the parts of a large upload; what may be raises
    Transient.
    """

    def __init__(
        self,
        place: Place,
        store: ObjectStore,
        listing: Listing,
        large: Creation,
        pool: Executor,
        jobs: int,
        throttle: Throttle | None = None,
    ) -> None:
        self._place, self._store, self._listing, self._large = place, store, listing, large
        self._pool, self._jobs, self._throttle = pool, jobs, throttle
        self._lost: dict[tuple[str, Path], set[str]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def atomic_create(self) -> bool:
        return True

    @property
    def jobs(self) -> int:
        return self._jobs

    @property
    def part_bytes(self) -> int | None:
        return PART_BYTES

    def list(self) -> Iterator[Object]:
        for found in self._listing():
            if not found.name.startswith(STAGED):
                yield found

    def read(self, name: str, start: int, stop: int) -> bytes | memoryview:
        check_object_name(name)
        with translated(self._place, name):
            found = self._open(name, start, stop)
            return b"" if found is None else self._body(name, found, start, stop)

    def _open(
        self, name: str, start: int, stop: int, version: str | None = None
    ) -> GetResult | None:
        """The reply to a request for a range, its body still to come; None where the range is
        empty."""
        options: GetOptions = {"range": (start, stop)}
        if version is not None:
            options["if_match"] = version
        if start < stop:
            try:
                return self._store.get(name, options=options)
            except exceptions.GenericError as error:
                if not is_out_of_range(error):
                    raise
        else:
            self._store.head(name)
        return None

    def _body(self, name: str, found: GetResult, start: int, stop: int) -> memoryview:
        data = memoryview(found.bytes())
        expected = min(stop, found.meta["size"]) - start
        if len(data) != expected:
            raise cut_short(self._place, name, expected, len(data))
        if self._throttle is not None:
            self._throttle.take(len(data))
        return data

    def fetch(self, name: str, target: Path) -> None:
        check_object_name(name)
        with translated(self._place, name):
            first = self._open(name, 0, PART_BYTES)
            with _new_file(target) as descriptor:
                if first is not None:
                    self._fetch(name, first, descriptor)

    def _fetch(self, name: str, first: GetResult, descriptor: int) -> None:
        """Write all ranges to their places, of the one version that the first is of."""
        size, version = first.meta["size"], first.meta["e_tag"]
        writing = threading.Lock()  # or threads spin in the system for the one file

        def fetch(start: int) -> None:
            stop = min(start + PART_BYTES, size)
            with translated(self._place, name):
                found = first if start == 0 else self._open(name, start, stop, version)
                if found is None or found.meta["size"] != size:
                    raise changed(self._place, name)
                data = self._body(name, found, start, stop)
                with writing:
                    write_at(descriptor, data, start)

        map_settled(self._pool, fetch, range(0, size, PART_BYTES))

    def path(self, name: str) -> Path | None:
        check_object_name(name)
        return None

    def put(self, name: str, source: Path) -> bool:
        check_object_name(name)
        with open(source, "rb") as file:
            token = uuid4().hex
            try:
                if self._create(name, Source(file.fileno(), self._throttle), token):
                    return True
            except Transient:
                with self._lock:
                    self._lost.setdefault((name, source), set()).add(token)
                raise
        with self._lock:
            lost = self._lost.pop((name, source), set())
        found = self._token(name)
        if found is None:  # a store may also say "conflict" of a name that nobody has in the end
            raise changed(self._place, name)
        return found in {token, *lost}

    def _create(self, name: str, source: Source, token: str) -> bool:
        if source.size > SINGLE_BYTES:
            return self._token(name) is None and self._large.create(name, source, token)
        data = source.piece(0, source.size)
        with translated(self._place, name):
            try:
                self._store.put(name, data, mode="create", attributes={TOKEN: token})
            except exceptions.AlreadyExistsError:
                return False
            except exceptions.BaseError as error:
                refusal = refusal_of(error)
                if refusal.status != NOT_IMPLEMENTED:
                    raise
                raise no_conditions(refusal, self._place, name) from None
        return True

    def _token(self, name: str) -> str | None:
        """The token of the put that made an object, "" if it has none; None where there is no
        object."""
        with contextlib.suppress(NotFound), translated(self._place, name):
            found = self._store.get(name, options={"head": True})
            return str(found.attributes.get(TOKEN, ""))
        return None

    def delete(self, name: str) -> None:
        check_object_name(name)
        with contextlib.suppress(NotFound), translated(self._place, name):
            self._store.delete(name)

    def unfinished(self) -> Iterable[Unfinished]:
        return self._large.unfinished()

    def discard(self, item: Unfinished, before: float) -> Outcome:
        return self._large.discard(item, before)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """The descriptor of a file made here; removed if the block fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
