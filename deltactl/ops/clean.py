"""What processes that died left in a bucket or a directory: found, and removed.

Nothing tells work in hand from what is left behind but its age and, on this machine, a lock. So
nothing goes that was touched within the age, or that belongs to the chain's newest step or a later
one, where a publisher may be at work. And as that may err, whoever puts a link of several files
looks at them before and after it puts the index (chain/transfer/put.py), and this looks for an
index before and after it removes any.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from deltactl.chain.chain import Chain
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket, Object
from deltactl.core.errors import Conflict, DeltactlError, NotAllowed, NotFound
from deltactl.files.temporary import Outcome, Unfinished
from deltactl.format.link_names import index_of, step_of

OLDER_THAN = 24 * 3600.0
"""Seconds that a left-over is left alone for."""

TOUCHED = "it was touched within the age"
AT_IT = "somebody is at it"

_PART = re.compile(r"(?:delta|model)(?:-\d{5}-of-\d{5}(?:-[^/]+)?)?\.safetensors")


@dataclass(frozen=True, slots=True)
class Item:
    """One left-over. ``kind``: unfinished anchor, unfinished delta, parts of no anchor, parts of no
    delta, cache, or as Unfinished has it; ``name``: where it is; ``age``: seconds since it was last
    touched, None where that is not known. ``action``: remove, or give back where it is the only
    copy of what had a name, or keep, and then ``why``."""

    kind: str
    name: str
    step: int | None
    bytes: int
    age: float | None
    action: str = "remove"
    why: str | None = None
    objects: tuple[str, ...] = ()
    what: Any = field(default=None, compare=False, repr=False)

    def kept(self, why: str) -> Item:
        """The same, to be left alone."""
        return replace(self, action="keep", why=why)

    def after(self, outcome: Outcome) -> Item:
        """The same, once that has become of it."""
        if outcome == "removed":
            return self
        if outcome == "given back":
            return replace(self, action="give back")
        at_it = outcome == "in use"
        return self.kept(AT_IT if at_it else "it may be the only copy of what it replaced")


@dataclass(frozen=True, slots=True)
class CleanReport:
    """``items``: all that was found; ``errors``: what could not be looked at, or removed."""

    place: str
    older_than: float
    dry_run: bool
    items: tuple[Item, ...]
    errors: tuple[DeltactlError, ...] = ()

    @property
    def cleaned(self) -> list[Item]:
        """What is no left-over any more, or would be none."""
        return [item for item in self.items if item.action != "keep"]

    @property
    def kept(self) -> list[Item]:
        """What is left alone."""
        return [item for item in self.items if item.action == "keep"]

    @property
    def bytes(self) -> int:
        """Of what was removed, or would be."""
        return sum(item.bytes for item in self.cleaned if item.action == "remove")


def clean_bucket(
    bucket: Bucket,
    *,
    older_than: float = OLDER_THAN,
    dry_run: bool = False,
    now: float | None = None,
) -> CleanReport:
    """Remove from a bucket what was left behind and not touched for ``older_than`` seconds.

    Of a directory also kept downloads, and what lies beside it under its own name. ``now``: seconds
    since 1970, by default by this machine's clock. Never takes links, nor objects that no push
    makes. Raises what the bucket raises where it cannot be listed.
    """
    return _Cleaning(bucket, older_than, dry_run, time.time() if now is None else now).run()


def leftovers_of(bucket: Bucket, chain: Chain) -> CleanReport:
    """What ``clean_bucket`` would do, of a chain that has just been read."""
    return _Cleaning(bucket, OLDER_THAN, True, time.time()).found(chain)


class _Cleaning:
    def __init__(self, bucket: Bucket, older_than: float, dry_run: bool, now: float) -> None:
        self._bucket, self._older_than, self._dry_run = bucket, older_than, dry_run
        self._now, self._before = now, now - older_than
        self._errors: list[DeltactlError] = []

    def run(self) -> CleanReport:
        unfinished = self._unfinished()
        report = self.found(self._chain(unfinished), unfinished)
        if not self._dry_run:
            items = [self._clean(item) for item in report.items]
            self._look_back(items)
            report = replace(report, items=tuple(items), errors=tuple(self._errors))
        return report

    def _chain(self, unfinished: Sequence[Unfinished]) -> Chain:
        """None that is known where a part may not be looked into; then no step's things go. What
        is to be a directory, and is none yet, may have something beside it."""
        try:
            return read_chain(self._bucket)
        except NotAllowed as error:
            self._errors.append(error)
        except NotFound:
            if not unfinished:
                raise
        return Chain((), url=self._bucket.url)

    def found(self, chain: Chain, unfinished: Sequence[Unfinished] | None = None) -> CleanReport:
        unfinished = self._unfinished() if unfinished is None else unfinished
        items = [*_links(chain, unfinished, self._now)]
        items += [
            item_of(i, self._now, None if i.name is None else step_of(i.name)) for i in unfinished
        ]
        judged = tuple(self._judged(item, chain.tip) for item in items)
        return CleanReport(
            self._bucket.url, self._older_than, self._dry_run, judged, tuple(self._errors)
        )

    def _unfinished(self) -> list[Unfinished]:
        try:
            return [*self._bucket.unfinished()]
        except DeltactlError as error:  # to see these may take another permission
            self._errors.append(error)
            return []

    def _judged(self, item: Item, tip: int | None) -> Item:
        if item.action == "keep":
            return item
        if item.step is not None and (tip is None or item.step >= tip):
            return item.kept("no later step is there yet: somebody may be publishing it")
        if item.age is None:
            return item.kept("the store does not say how old it is")
        if item.age <= self._older_than:
            return item.kept(TOUCHED)
        return item

    def _clean(self, item: Item) -> Item:
        if item.action == "keep":
            return item
        try:
            if item.what is None:
                return self._remove_objects(item)
            outcome = self._bucket.discard(item.what, self._before)
        except DeltactlError as error:
            self._errors.append(error)
            return item.kept(error.what)
        except OSError as error:
            return refused(item, error, self._errors)
        return item.after(outcome)

    def _remove_objects(self, item: Item) -> Item:
        """Remove a link's objects, unless they are not as they were, or have an index by now."""
        there = {found.name: found for found in self._bucket.list()}
        index = index_of(item.name)
        if item.kind.startswith("unfinished") and index in there:
            return item.kept("it was finished meanwhile")
        for name in item.objects:
            touched = there[name].modified if name in there else 0.0
            if touched is None or touched >= self._before:
                return item.kept("it was touched meanwhile")
        for name in item.objects:
            self._bucket.delete(name)
        return item

    def _look_back(self, items: Iterable[Item]) -> None:
        """Somebody may have finished a link in the moment before its files went: say so."""
        gone = [i for i in items if i.action == "remove" and i.kind.startswith("unfinished")]
        if not gone:
            return
        there = {found.name for found in self._bucket.list()}
        for item in gone:
            if index_of(item.name) in there:
                self._errors.append(
                    Conflict(
                        "somebody finished the link while its files were removed",
                        file=index_of(item.name),
                        step=item.step,
                        hint="push the step again while its index is away: remove that object "
                        f"first; then deltactl verify {quote(self._bucket.url)}",
                    )
                )


def refused(item: Item, error: OSError, errors: list[DeltactlError]) -> Item:
    """The item as kept, since the system did not let it go; noted among the errors."""
    why = (error.strerror or str(error)).lower()
    errors.append(NotAllowed(f"it cannot be removed: {why}", file=item.name))
    return item.kept(why)


def item_of(found: Unfinished, now: float, step: int | None = None) -> Item:
    """What a bucket or a directory lists, as an item that is to be removed or given back."""
    action = "give back" if found.kind == "old content" else "remove"
    age = now - found.touched
    return Item(found.kind, found.place, step, found.size, age, action, what=found)


def _links(chain: Chain, unfinished: Iterable[Unfinished], now: float) -> Iterator[Item]:
    """Links that were never finished, and parts that no index names."""
    complete = {link.directory for link in chain.links if link.directory is not None}
    known = {
        item.name.removeprefix(str(link.directory))
        for link in chain.links
        if link.directory is not None
        for item in link.objects
    }
    groups: dict[str, list[Object]] = {}
    for item in chain.unnamed:
        groups.setdefault("/".join(item.name.split("/")[:2]), []).append(item)
    under_way = [item for item in unfinished if item.name is not None]
    for directory, objects in sorted(groups.items()):
        kind = directory.split("s/")[0]
        what = f"parts of no {kind}" if f"{directory}/" in complete else f"unfinished {kind}"
        times = [item.modified for item in objects]
        times += [i.touched for i in under_way if str(i.name).startswith(f"{directory}/")]
        dated = [when for when in times if when is not None]
        found = Item(
            what,
            directory,
            step_of(objects[0].name),
            sum(item.size for item in objects),
            now - max(dated) if len(dated) == len(times) else None,
            objects=tuple(item.name for item in objects),
        )
        names = [item.name.removeprefix(f"{directory}/") for item in objects]
        foreign = [name for name in names if name not in known and not _PART.fullmatch(name)]
        if foreign:
            found = found.kept(f"no push of this chain makes such a file: {foreign[0]}")
        yield found
