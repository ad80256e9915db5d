"""How long a server may keep a client waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. ``connect``: for a connection; ``read``: for a reply to begin, counted from when
    the request does, and between two pieces of it; ``whole``: for a request and its reply in all.
    """

    connect: float = 10
    read: float = 90
    whole: float = 300


TIMEOUTS = Timeouts()
"""A piece of 8 MiB takes longer only below 100 kB a second."""
