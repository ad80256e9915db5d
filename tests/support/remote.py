"""A bucket as if behind a network, in a local directory, with the faults that a test asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from deltactl.bucket.local import LocalBucket
from deltactl.chain.store import Object
from deltactl.core.errors import DeltactlError, NotFound, Transient

Fault = Callable[[str, int, bytes], bytes]
"""``fault(name, start, data)``: what a read gives in place of ``data``, or an error it raises."""


class RemoteBucket(LocalBucket):
    """Nothing can be mapped; objects come in ranges of ``part_bytes``, or whole if that is None.

    ``reads``: name, start and stop of every range asked for; ``fetches``: every object fetched as
    a whole. ``faults`` are applied in turn to what is read or fetched.
    """

    def __init__(self, root: Path, part_bytes: int | None = 1000, jobs: int = 4) -> None:
        super().__init__(root, jobs)
        self._part_bytes = part_bytes
        self.faults: list[Fault] = []
        self.reads: list[tuple[str, int, int]] = []
        self.fetches: list[str] = []
        self.puts: list[str] = []
        self.lists = 0
        self.at_once = 0
        self.most_at_once = 0
        self._counting = threading.Lock()

    @property
    def part_bytes(self) -> int | None:
        return self._part_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes of all ranges asked for, as far as the objects have them."""
        sizes = {item.name: item.size for item in super().list()}
        return sum(min(stop, sizes[name]) - start for name, start, stop in self.reads)

    def forget(self) -> None:
        """Begin to count anew."""
        self.reads, self.fetches, self.puts, self.lists = [], [], [], 0

    def path(self, name: str) -> Path | None:
        return None

    def list(self) -> Iterator[Object]:
        self.lists += 1
        return super().list()

    def read(self, name: str, start: int, stop: int) -> bytes:
        with self._counting:
            self.reads.append((name, start, stop))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            data = super().read(name, start, stop)
            for fault in self.faults:
                data = fault(name, start, data)
        finally:
            with self._counting:
                self.at_once -= 1
        return data

    def fetch(self, name: str, target: Path) -> None:
        self.fetches.append(name)
        data = super().read(name, 0, 1 << 30)
        for fault in self.faults:
            data = fault(name, 0, data)
        with open(target, "xb") as file:
            file.write(data)

    def put(self, name: str, source: Path) -> bool:
        self.puts.append(name)
        return super().put(name, source)


def failing(times: int, error: Callable[[], DeltactlError] | None = None, on: str = "") -> Fault:
    """The first ``times`` reads of objects whose names contain ``on`` raise (Transient)."""
    left, lock = [times], threading.Lock()

    def fault(name: str, start: int, data: bytes) -> bytes:
        with lock:
            if on in name and left[0] > 0:
                left[0] -= 1
                raise error() if error else Transient("the connection was reset", file=name)
        return data

    return fault


def dying(after: int, on: str = "", error: Callable[[], DeltactlError] | None = None) -> Fault:
    """From the read number ``after`` on, reads of such objects raise (Transient)."""
    done, lock = [0], threading.Lock()

    def fault(name: str, start: int, data: bytes) -> bytes:
        with lock:
            if on in name:
                done[0] += 1
                if done[0] > after:
                    raise error() if error else Transient("the connection was reset", file=name)
        return data

    return fault


def vanished(name: str) -> Fault:
    """The object is gone since it was listed and its header was read."""

    def fault(asked: str, start: int, data: bytes) -> bytes:
        if asked == name:
            raise NotFound("no such object", file=asked)
        return data

    return fault


def flipping(on: str, at: int) -> Fault:
    """A bit of byte ``at`` of such an object is wrong in every answer."""

    def fault(name: str, start: int, data: bytes) -> bytes:
        if on in name and start <= at < start + len(data):
            data = bytearray(data)
            data[at - start] ^= 4
        return bytes(data)

    return fault


def meeting(bucket: RemoteBucket) -> Fault:
    """No answer comes before two requests have been under way at once."""
    met = threading.Event()

    def fault(name: str, start: int, data: bytes) -> bytes:
        if bucket.at_once > 1:
            met.set()
        assert met.wait(60), "no other request is under way"
        return data

    return fault


def cutting(on: str, size: int) -> Fault:
    """Such an object ends after ``size`` bytes."""

    def fault(name: str, start: int, data: bytes) -> bytes:
        return data[: max(0, size - start)] if on in name else data

    return fault
