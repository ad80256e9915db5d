"""What nobody used for long in this machine's cache, and what dead processes left there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from deltactl.core.errors import DeltactlError
from deltactl.files.cache import cache_root
from deltactl.files.leftovers import discard, leftovers, measure
from deltactl.files.temporary import lock_now, remove
from deltactl.ops.clean import AT_IT, OLDER_THAN, TOUCHED, CleanReport, Item, item_of, refused

_STAYS = ("lock", "url")
"""What a place keeps, so that whoever waits for its lock gets the one that others see."""


def clean_cache(
    *, older_than: float = OLDER_THAN, dry_run: bool = False, now: float | None = None
) -> CleanReport:
    """Remove from the cache what nobody holds and nobody used for ``older_than`` seconds.

    That is temporaries, the tips of chains, and what servers and trainers keep there: all of it is
    made again when it is wanted. ``now``: seconds since 1970, by default by this machine's clock.
    """
    now = time.time() if now is None else now
    root, errors = cache_root(), list[DeltactlError]()
    items = []
    for item in _found(root, now):
        if item.age is not None and item.age <= older_than:
            item = item.kept(TOUCHED)
        elif not dry_run:
            try:
                item = _cleaned(item, now - older_than)
            except OSError as error:
                item = refused(item, error, errors)
        items.append(item)
    return CleanReport(str(root), older_than, dry_run, tuple(items), tuple(errors))


def _found(root: Path, now: float) -> Iterator[Item]:
    known = set()
    for path in _entries(root):
        with contextlib.suppress(FileNotFoundError):
            size, touched = measure(path)
            known.add(path)
            yield Item("cache", str(path), None, size, now - touched, what=path)
    for found in leftovers(root):
        if not known & {found.key, *found.key.parents}:
            yield item_of(found, now)


def _entries(root: Path) -> Iterator[Path]:
    """Places that hold something, and what lies in directories that nobody locks."""
    for directory in sorted(path for path in root.glob("*/*") if path.is_dir()):
        held = [path for path in directory.iterdir() if path.name not in _STAYS]
        if any(directory.rglob("lock")):
            yield from [directory] if held else []
        else:
            yield from (path for path in held if not path.name.startswith("."))


def _cleaned(item: Item, before: float) -> Item:
    if item.kind != "cache":
        return item.after(discard(item.what.key, before))
    path: Path = item.what
    if not path.is_dir() or not any(path.rglob("lock")):
        remove(path)
        return item
    with contextlib.ExitStack() as stack:
        for lock in path.rglob("lock"):
            file = stack.enter_context(open(lock))
            if lock_now(file.fileno(), lock) is False:
                return item.kept(AT_IT)
        if measure(path)[1] >= before:
            return item.kept(TOUCHED)
        for entry in path.iterdir():
            if entry.name not in _STAYS:
                remove(entry)
    return item
