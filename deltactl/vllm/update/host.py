"""What the processes of a server on one machine need of a chain, fetched and made once for all.

Whoever comes first holds a lock in the cache's directory and does the work; the others wait, find
it done, and check it for themselves. Links in a bucket that can be mapped are used where they lie.
The disk that is taken is bounded: links that were used before give way to as many bytes of new
ones, and of the chains whose steps were rebuilt here the last two have one checkpoint each.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from deltactl.chain.chain import Chain, Link
from deltactl.chain.check.objects import seal_of
from deltactl.chain.reading import read_chain, read_links
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.fetching import fetched
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotAllowed, Unproven
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.atomic import atomic_file
from deltactl.files.cache import cache_root, forget_others, held_place
from deltactl.files.temporary import remove
from deltactl.format.delta import Delta, open_delta
from deltactl.format.header import HEADER_DIGEST
from deltactl.ops.apply import write_result
from deltactl.ops.pull import materialize
from deltactl.vllm.update.directory import Identity, TensorIdentity, file_times, identify

__all__ = ["FetchedLinks", "Identity", "TensorIdentity", "checkpoint_at", "identify", "open_links"]

_LINKS = "links"
_CHECKPOINTS = "checkpoints"
_OTHERS_KEPT = 1
_PROVEN = "proven"


@dataclass(slots=True)
class FetchedLinks:
    """Deltas, mapped and checked whole; ``fetched_bytes``: what this process fetched of them."""

    deltas: list[Delta] = field(default_factory=list)
    fetched_bytes: int = 0


def open_links(bucket: Bucket, names: Sequence[str], progress: Progress = silent) -> FetchedLinks:
    """The deltas whose objects these are, in that order, every byte of them checked. ``progress``:
    told of what is fetched.

    Raises NotFound, Malformed, Unproven for links without digests, and what the bucket raises.
    """
    links = read_links(bucket, names)
    found = FetchedLinks()
    for link in links:
        _need_delta(link)
    away = [link for link in links if bucket.path(link.name) is None]
    places = _fetch(bucket, away, found, progress) if away else {}
    for link in links:
        place = bucket.path(link.name)
        if place is not None:
            found.deltas.append(_open(link, place))
        else:
            found.deltas.append(_open_kept(bucket, link, places[link.name], found, progress))
    return found


def _need_delta(link: Link) -> None:
    """Raise Malformed for an anchor, Unproven for what TRL wrote."""
    if link.kind != "delta":
        raise Malformed("the link is no delta", file=link.name, step=link.step, found=link.kind)
    if seal_of(link) is None:
        raise Unproven(
            "the delta carries no digests: nothing would show that the right weights are served",
            file=link.name,
            step=link.step,
            hint="publish the steps with deltactl push",
        )


def _open(link: Link, place: Path) -> Delta:
    """Open and check the file, or the directory, that a link is. Raises Malformed where it is
    another."""
    delta = open_delta(place)
    if delta.header.metadata.get(HEADER_DIGEST) != seal_of(link):
        what = "the file is another than the link whose header was read"
        raise Malformed(what, file=place, expected=seal_of(link), step=link.step)
    delta.check_payload()
    return delta


def _open_kept(
    bucket: Bucket, link: Link, place: Path, found: FetchedLinks, progress: Progress
) -> Delta:
    """Open what was fetched, by whomever; once more where it is gone or torn meanwhile."""
    with contextlib.suppress(DeltactlError):
        return _open(link, place)
    remove(place)
    return _open(link, _fetch(bucket, [link], found, progress)[link.name])


def _fetch(
    bucket: Bucket, links: Sequence[Link], found: FetchedLinks, progress: Progress
) -> dict[str, Path]:
    """Where each link lies in the cache, those fetched that were not there.

    One directory for all buckets, as a link's name there is its digest; a lock for each, so that
    none waits for another's.
    """
    with _cache_errors(), held_place(_LINKS, bucket.url) as lock:
        shelf = cache_root() / _LINKS / "shelf"
        shelf.mkdir(exist_ok=True)
        places = {link.name: shelf / f"{seal_of(link)}{_suffix(link)}" for link in links}
        missing = [link for link in links if not _has_size(places[link.name], link.bytes)]
        if missing:
            _make_room(shelf, set(places.values()), sum(link.bytes for link in links))
            meter = Meter(progress, "fetching", sum(link.bytes for link in missing))
            with fetched(bucket, missing, lock / "link", meter, keep=True) as new:
                for link in missing:
                    if link.directory is not None:
                        remove(places[link.name])  # it would not give way to another
                    os.replace(new.places[link.name], places[link.name])
                found.fetched_bytes += new.tally.bytes_fetched
        for place in places.values():
            with contextlib.suppress(FileNotFoundError):  # given up for another bucket's
                os.utime(place)
    return places


def _suffix(link: Link) -> str:
    return ".safetensors" if link.directory is None else ""


def _has_size(path: Path, size: int) -> bool:
    try:
        return _bytes_at(path) == size
    except FileNotFoundError:
        return False


def _bytes_at(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _make_room(shelf: Path, wanted: set[Path], size: int) -> None:
    """Remove the links that were used longest ago, until the others take no more than ``size``.

    Processes that have one mapped keep it; one that is about to open it fetches it again.
    """
    others = {}
    for path in shelf.iterdir():
        with contextlib.suppress(FileNotFoundError):
            others[path] = path.stat().st_mtime_ns, _bytes_at(path)
    for path in sorted(others.keys() - wanted, key=lambda path: -others[path][0]):
        size -= others[path][1]
        if size < 0:
            remove(path)


@contextlib.contextmanager
def _cache_errors() -> Iterator[None]:
    """Say where a full or read-only disk is to be looked for."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        what = f"the cache cannot be written: {error.strerror or error}".lower()
        hint = "free some space, or set DELTACTL_CACHE to a directory with more"
        raise NotAllowed(what, file=cache_root(), hint=hint) from error


# Checkpoints.


def checkpoint_at(
    bucket: Bucket,
    step: int,
    state: str,
    *,
    model: Path | None = None,
    progress: Progress = silent,
) -> Checkpoint:
    """A step's checkpoint, mapped; its state was proven when it was written. ``progress``: told of
    what is fetched, and of what is written.

    ``model``: the directory that the server started on: used where it is that state, and built on
    where it is an earlier step that the chain leads on from. Raises Conflict where the chain has
    another state for the step, what pull raises.
    """
    known = _known(model)
    if model is not None and known is not None and known.state == state:
        return open_checkpoint(model)
    with _cache_errors(), held_place(_CHECKPOINTS, bucket.url) as place:
        dest = place / "model"
        if not _is_proven(place, dest, state):
            (place / _PROVEN).unlink(missing_ok=True)
            forget_others(place, [_PROVEN, "model"], _OTHERS_KEPT)
            _rebuild(bucket, dest, step, state, model, known, progress)
            with open_checkpoint(dest) as written:
                proven = {"state": state, "files": file_times(written)}
            with atomic_file(place / _PROVEN) as file:
                file.write(json.dumps(proven).encode())
        return open_checkpoint(dest)


def _known(model: Path | None) -> Identity | None:
    """What the server's directory holds; None where it is gone since, or being written."""
    with contextlib.suppress(DeltactlError):
        return None if model is None else identify(model)
    return None


def _is_proven(place: Path, dest: Path, state: str) -> bool:
    """Whether that is the state that was proven last, and no file has been written to since.

    Only who holds the lock writes here, and notes the times when it is done.
    """
    try:
        proven = json.loads((place / _PROVEN).read_bytes())
        with open_checkpoint(dest) as found:
            return bool(proven == {"state": state, "files": file_times(found)})
    except (OSError, ValueError, DeltactlError):
        return False


def _rebuild(
    bucket: Bucket,
    dest: Path,
    step: int,
    state: str,
    model: Path | None,
    known: Identity | None,
    progress: Progress,
) -> None:
    """Write the step into ``dest``, from the nearest that is at hand."""
    chain = read_chain(bucket)
    if chain.state_at(step) != state:
        raise Conflict(
            "the chain has another state for the step",
            file=bucket.url,
            step=step,
            expected=f"state {state}",
            found=f"state {chain.state_at(step)}",
            hint=f"deltactl log {quote(bucket.url)}",
        )
    if not dest.exists() and model is not None and known is not None:
        names = _way_from(chain, known.state, step)
        with contextlib.suppress(Malformed, Conflict):  # then by the anchor, if there is one
            if names is not None:
                deltas = open_links(bucket, names, progress).deltas
                with open_checkpoint(model) as base:
                    write_result(
                        base, deltas, dest, in_place=False, expected=state, progress=progress
                    )
                return
    try:
        materialize(bucket, chain, dest, step=step, progress=progress)
    except (Conflict, Malformed):
        if not dest.exists():
            raise
        remove(dest)  # left by a chain that is no more, or torn: it says nothing of this one
        materialize(bucket, chain, dest, step=step, progress=progress)


def _way_from(chain: Chain, state: str, step: int) -> list[str] | None:
    """The deltas from a state to a step, where they are fewer bytes than an anchor and its own."""
    with contextlib.suppress(DeltactlError):
        way = chain.way(step, chain.states(step).get(state))
        if way.anchor is None:
            return [link.name for link in way.links]
    return None
