"""A step of a chain, rebuilt bit for bit into a directory that can be served."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from deltactl.chain.chain import Chain, Link
from deltactl.chain.check.objects import (
    anchor_files,
    aux_files,
    check_file,
    faults_at,
    object_of,
)
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.fetching import Fetched, fetched
from deltactl.chain.transfer.ranges import Tally, Wanted, transfer
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.errors import Conflict, DeltactlError, Malformed, Transient, UsageError
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.atomic import (
    atomic_directory,
    atomic_file,
    check_exchangeable,
    copy_file,
    recover,
    temporary_directory,
)
from deltactl.files.downloads import discard_downloads
from deltactl.format.anchor import AnchorFile
from deltactl.format.checker import expected_file, has_file
from deltactl.format.delta import Delta, open_delta
from deltactl.ops.apply import carry_over, prove
from deltactl.ops.destination import (
    MARKER,
    HeldStep,
    check_no_trainer,
    look,
    marker_of,
    outdated,
    weights_of,
)
from deltactl.replay.rebuild import write_directory

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class PullReport:
    """What ``pull`` did. ``bytes_fetched``: of links, headers read on the way not counted;
    ``bytes_resumed``: what an earlier run had fetched already, and this one used; ``from_step``:
    the step that the directory held and that was built on; ``written``: False where
    it held the wanted one; ``proven``: False where no digest says what the result should be
    (TRL's); ``newer``: steps above that are in the bucket and cannot be rebuilt."""

    step: int
    state: str
    bytes_fetched: int
    bytes_resumed: int
    links: int
    from_step: int | None
    written: bool
    proven: bool
    newer: tuple[int, ...]


def pull(
    bucket: Bucket,
    dest: Path,
    *,
    step: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> PullReport:
    """Make ``dest`` a Hugging Face directory of a step, the tip by default; -1 is the tip too, -2
    the step before it.

    If ``dest`` holds an earlier step of the chain only the deltas between are fetched, unless an
    anchor is the shorter way. Nothing is visible before it is proven. What was fetched before a
    failure that may pass is kept beside ``dest``, and the next pull goes on with it. Raises
    NotFound, Malformed, and Conflict where ``dest`` holds something that is not of this chain, or,
    without ``force``, a trainer's state beside weights that are to be replaced.
    """
    check_apart(bucket, dest)
    chain = read_chain(bucket)
    return materialize(bucket, chain, dest, step=step, force=force, progress=progress)


def materialize(
    bucket: Bucket,
    chain: Chain,
    dest: Path,
    *,
    step: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> PullReport:
    """``pull`` of a chain whose headers have been read. Raises Transient where others write to
    ``dest`` again and again."""
    step = chain.numbered(step)
    recover(dest.resolve())
    for attempt in itertools.count(1):
        try:
            with _watch(dest) as check:
                try:
                    return _materialize(bucket, chain, dest, step, force, check, progress)
                except DeltactlError:
                    with contextlib.suppress(OSError):
                        check()  # what is wrong may be that others were exchanging it
                    raise
        except _Exchanged:  # others are done with it: what they wrote may be built on
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("at least one attempt")


class _Exchanged(Transient):
    """The destination is another directory than the one that was looked at."""


@contextlib.contextmanager
def _watch(dest: Path) -> Iterator[Callable[[], None]]:
    """A check that raises _Exchanged if ``dest`` is not the directory any more that it was."""
    with contextlib.ExitStack() as stack:
        fd = None
        with contextlib.suppress(OSError):  # there is none yet, or a look at it will say more
            fd = os.open(dest, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, fd)  # held for as long: no other gets its inode

        def check() -> None:
            if fd is not None and not os.path.samestat(os.fstat(fd), dest.stat()):
                what = "somebody else wrote the destination at the same moment"
                raise _Exchanged(what, file=dest, hint="let one pull at a time write there")

        yield check


def _materialize(
    bucket: Bucket,
    chain: Chain,
    dest: Path,
    step: int | None,
    force: bool,
    check: Callable[[], None],
    progress: Progress,
) -> PullReport:
    held = look(chain, dest, step, progress)
    wanted = step if step is not None else _newest(chain, dest, held)
    newer = () if step is not None else chain.newer(wanted)
    if held is not None and held.step == wanted:
        discard_downloads(dest.resolve())
        size, mended = _mend(bucket, chain, dest, wanted, held.state, force)
        proven = chain.state_at(wanted) is not None
        return PullReport(wanted, held.state, size, 0, 0, wanted, mended, proven, newer)
    if held is not None and not force:
        check_no_trainer(dest, chain)
    check_exchangeable(dest.resolve())  # before much is fetched in vain
    way = chain.way(wanted, held.step if held else None)
    anchor, expected = way.anchor, chain.state_at(wanted)
    meter = Meter(progress, "fetching", way.nbytes)
    with (
        fetched(bucket, way.links, dest.resolve(), meter, keep=True) as found,
        contextlib.ExitStack() as stack,
    ):
        meter.add(found.in_place)
        opened = [_open_checked(link, found) for link in way.deltas]
        place = dest if anchor is None else found.places[anchor.name]
        base = stack.enter_context(open_checkpoint(place))
        if anchor is not None:
            aux = _aux_of(anchor, base.path)
        else:
            check()
            aux = stack.enter_context(_missing_aux(bucket, chain, dest, wanted))
        unchecked = None if anchor is None or anchor.name in found.checked else anchor
        state = _write(chain, base, unchecked, opened, dest, wanted, expected, aux, progress)
        more = 0 if anchor is not None else _size(aux)
    discard_downloads(dest.resolve())
    return PullReport(
        step=wanted,
        state=state,
        bytes_fetched=found.in_place + found.tally.bytes_fetched + more,
        bytes_resumed=found.tally.bytes_resumed,
        links=len(way.links),
        from_step=None if anchor or held is None else held.step,
        written=True,
        proven=expected is not None,
        newer=newer,
    )


def check_apart(bucket: Bucket, dest: Path) -> None:
    """Raise UsageError where bucket and destination lie in each other."""
    inside, place = bucket.path("anchors"), dest.resolve()
    if inside is None:
        return
    root = inside.parent.resolve()
    if place.is_relative_to(root) or root.is_relative_to(place):
        what = "the destination and the bucket lie in each other"
        raise UsageError(what, file=dest, found=bucket.url, hint="name a directory beside it")


def _newest(chain: Chain, dest: Path, held: HeldStep | None) -> int:
    """The newest step that can be had, from an anchor or from what ``dest`` holds.

    Raises Conflict where ``dest`` holds a newer one: to go back is for its user to say.
    """
    if held is None or (held.step is None and held.marked is None):
        return chain.wanted(None)
    best = chain.tip if chain.tip is not None else -1
    if held.step is not None:
        best = max(best, _reached(chain, held.step, above=best))
    have = max(s for s in (held.step, held.marked) if s is not None)
    if best < have:
        raise Conflict(
            "the destination holds a newer step than the bucket can give",
            file=dest,
            expected=f"step {have} or above in {chain.url}",
            found=f"step {best}" if best >= 0 else "no step that can be rebuilt",
            hint=f"deltactl verify {quote(chain.url)}; to go back, name the step: "
            f"--step {max(best, 0)}",
        )
    return best


def _reached(chain: Chain, have: int, above: int) -> int:
    """The newest step that deltas lead to from the one at hand; that itself where none do."""
    for step in reversed(chain.steps):
        if step <= max(have, above):
            break
        with contextlib.suppress(DeltactlError):
            chain.path_from(have, step)
            return step
    return have


def _open_checked(link: Link, found: Fetched) -> Delta:
    delta = open_delta(found.places[link.name])
    if link.name not in found.checked and delta.header.has_digests:
        delta.check_payload()
    return delta


def _write(
    chain: Chain,
    base: Checkpoint,
    anchor: Link | None,
    deltas: Sequence[Delta],
    dest: Path,
    step: int,
    expected: str | None,
    aux: Mapping[str, Path],
    progress: Progress,
) -> str:
    """Write the step into ``dest``, prove it, give it its name; returns its state.

    ``anchor``: the one that ``base`` is, if its files have not been checked yet.
    """
    replaces, beside = dest.exists(), _beside(chain, step)
    with atomic_directory(dest) as directory:
        try:
            written = write_directory(base, deltas, directory, aux=aux, progress=progress)
        except Conflict as error:  # between links of one chain; no other checkpoint is in the play
            raise Malformed(error.what, **_where(error)) from None
        except Malformed:  # upon a torn anchor the changes of some encodings cannot be decoded
            if anchor is not None:
                _check_anchor(anchor, base)
            raise
        if anchor is not None:
            for file in anchor_files(anchor):
                place = base.path if file.is_shard else directory
                check_file(anchor, file, place / file.name)
            if expected is not None and written.state != expected:
                _check_anchor(anchor, base)  # whether its own bytes are to blame
        prove(base, deltas, written, expected)
        if replaces:
            carry_over(dest, directory, weights_of(dest))
            for name in outdated(dest, beside):
                (directory / name).unlink(missing_ok=True)
        (directory / MARKER).unlink(missing_ok=True)
        (directory / MARKER).write_text(marker_of(chain, step, written.state, beside))
    return written.state


def _check_anchor(anchor: Link, base: Checkpoint) -> None:
    for fault in faults_at(anchor, base.path):
        raise fault


def _where(error: DeltactlError) -> dict[str, Any]:
    return {key: value for key, value in error.facts().items() if key != "what"}


# The files that travel with the weights.


def _aux_of(anchor: Link, place: Path) -> dict[str, Path]:
    return {file.name: place / file.name for file in aux_files(anchor)}


def _beside(chain: Chain, step: int) -> tuple[AnchorFile, ...]:
    anchor = chain.start_for(step)
    return () if anchor is None else aux_files(anchor)


def _mend(
    bucket: Bucket, chain: Chain, dest: Path, step: int, state: str, force: bool
) -> tuple[int, bool]:
    """Put right what ``dest`` has not as the chain has it, but for weights; returns the bytes, and
    whether anything was."""
    beside = _beside(chain, step)
    stale = outdated(dest, beside)
    with _missing_aux(bucket, chain, dest, step) as aux:
        if (aux or stale) and not force:
            check_no_trainer(dest, chain)
        size = _size(aux)
        for name, path in aux.items():
            with atomic_file(dest / name) as file:
                copy_file(path, file)
    for name in stale:
        (dest / name).unlink(missing_ok=True)
    if (aux or stale) and (dest / MARKER).exists():
        with atomic_file(dest / MARKER) as file:
            file.write(marker_of(chain, step, state, beside).encode())
    return size, bool(aux or stale)


@contextlib.contextmanager
def _missing_aux(bucket: Bucket, chain: Chain, dest: Path, step: int) -> Iterator[dict[str, Path]]:
    """The files of the newest anchor up to ``step`` that ``dest`` lacks or has otherwise, fetched
    and checked. Deltas do not carry them, and a directory without its config cannot be served."""
    anchor = chain.start_for(step)
    files = _beside(chain, step)
    files = tuple(file for file in files if not has_file(dest / file.name, file))
    if anchor is None or not files:
        yield {}
        return
    with temporary_directory(dest.resolve()) as fresh:
        transfer(
            bucket,
            [_wanted(anchor, file, fresh, number) for number, file in enumerate(files)],
            Meter(silent, "", 0),
            Tally(),
        )
        yield {file.name: fresh / "whole" / file.name for file in files}


def _wanted(anchor: Link, file: AnchorFile, place: Path, number: int) -> Wanted:
    return Wanted(
        expected_file(file, object_of(anchor, file), anchor.step),
        target=place / "whole" / file.name,
        partial=place / "partial" / f"{number}",
    )


def _size(files: Mapping[str, Path]) -> int:
    return sum(path.stat().st_size for path in files.values())
