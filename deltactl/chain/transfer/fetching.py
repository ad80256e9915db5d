"""Links as files: where they lie if the bucket can be mapped, else fetched and checked."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltactl.chain.chain import Link
from deltactl.chain.check.objects import expected_in, seal_of
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.ranges import Tally, Wanted, transfer
from deltactl.core.digest import digest_of
from deltactl.core.errors import DeltactlError
from deltactl.core.progress import Meter
from deltactl.files.atomic import temporary_directory
from deltactl.files.downloads import discard_others, kept_downloads

_BATCH = 1 << 24  # bytes for each request at once, where the store names no size of ranges


@dataclass(slots=True)
class Fetched:
    """``places``: by link's name its file, or its directory. ``checked``: links that were compared
    with all their digests on the way; the others were not looked at. ``mapped``: those that were
    not copied; ``in_place``: their bytes."""

    places: dict[str, Path] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    mapped: set[str] = field(default_factory=set)
    in_place: int = 0
    tally: Tally = field(default_factory=Tally)

    def faults(self, link: Link) -> list[DeltactlError]:
        """What was found wrong with a link on the way, where faults are gathered."""
        found = (self.tally.faults.get(item.name, []) for item in link.objects)
        return [fault for of_object in found for fault in of_object]


@contextlib.contextmanager
def fetched(
    bucket: Bucket,
    links: Sequence[Link],
    near: Path,
    meter: Meter,
    *,
    keep: bool = False,
    gather: bool = False,
) -> Iterator[Fetched]:
    """The links as files while the block runs.

    Where the bucket's objects can be mapped nothing is copied; others are fetched into a directory
    beside ``near``, and ``meter`` told of their bytes. With ``keep`` what was fetched outlives a
    failure, and is gone on with. Raises as ``transfer``; ``gather`` as there.
    """
    found = Fetched()
    to_fetch = []
    for link in links:
        path = bucket.path(link.name)
        if path is None or _has_strangers(link, path.parent):
            to_fetch.append(link)
        else:
            found.places[link.name] = path if link.directory is None else path.parent
            found.mapped.add(link.name)
            found.in_place += link.bytes
    with contextlib.ExitStack() as stack:
        if to_fetch:
            place = stack.enter_context(kept_downloads(near) if keep else temporary_directory(near))
            ids = {link.name: _id(bucket, link) for link in to_fetch}
            discard_others(place, set(ids.values()))
            wanted = [item for link in to_fetch for item in _wanted(link, place, ids[link.name])]
            transfer(bucket, wanted, meter, found.tally, gather=gather)
            for link in to_fetch:
                home = place / ids[link.name]
                single = link.directory is None
                found.places[link.name] = home / _short(link, link.name) if single else home
                if seal_of(link) is not None:
                    found.checked.add(link.name)
        yield found


def _has_strangers(link: Link, directory: Path) -> bool:
    """Whether weights lie in an anchor's directory that its index does not name: left by a push
    that came to no end. They are not the anchor's, and the directory cannot be opened where it is.
    """
    if link.kind != "anchor" or link.directory is None:
        return False  # of a delta nothing is opened that its index does not name
    known = {item.name.rsplit("/", 1)[1] for item in link.objects}
    return any(path.name not in known for path in directory.glob("*.safetensors"))


def _id(bucket: Bucket, link: Link) -> str:
    """The name of what is fetched of a link: the same for the same content alone. What has no
    digest is never gone on with."""
    digest = seal_of(link) or secrets.token_hex(16)
    return _hash(f"{bucket.url}\n{link.name}\n{digest}")


def _hash(text: str) -> str:
    return digest_of(text.encode(errors="surrogateescape"))[:32]


def _wanted(link: Link, place: Path, name: str) -> Iterator[Wanted]:
    for item in link.objects:
        short = _short(link, item.name)
        yield Wanted(
            expected_in(link, item),
            target=place / name / short,
            partial=place / f"{name}.partial" / _hash(short),
        )


def _short(link: Link, name: str) -> str:
    """An object's name relative to where its link's objects are."""
    return name.removeprefix(link.name.rsplit("/", 1)[0] + "/")


def batches(links: Sequence[Link], bucket: Bucket) -> Iterator[list[Link]]:
    """The links in order, so many at once as keep all requests busy: a large one comes alone, as
    the disk need not hold more."""
    room = bucket.jobs * (bucket.part_bytes or _BATCH)
    batch: list[Link] = []
    for link in links:
        if batch and sum(other.bytes for other in batch) + link.bytes > room:
            yield batch
            batch = []
        batch.append(link)
    if batch:
        yield batch
