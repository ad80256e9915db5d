"""Where a command's result, messages, errors and progress go.

The result goes to stdout: lines for people, one JSON object with ``--json``, nothing with
``--quiet``. Everything else goes to stderr, and progress only where that is a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any, Literal

import typer

from deltactl.cli.interface.text import printable
from deltactl.core.errors import DeltactlError
from deltactl.core.facts import as_json
from deltactl.core.progress import Progress, silent

Mode = Literal["human", "json", "quiet"]

_LOGGER = logging.getLogger("deltactl")
_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_WIDE = 80  # columns of a terminal, with fewer of which a whole bar would wrap
_REDRAW = 0.1  # seconds between two looks of the progress bar


class Output:
    """One command's streams, in one of three modes."""

    def __init__(self) -> None:
        self.mode: Mode = "human"
        self._stdout: IO[str] | None = None  # sys.stdout, unless it is kept for the result
        self._quiet = False
        self._answered = False
        self._handler = _Logged(self)

    def configure(self, *, json: bool, quiet: bool) -> None:
        """Take up ``--json`` and ``--quiet``; with both, JSON without progress."""
        self.mode = "json" if json else "quiet" if quiet else "human"
        self._quiet = quiet

    @contextmanager
    def kept_for_result(self) -> Iterator[None]:
        """With ``--json``, for the time of the block: what libraries print goes to stderr, so that
        stdout holds one JSON object and nothing else."""
        if self.mode != "json":
            yield
            return
        self._stdout = sys.stdout
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            self._stdout = None

    def result(
        self,
        document: Mapping[str, Any],
        lines: Callable[[], Iterable[str]],
        *,
        stream: IO[str] | None = None,
    ) -> None:
        """Print what the command found: ``document`` with ``--json``, else ``lines()``.

        ``stream``: where the lines go if not to stdout, because that carries something else.
        """
        self._answered = True
        if self.mode == "json":
            print(json.dumps(document, allow_nan=False), file=self._stdout or sys.stdout)
        elif self.mode == "human":
            for line in lines():
                print(printable(line), file=stream or sys.stdout)

    def warn(self, text: str) -> None:
        """Say on stderr what the user has to know though the command goes on; also with --quiet."""
        self._say("warning:", "yellow", text)

    def note(self, level: int, text: str) -> None:
        """Say what the library logged."""
        if level >= logging.WARNING:
            self.warn(text)
        else:
            self._say("info:" if level >= logging.INFO else "debug:", "blue", text)

    def fault(self, error: DeltactlError, *, hint: bool = False) -> None:
        """Say on stderr what is wrong, in the midst of a command that goes on to its own result."""
        self._say("error:", "red", str(error))
        if hint and error.hint:
            self._say("hint:", "cyan", error.hint)

    def failure(self, error: DeltactlError, code: int) -> None:
        """Say why the command ends: on stderr, and as its one JSON object with ``--json``."""
        if self.mode == "json" and not self._answered:
            self.result({"error": {**as_json(error), "exit_code": code}}, list)
        self.fault(error, hint=True)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """For the time of the block what the library logs at WARNING or above is a warning, and
        more as ``log`` asks for."""
        before = _LOGGER.handlers[:], _LOGGER.level
        _LOGGER.addHandler(self._handler)
        try:
            yield
        finally:
            for handler in _LOGGER.handlers:
                if handler not in before[0]:
                    handler.close()
            _LOGGER.handlers[:] = before[0]
            _LOGGER.setLevel(before[1])  # and not by hand: what is enabled is remembered

    def log(self, verbose: int, file: Path | None) -> None:
        """Say on stderr what is done, with 2 also each request; write all of it to a file, in which
        what is there stays. Raises OSError for a file that cannot be written."""
        level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
        self._handler.setLevel(level)
        if file is not None:
            written = logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
            written.setFormatter(logging.Formatter(_LINE))
            _LOGGER.addHandler(written)
            level = logging.DEBUG
        _LOGGER.setLevel(level)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress bar on stderr for the time of the block, if anybody is there to see it."""
        if self._quiet or not _steerable(sys.stderr):
            yield silent
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            ProgressColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = _console()
        columns: list[ProgressColumn] = [TextColumn("{task.description}")]
        if console.width < _WIDE:
            columns += [BarColumn(None), TaskProgressColumn()]
        else:
            columns += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
        with Progress(*columns, console=console, transient=True) as bars:
            yield _throttled(bars)

    def _say(self, label: str, colour: str, text: str) -> None:
        if _steerable(sys.stderr) and not _no_colour():
            label = typer.style(label, fg=colour, bold=True)
        sys.stdout.flush()  # so that the two streams keep their order on one terminal
        print(label, printable(text), file=sys.stderr)


class _Logged(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        self._out.note(record.levelno, record.getMessage())


def _steerable(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that takes more than plain lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _no_colour() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def _console() -> Any:
    """Rich on stderr. Its NO_COLOR keeps bold and dim; without a colour system there are none."""
    from rich.console import Console

    return Console(stderr=True, color_system=None if _no_colour() else "auto")


def _throttled(bars: Any) -> Progress:
    """Pass on a call now and then: the library calls for each megabyte, a bar is costly to draw."""
    tasks: dict[str, Any] = {}
    drawn = 0.0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if what in tasks and done < total and now - drawn < _REDRAW:
            return
        drawn = now
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    return progress
