"""Waiting for an answer that may never come, with a look now and then at who could still give it.

vLLM answers none of the requests that are open when its engine dies. But ``/health`` says so at
once; some seconds later vLLM closes its port, and waits for those requests for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from deltactl.core.threads import start

T = TypeVar("T")

EVERY = 1.0  # seconds between two looks
_SURE = 2  # looks in a row that find nobody: a proxy may err once


class Gone(Exception):
    """Nobody is left who could answer."""


def beside(work: Callable[[], T], gone: Callable[[], bool]) -> T:
    """What ``work`` returns or raises. Raises Gone once ``gone`` has been true twice in a row; then
    ``work`` is left to itself, in a thread that nobody waits for."""
    done = start(work, "deltactl-request")
    signs = 0
    while not wait([done], EVERY).done:
        signs = signs + 1 if gone() else 0
        if signs == _SURE and not done.done():
            raise Gone
    return done.result()
