"""Programs and compiled code that some tests need beside Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from deltactl.core import native
from deltactl.core.native import guard

REQUIRED = "DELTACTL_TEST_REQUIRE_TOOLS"
"""If this is set in the environment, as in .ci/run, a missing program fails the test."""


def need(name: str) -> str:
    """The path of a program, on the PATH or beside the interpreter; skips the test where it is not
    installed."""
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        _missing(f"{name} is not installed")
    return path


def need_kernel() -> native.Kernel:
    """The compiled inner loops; skips the test where they were not compiled."""
    if native.KERNEL is None:
        _missing("deltactl was installed without its kernel")
    return native.KERNEL


def need_guard() -> guard.Guard:
    """The compiled signal handler; skips the test where it was not compiled."""
    if guard.GUARD is None:
        _missing("deltactl was installed without its guard")
    return guard.GUARD


def _missing(what: str) -> NoReturn:
    if os.environ.get(REQUIRED):
        pytest.fail(what)
    pytest.skip(what)
