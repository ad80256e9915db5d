"""The bucket of a run, and links that are put there, also again where an answer was lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shlex import quote

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.put import put_between, put_object, put_snapshot
from deltactl.chain.transfer.snapshot import Snapshot
from deltactl.core.errors import Conflict, NotAllowed


def opened(bucket: str | os.PathLike[str] | Bucket) -> Bucket:
    """The bucket that a publisher is given. Raises as ``open_bucket``."""
    if isinstance(bucket, str | os.PathLike):
        return open_bucket(str(bucket), publishes=True)
    return bucket


def check_writable(bucket: Bucket) -> None:
    """Raise NotAllowed where a bucket that is a directory cannot be written to: a store tells that
    of the first link, a directory can be asked before training begins."""
    place = bucket.path("anchors")
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except OSError as error:
        what = f"the bucket cannot be written: {error.strerror or error}"
        hint = "publish into a directory that may be written"
        raise NotAllowed(what, file=bucket.url, hint=hint) from None


def put_link(bucket: Bucket, name: str, path: Path, step: int) -> None:
    """Create a link's object. One that is there with the same bytes is ours, put by a try whose
    answer was lost. Raises Conflict for other bytes, and what the bucket raises."""
    put_object(bucket, name, path, lambda: _other(bucket, name, step))


def _other(bucket: Bucket, name: str, step: int) -> Conflict:
    return Conflict(
        "the step was published by somebody else meanwhile",
        file=name,
        step=step,
        hint=f"one publisher a chain: see deltactl log {quote(bucket.url)}; publish into a new "
        "bucket, or end the other one and start again",
    )


def put_anchor(bucket: Bucket, snapshot: Snapshot) -> int:
    """Put an anchor's files, its index last; returns the bytes of all. Raises as ``put_link``."""
    other = partial(_other, bucket, snapshot.name, snapshot.step)
    return sum(put_snapshot(bucket, snapshot, other)[0].values())


def put_index(bucket: Bucket, name: str, path: Path, step: int, sizes: Mapping[str, int]) -> None:
    """Put the index of files that other ranks have put: by name, with their sizes. Raises as
    ``put_link``, and Conflict where one of them is gone."""
    put_between(bucket, name, sizes, lambda: put_link(bucket, name, path, step))
