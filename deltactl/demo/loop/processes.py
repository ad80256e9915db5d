"""The loop's processes: what starts them, hears from them and ends them.

A part writes an event a line, as JSON, to the pipe that is its standard output, and lives no longer
than its standard input is open. The pipes lead to the process that started it and to no other part:
they carry what people want to know, never what the loop needs to go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from deltactl.core import errors
from deltactl.core.errors import DeltactlError

Event = dict[str, Any]

GRACE = 20.0  # seconds between the request to end and the end
_TAIL = 2000  # bytes of a log that are shown
_events: IO[str] | None = None
_telling = threading.Lock()


# In a part.


def leashed() -> None:
    """Make this process a part: it ends with its standard input, and tells events alone on its
    standard output. Whatever else is printed goes to the log."""
    global _events
    _events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        os._exit(0)  # whatever it is at: what it leaves behind is whole at every moment

    threading.Thread(target=wait, daemon=True).start()


def tell(**event: Any) -> None:
    """Say what has happened. From any thread."""
    assert _events is not None, "leashed() comes first"
    with _telling, contextlib.suppress(BrokenPipeError):
        print(json.dumps(event, allow_nan=False), file=_events, flush=True)


def part(work: Callable[[dict[str, Any]], None]) -> None:
    """The main function of a part: ``work`` on the settings in its argument. What it raises is the
    last event."""
    leashed()
    try:
        work(json.loads(sys.argv[1]))
    except DeltactlError as error:
        tell(event="failed", kind=type(error).__name__, hint=error.hint, **error.facts())
        raise SystemExit(1) from None


# In the process that starts them.


class Processes:
    """The processes of a loop, and the events of all of them in one queue."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._events: queue.SimpleQueue[tuple[str, Event | None]] = queue.SimpleQueue()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command as the part ``name``. Its standard error goes to ``name.log``."""
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if environment is None else dict(environment),
                start_new_session=True,  # a terminal's interrupt is for the starter to act on
            )
        self._running[name] = process
        threading.Thread(target=self._hear, args=(name, process), daemon=True).start()
        return process

    def start_module(self, name: str, module: str, settings: Mapping[str, Any]) -> None:
        """Start a module as the part ``name``; ``settings`` are its one argument, as JSON."""
        self.start(name, [sys.executable, "-m", module, json.dumps(dict(settings))])

    def pids(self) -> dict[str, int]:
        """The process that each part began as, by name."""
        return {name: process.pid for name, process in self._running.items()}

    def _hear(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a library's own words
                event = json.loads(line)
                if isinstance(event, dict):
                    self._events.put((name, event))
        process.wait()
        self._events.put((name, None))

    def hear(self, seconds: float) -> tuple[str, Event] | None:
        """The next event and who tells it; None if there is none in time.

        Raises what a part failed with; a part that ended without a word has failed too, unless it
        told that it is done.
        """
        try:
            name, event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if event is None:
            status = self._running[name].returncode
            if status:
                raise self._ended(name, status)
            return name, {"event": "ended"}
        if event.get("event") == "failed":
            raise _failure(event)
        return name, event

    def _ended(self, name: str, status: int) -> DeltactlError:
        log = self._logs / f"{name}.log"
        with contextlib.suppress(OSError):
            tail = log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            last = tail.splitlines()[-1] if tail else "nothing"
            return DeltactlError(
                f"the loop's {name} ended by itself, with status {status}",
                file=log,
                found=last,
                hint="deltactl demo --loop DIR keeps the logs",
            )
        return DeltactlError(f"the loop's {name} ended by itself", found=f"status {status}")

    def end(self) -> None:
        """End all parts, the last one first, and wait for each."""
        for process in reversed(self._running.values()):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in reversed(self._running.values()):
            try:
                process.wait(2 * GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def parts(logs: Path) -> Iterator[Processes]:
    """Parts that are gone when the block is left."""
    logs.mkdir(parents=True, exist_ok=True)
    started = Processes(logs)
    try:
        yield started
    finally:
        started.end()


def _failure(event: Mapping[str, Any]) -> DeltactlError:
    kind = getattr(errors, str(event.get("kind")), DeltactlError)
    if not (isinstance(kind, type) and issubclass(kind, DeltactlError)):
        kind = DeltactlError
    keys = ("file", "tensor", "step", "expected", "found", "hint")
    return kind(str(event.get("what")), **{key: event.get(key) for key in keys})


# A command that knows nothing of leashes, on one.


def leash(command: Sequence[str]) -> int:
    """Run ``command`` until it ends or the standard input does; then all that it started is gone.

    Orphans below it become this process's children, so that none is lost. Linux only; elsewhere
    what the command leaves behind stays.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=wait, daemon=True).start()
    status = child.wait()
    _end_the_rest()
    return status if status >= 0 else 128 - status


def _end_the_rest() -> None:
    while True:
        found: list[int] = []
        for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(leash(sys.argv[1:]))
