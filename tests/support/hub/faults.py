"""What can be made to go wrong, and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Fault:
    """One way to fail on a route (see the names in routes.py).

    ``times``: how often; None for ever. The rest says how: ``status`` with ``headers`` and
    ``body``, instead of an answer; ``drop`` the connection without one; ``hang`` until the
    stand-in stops; or answer, but send half of the body and close (``cut``), change one bit of it
    (``flip``), send it a few bytes at a time (``trickle``), or send ``instead`` of it.
    ``failures``: why all of a batch fails. ``meanwhile`` is called before the request is handled.
    """

    route: str
    times: int | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "told to fail"}'
    drop: bool = False
    hang: bool = False
    cut: bool = False
    flip: bool = False
    trickle: bool = False
    instead: bytes | None = None
    failures: str | None = None
    meanwhile: Callable[[], None] | None = None


NO_FAULT = Fault("", 0)


class Faults:
    """The faults that are set, first come first served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def take(self, route: str) -> Fault:
        """The fault that this request meets, if any."""
        with self._lock:
            for fault in self._faults:
                if fault.route == route and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return NO_FAULT
