"""A mutant's tests are run in a copy of the checkout, and it is killed where one of them fails."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
_PATIENCE = 4  # times what the tests take without a fault
_LEAST = 60.0  # seconds that they are given anyhow
_FIRST = 1800.0  # seconds for the tests without a fault
_PASSED, _NO_TESTS = 0, (4, 5)  # statuses of pytest; all others are failures or a crash


class Useless(Exception):
    """Tests that cannot tell anything: they fail without a fault, or there are none."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: ``killed``, ``survived``, or ``hung`` until it was ended. ``by``:
    the test that failed."""

    what: str
    seconds: float
    by: str = ""

    @property
    def survived(self) -> bool:
        return self.what == "survived"


class Copy:
    """A copy of the checkout at ``root``, in ``place``, in which one test run goes on at a time."""

    def __init__(self, place: Path, root: Path = ROOT) -> None:
        self._root = root
        self._place = Path(shutil.copytree(root, place, ignore=_LEFT_OUT))

    def without_fault(self, tests: tuple[str, ...]) -> float:
        """The seconds that the tests take. Raises Useless where they tell nothing."""
        status, seconds, said = self._run(tests, _FIRST)
        if status != _PASSED:
            raise Useless(f"without a fault the tests {' '.join(tests)} fail:\n{said}")
        return seconds

    def fate(self, module: str, mutant: Mutant, tests: tuple[str, ...], usual: float) -> Fate:
        """What the tests, which take so many seconds else, say of a mutant of ``module``."""
        path = self._place / module
        source = path.read_bytes()
        try:
            self._write(path, mutant.applied(source))
            status, seconds, said = self._run(tests, _LEAST + _PATIENCE * usual)
        finally:
            self._write(path, source)
        if status in _NO_TESTS:
            raise Useless(f"of {' '.join(tests)} no test was run:\n{said}")
        if status is None:
            return Fate("hung", seconds)
        if status == _PASSED:
            return Fate("survived", seconds)
        return Fate("killed", seconds, " ".join(re.findall(r"^(?:FAILED|ERROR) (.+)", said, re.M)))

    def _write(self, path: Path, source: bytes) -> None:
        """What was compiled is known by a time in seconds and a size, and both may be the same."""
        path.write_bytes(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def _run(self, tests: tuple[str, ...], limit: float) -> tuple[int | None, float, str]:
        """pytest's status, None after the limit; how many seconds it took; the end of its words."""
        began, status = monotonic(), None
        command = [sys.executable, "-m", "tests.support.supervised", *_pytest(tests)]
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(
                command,
                cwd=self._place,
                env=_environment(self._place),
                stdin=subprocess.PIPE,  # all that was started ends with it
                stdout=said,
                stderr=said,
            ) as process,
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            said.seek(0)
            return status, monotonic() - began, said.read()[-2000:].decode(errors="replace")


def _pytest(tests: tuple[str, ...]) -> list[str]:
    quiet = ["-q", "--no-header", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return [sys.executable, "-m", "pytest", *quiet, *tests]


def _environment(place: Path) -> dict[str, str]:
    """The copy comes before what is installed; property tests draw the same examples each time."""
    return {**os.environ, "PYTHONPATH": str(place), "CI": "true", "PYTHONHASHSEED": "0"}
