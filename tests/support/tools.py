"""Programs that some tests need beside Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

REQUIRED = "DELTACTL_TEST_REQUIRE_TOOLS"
"""If this is set in the environment, as in .ci/run, a missing program fails the test."""


def need(name: str) -> str:
    """The path of a program, on the PATH or beside the interpreter; skips the test where it is not
    installed."""
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return path
