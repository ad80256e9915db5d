"""Fixtures that the tests of several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from deltactl.core import native
from tests.support.tools import need_kernel

NOBODY = 65534


@pytest.fixture(scope="module", params=["kernel", "numpy"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with the compiled inner loops, and again as it is where there are none."""
    kernel = need_kernel() if request.param == "kernel" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "KERNEL", kernel)
        yield


@pytest.fixture
def unprivileged() -> AbstractContextManager[None]:
    """A block in which permissions count even where the tests run as root."""
    return _unprivileged()


@contextmanager
def _unprivileged() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
