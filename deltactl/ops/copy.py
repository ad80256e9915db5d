"""A chain from one bucket to another: byte for byte, and nothing that is not proven."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from deltactl.chain.chain import Chain, Link
from deltactl.chain.check.links import is_left_over, link_faults
from deltactl.chain.check.objects import seal_of
from deltactl.chain.check.payload import payload_faults
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.fetching import Fetched, batches, fetched
from deltactl.chain.transfer.put import put_snapshot
from deltactl.chain.transfer.snapshot import Snapshot
from deltactl.core.errors import Conflict, DeltactlError, NotFound, UsageError
from deltactl.core.progress import Meter, Progress, silent
from deltactl.format.tensor_table import Table


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What ``copy_chain`` did, or with ``dry_run`` would do. ``links`` are those of the source from
    ``first_step`` to ``last_step``; ``copied`` ones have ``bytes`` in all, ``skipped`` ones were
    there. ``tip``: of the destination. ``proven``: False where links without digests (TRL's) are
    among them."""

    links: int
    copied: int
    skipped: int
    bytes: int
    first_step: int
    last_step: int
    tip: int | None
    proven: bool
    dry_run: bool


def copy_chain(
    source: Bucket,
    dest: Bucket,
    *,
    from_step: int | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> CopyReport:
    """Copy all links of a chain, or from the newest anchor at or below ``from_step`` on.

    Oldest first, so that the destination is a sound chain at every moment; each link is compared
    with its digests before it is put. What is there with the same content is left as it is, so a
    copy that came to no end can be repeated. The anchor that a copy begins with comes without its
    step's delta, whose base is not there.

    Raises NotFound for an empty source, Conflict for a destination that holds something else, the
    fault of the first link that is not sound, once all before it are copied, and what the buckets
    raise.
    """
    _check_apart(source, dest)
    chain = read_chain(source)
    plan = _from(chain, from_step)
    there = _read_dest(dest)
    same = _agreeing(chain, there)
    tables: dict[int, Table] = {}
    links, fault = _sound(plan, tables)
    todo = [link for link in links if link.name not in same]
    copied: list[Link] = todo
    if not dry_run:
        copied = _copy(source, dest, plan, todo, tables, progress)
    if fault is not None:
        raise _of(source, fault)
    known = {link.name: link for link in (*there.links, *links)}
    return CopyReport(
        links=len(links),
        copied=len(copied),
        skipped=len(links) - len(copied),
        bytes=sum(link.bytes for link in copied),
        first_step=links[0].step,
        last_step=links[-1].step,
        tip=Chain(known.values()).tip,
        proven=all(link.result_state is not None for link in links),
        dry_run=dry_run,
    )


def _check_apart(source: Bucket, dest: Bucket) -> None:
    """Raise UsageError where one bucket is, or lies in, the other."""
    a, b = source.url.rstrip("/") + "/", dest.url.rstrip("/") + "/"
    if a.startswith(b) or b.startswith(a):
        what = "source and destination are one bucket, or one lies in the other"
        raise UsageError(what, file=source.url, found=dest.url, hint="name a bucket beside it")


def _from(chain: Chain, step: int | None) -> Chain:
    """The part of a chain to copy. Raises NotFound where there is none."""
    if not chain.links and not chain.problems:
        raise NotFound("the bucket holds no chain", file=chain.url)
    if step is None:
        links = [link for link in chain.links if not is_left_over(chain, link)]
        return Chain(links, chain.problems, url=chain.url)
    start = chain.start_for(step)
    if start is None:
        raise NotFound(
            "the chain has no anchor at this step or below it",
            file=chain.url,
            step=step,
            found=f"anchors at {', '.join(map(str, chain.starts)) or 'no step'}",
            hint=f"deltactl log {quote(chain.url)}",
        )
    links = [link for link in chain.links if link.step > start.step or link is start]
    problems = [p for p in chain.problems if p.step is not None and p.step > start.step]
    return Chain(links, problems, url=chain.url)


def _read_dest(dest: Bucket) -> Chain:
    """What the destination holds. Raises Conflict unless it is a chain, or nothing."""
    try:
        there = read_chain(dest)
    except NotFound:
        return Chain((), url=dest.url)
    for problem in there.problems:
        what = "the destination holds something that is no sound link"
        hint = f"deltactl verify {quote(dest.url)}"
        raise Conflict(what, file=problem.file, step=problem.step, found=problem.what, hint=hint)
    return there


def _agreeing(chain: Chain, there: Chain) -> set[str]:
    """The links that the destination has just as the source has them.

    Raises Conflict for one that it has otherwise, and for a step that the source does not know; it
    may have steps from before the source begins, and more anchors. Of links without digests (TRL's)
    nothing is known yet: their bytes are compared when they are put.
    """
    ours = {link.name: link for link in chain.links}
    first = chain.all_steps[0]
    same = set()
    for link in there.links:
        mine = ours.get(link.name)
        if mine is None:
            known = link.result_state is not None and (
                link.result_state == chain.state_at(link.step)
            )
            if link.step >= first and not known:
                raise _other(there, link, "no such link in the source")
        elif seal_of(mine) != seal_of(link) or mine.bytes != link.bytes:
            raise _other(there, link, f"state {mine.result_state}, {mine.bytes} bytes")
        elif seal_of(mine) is not None:
            same.add(link.name)
    return same


def _other(there: Chain, link: Link, expected: str) -> Conflict:
    return Conflict(
        "the destination holds another chain, or goes on otherwise",
        file=link.name,
        step=link.step,
        expected=expected,
        found=f"state {link.result_state}, {link.bytes} bytes",
        hint=f"deltactl log {quote(there.url)}",
    )


def _sound(plan: Chain, tables: dict[int, Table]) -> tuple[list[Link], DeltactlError | None]:
    """The links before the first fault that headers show, and that fault."""
    links: list[Link] = []
    problems = sorted(plan.problems, key=lambda problem: problem.step or 0)
    for link in plan.links:
        faults: Sequence[DeltactlError] = [p for p in problems if (p.step or 0) <= link.step]
        faults = faults or link_faults(plan, link, tables)
        if faults:
            faults[0].step = faults[0].step or link.step
            return links, faults[0]
        links.append(link)
    return links, problems[0] if problems else None


def _copy(
    source: Bucket,
    dest: Bucket,
    plan: Chain,
    links: Sequence[Link],
    tables: dict[int, Table],
    progress: Progress,
) -> list[Link]:
    """Returns the links that were not there already."""
    total = sum(link.bytes for link in links)
    checking, copying = Meter(progress, "verifying", total), Meter(progress, "copying", total)
    copied = []
    for batch in batches(links, source):
        with fetched(source, batch, _scratch(), checking, gather=True) as found:
            for link in batch:
                faults = payload_faults(plan, link, found, tables)
                if faults:
                    raise _of(source, faults[0])
                if link.name in found.mapped:
                    checking.add(link.bytes)
                copied += [link] if _put(dest, link, found) else []
                copying.add(link.bytes)
    return copied


def _of(source: Bucket, fault: DeltactlError) -> DeltactlError:
    """A fault, with a word on which of the two buckets it is in."""
    fault.hint = fault.hint or f"deltactl verify {quote(source.url)}"
    return fault


def _scratch() -> Path:
    """Beside what to fetch the links that cannot be mapped where they are."""
    return Path(tempfile.gettempdir(), "copy")


def _put(dest: Bucket, link: Link, found: Fetched) -> bool:
    """Put a link's objects, the one with its header last. False if it is there with these bytes;
    raises Conflict if it is there with others."""
    place = found.places[link.name]
    files: dict[str, Path] = {}
    if link.directory is not None:
        prefix = link.directory
        files = {item.name: place / item.name.removeprefix(prefix) for item in link.objects}
        place = files.pop(link.name)
    snapshot = Snapshot(link.step, str(link.result_state), link.name, place, files)

    def other() -> Conflict:
        return Conflict(
            "the step is there with other content",
            file=link.name,
            step=link.step,
            expected=f"{place.stat().st_size} bytes as in the source",
            found="other bytes",
            hint=f"deltactl log {quote(dest.url)}",
        )

    return put_snapshot(dest, snapshot, other)[1]
