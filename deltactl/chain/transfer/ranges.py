"""Objects fetched into files: many at once, in ranges, checked as they come, gone on with later.

An object is written to a partial file, each range at its offset, and a journal beside it says which
ranges are there. Once it is whole and checked it gets its own name. So what a killed process has
fetched is of use to the next one, which believes none of it: what is there is checked from the
first byte on, and fetched anew if that fails. Memory is one range for each request under way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from deltactl.chain.store import Bucket
from deltactl.core.errors import DeltactlError, Malformed, NotFound
from deltactl.core.progress import Meter
from deltactl.core.threads import TaskQueue
from deltactl.files.atomic import write_at
from deltactl.files.downloads import UNUSABLE
from deltactl.format.checker import Checker, Expected, pieces_of

_PIECE = 1 << 20
_RANGE = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object to fetch to ``target``, and what it has to be. ``partial``: the file that it grows
    in, beside which its journal is."""

    expected: Expected
    target: Path
    partial: Path

    @property
    def name(self) -> str:
        return str(self.expected.file)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.expected.size

    @property
    def journal(self) -> Path:
        return self.partial.with_name(self.partial.name + ".parts")


@dataclass(slots=True)
class Tally:
    """``bytes_fetched``: what came from the bucket, in so many ``requests``; ``bytes_resumed``:
    what an earlier run had fetched; ``faults``: by object, where they are gathered."""

    bytes_fetched: int = 0
    bytes_resumed: int = 0
    requests: int = 0
    faults: dict[str, list[DeltactlError]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, *, fetched: int = 0, resumed: int = 0, requests: int = 0) -> None:
        with self._lock:
            self.bytes_fetched += fetched
            self.bytes_resumed += resumed
            self.requests += requests


def transfer(
    bucket: Bucket, wanted: Iterable[Wanted], meter: Meter, tally: Tally, *, gather: bool = False
) -> None:
    """Fetch all objects. Raises what the bucket raises, OSError, and Malformed for the first wrong
    byte; with ``gather`` what is wrong with an object, or that it is gone, is a fault of the tally,
    and the others go on.
    """
    run = _Run(bucket, meter, tally, gather, TaskQueue(bucket.jobs))
    run.objects = [_Object(run, item) for item in wanted]
    run.tasks.add(item.begin for item in run.objects)
    try:
        run.tasks.run()
    finally:
        for item in run.objects:
            item.close()  # requests that hang yet find it closed when they end


@dataclass(slots=True)
class _Run:
    bucket: Bucket
    meter: Meter
    tally: Tally
    gather: bool
    tasks: TaskQueue
    objects: list[_Object] = field(default_factory=list)

    def again(self, wanted: Wanted) -> None:
        """Fetch an object from its first byte on."""
        self.objects.append(_Object(self, wanted, fresh=True))
        self.tasks.add([self.objects[-1].begin])


class _Object:
    """One object on its way. ``_over``: whether what still comes in is of no use any more."""

    def __init__(self, run: _Run, wanted: Wanted, fresh: bool = False) -> None:
        self._run, self._wanted, self._fresh = run, wanted, fresh
        self._checker = Checker(wanted.expected)
        self._lock = Lock()
        self._file = self._journal = -1
        self._there: dict[int, int] = {}  # ranges that are written and not checked: start to stop
        self._checked = 0  # bytes, from the first on
        self._checking = self._over = False
        self._resumed = 0
        self._ranges: Iterator[tuple[int, int]] = iter(())

    def begin(self) -> None:
        with self._faults():
            if not self._make_room():
                return
            if self._wanted.target.exists() and self._is_whole():
                return
            if self._run.bucket.part_bytes is None:
                self._fetch()
            else:
                self._begin_parts(self._run.bucket.part_bytes)

    def _make_room(self) -> bool:
        """Make the directories; False where nobody wants the object any more: what was removed
        with the rest must not come back."""
        with self._lock:
            if self._over:
                return False
            for path in (self._wanted.target, self._wanted.partial):
                path.parent.mkdir(parents=True, exist_ok=True)
            return True

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Let an error end the transfer, or only this object; but for one of a range that was still
        under way when the object's fate was known."""
        try:
            yield
        except (Malformed, NotFound) as error:
            if not self.close():
                return
            if not self._run.gather:
                raise
            self._run.tally.faults[self._wanted.name] = [error]

    # As a whole.

    def _is_whole(self) -> bool:
        """Whether an earlier run left the object whole; removes what is something else."""
        target, size = self._wanted.target, self._wanted.size
        if target.stat().st_size == size:
            self._feed_file(target)
            if not self._checker.faults:
                self._run.tally.add(resumed=size)
                self._run.meter.add(size)
                return True
        target.unlink()
        self._checker = Checker(self._wanted.expected)
        return False

    def _feed_file(self, path: Path) -> None:
        """Check a file from its first byte to its last."""
        for piece in pieces_of(path):
            self._checker.feed(piece)
        self._checker.finish()

    def _fetch(self) -> None:
        """Have the bucket fetch it: under a name that nobody else writes to, also later."""
        fresh = self._wanted.partial.with_name(f"{secrets.token_hex(8)}{UNUSABLE}")
        self._run.bucket.fetch(self._wanted.name, fresh)
        size = fresh.stat().st_size
        self._run.tally.add(fetched=size, requests=1)
        self._run.meter.add(min(size, self._wanted.size))
        if size != self._wanted.size:
            raise self._wanted.expected.wrong_size(size)
        self._feed_file(fresh)
        self._settle(fresh)

    # In parts.

    def _begin_parts(self, part_bytes: int) -> None:
        wanted = self._wanted
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if self._fresh else 0)
        with self._lock:
            if self._over:
                return
            self._file = os.open(wanted.partial, flags, 0o666)
            self._journal = os.open(wanted.journal, flags | os.O_APPEND, 0o666)
            gaps = self._look()
        self._run.tally.add(resumed=self._resumed)
        self._run.meter.add(self._resumed)
        self._ranges = (
            (start, min(start + part_bytes, stop))
            for begin, stop in gaps
            for start in range(begin, stop, part_bytes)
        )
        parts = sum(-(-(stop - start) // part_bytes) for start, stop in gaps)
        self._run.tasks.add([self._fetch_ranges] * min(parts, self._run.bucket.jobs))
        self._check()

    def _look(self) -> list[tuple[int, int]]:
        """Read the journal; returns the ranges that are missing."""
        held = min(os.fstat(self._file).st_size, self._wanted.size)
        raw = os.read(self._journal, os.fstat(self._journal).st_size)
        raw = raw[: len(raw) // _RANGE.size * _RANGE.size]
        at, gaps = 0, []
        for start, stop in sorted(_RANGE.iter_unpack(raw)):
            if not at <= start < stop <= held:  # nothing that this wrote
                continue
            if at < start:
                gaps.append((at, start))
            self._there[start] = at = stop
        if at < self._wanted.size:
            gaps.append((at, self._wanted.size))
        self._resumed = sum(stop - start for start, stop in self._there.items())
        return gaps

    def _fetch_ranges(self) -> None:
        """Fetch one range after the other, as others do at the same time."""
        with self._faults():
            while not self._over:
                with self._lock:
                    start, stop = next(self._ranges, (0, 0))
                if start == stop:
                    return
                self._fetch_range(start, stop)

    def _fetch_range(self, start: int, stop: int) -> None:
        while start < stop and not self._over:
            data = self._run.bucket.read(self._wanted.name, start, stop)
            self._run.tally.add(fetched=len(data), requests=1)
            if not 0 < len(data) <= stop - start:
                raise self._wanted.expected.wrong_size(start + len(data))
            self._arrived(start, data)
            start += len(data)

    def _arrived(self, start: int, data: bytes | memoryview) -> None:
        with self._lock:
            if self._over:
                return
            with _naming(self._wanted.partial):
                write_at(self._file, data, start)
            with _naming(self._wanted.journal):
                _append(self._journal, _RANGE.pack(start, start + len(data)))
            self._there[start] = start + len(data)
            self._run.meter.add(len(data))
        self._check()

    def _check(self) -> None:
        """Check what has come without a gap; one thread at a time, the others go on fetching."""
        with self._lock:
            if self._checking:
                return
            self._checking = True
        enough = False
        while not enough:
            piece = self._next_piece()
            if piece is None:
                return
            if piece:
                self._checker.feed(piece)
            else:
                self._checker.finish()
            goes_on = self._run.gather and not self._resumed
            enough = not piece or (bool(self._checker.faults) and not goes_on)
        self._settle(self._wanted.partial)

    def _next_piece(self) -> bytes | None:
        """The next bytes to check, none at the object's end; None: they have not come yet."""
        with self._lock:
            if self._checked == self._wanted.size and not self._over:
                return b""  # and nobody else begins to check
            stop = self._there.get(self._checked)
            if self._over or stop is None:
                self._checking = False
                return None
            piece = os.pread(self._file, min(stop - self._checked, _PIECE), self._checked)
            if not piece:
                raise Malformed("somebody cut the file", file=self._wanted.partial)
            del self._there[self._checked]
            self._checked += len(piece)
            if self._checked < stop:
                self._there[self._checked] = stop
            return piece

    # The end.

    def _settle(self, path: Path) -> None:
        """Give the object its name, or deal with its faults."""
        faults = self._checker.faults
        with self._lock:
            if self._over:
                return
            if faults:
                path.unlink()
            else:
                os.rename(path, self._wanted.target)
            self._wanted.journal.unlink(missing_ok=True)
        if faults and not self._resumed and not self._run.gather:
            raise faults[0]
        self.close()
        if self._resumed and faults:  # perhaps it is only what was kept that is wrong
            waiting = sum(stop - start for start, stop in self._there.items())
            self._run.meter.add(-self._checked - waiting)
            self._run.tally.add(resumed=-self._resumed)
            self._run.again(self._wanted)
        elif faults:
            self._run.tally.faults[self._wanted.name] = faults

    def close(self) -> bool:
        """Let go of the files; whether they were not let go of before."""
        with self._lock:
            was_over, self._over = self._over, True
            for fd in (self._file, self._journal):
                if fd >= 0:
                    os.close(fd)
            self._file = self._journal = -1
        return not was_over


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an OSError name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _append(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
