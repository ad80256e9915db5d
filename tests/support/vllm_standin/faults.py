"""What can be made to go wrong with a request, and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

When = Literal["before", "after"]
How = Literal["error", "hang", "drop", "kill", "die", "late", "garbage"]


@dataclass
class Fault:
    """One way for requests to ``route`` to fail: a path, or ``rpc:METHOD`` of /collective_rpc.

    ``when``: before the request is carried out, or after. ``how``: an ``error`` of status 500; no
    answer until the client leaves (``hang``), or until ``release`` is called and then it is carried
    out all the same (``late``, for before alone); the connection ends (``drop``); the server dies
    (``kill``), or its engine does and the request hangs (``die``); an answer that is no JSON
    (``garbage``). ``times``: how often, None for ever; ``after_calls``: that many requests are
    spared first. ``meanwhile`` is called before anything.
    """

    route: str
    when: When = "before"
    how: How | None = "error"
    times: int | None = 1
    after_calls: int = 0
    status: int = 500
    body: bytes = b'{"error": {"message": "told to fail", "code": 500}}'
    meanwhile: Callable[[], None] | None = None


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

    def take(self, route: str) -> Fault | None:
        """The fault that this request meets, if any."""
        with self._lock:
            for fault in self._faults:
                if fault.route != route or fault.times == 0:
                    continue
                if fault.after_calls:
                    fault.after_calls -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None
