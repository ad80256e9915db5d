"""Fixtures of the core's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

NOBODY = 65534


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
