"""Have a server sum its live weights, and wait for it."""

from __future__ import annotations

import threading
from time import monotonic

from deltactl.core.errors import DeltactlError, Transient
from deltactl.server.http.routes import Server
from deltactl.server.state import EngineState

PATIENCE = 10
"""Times the timeout, for work in a server that shows no progress: hashing a model, fetching one."""

_FIRST_POLL, _LONGEST_POLL = 0.01, 0.5  # seconds


def summed(server: Server, stop: threading.Event) -> EngineState:
    """What the server says once all its live weights were summed: which state they are, and in
    ``audit`` what differs from the one that it took them for. Where its parameters have been
    exchanged it says that its weights are to be identified anew.

    Raises what kept it from that, what Server raises, and as Patience.
    """
    engine, wait = server.engine("deltactl_audit"), Patience(server, stop)
    while (audit := engine.audit) is not None and audit.phase == "running":
        wait.a_while()
        engine = server.engine("deltactl_audit_seal")
    if engine.mapped is not None and (audit is None or audit.phase != "done"):
        raise engine.error or DeltactlError("the server could not look at its weights")
    return engine


class Patience:
    """Waits between two looks, for no longer than an answer may take."""

    def __init__(self, server: Server, stop: threading.Event) -> None:
        self._server, self._stop, self._pause = server, stop, _FIRST_POLL
        self._until = monotonic() + PATIENCE * server.timeout

    def a_while(self) -> None:
        """Raises Transient once it has been too long, DeltactlError where it was interrupted."""
        if self._stop.wait(self._pause):
            raise DeltactlError("interrupted", file=self._server.url)
        self._pause = min(self._pause * 1.5, _LONGEST_POLL)
        if monotonic() > self._until:
            raise hangs(self._server)


def hangs(server: Server) -> Transient:
    """The error for work in a server that has shown no progress for too long."""
    found = f"no progress in {PATIENCE * server.timeout:g} seconds"
    hint = "give it longer with --timeout"
    return Transient("the server's work hangs", file=server.url, found=found, hint=hint)
