"""Which names from outside may be put after a directory, or be an object's in a bucket."""

from __future__ import annotations

import re

from deltactl.core.errors import UsageError

_NOT_EVERYWHERE = re.compile(r"[\x00-\x1f\\]")


def is_relative(name: str) -> bool:
    """Whether ``name`` is a path in its one spelling that stays below where it starts."""
    return not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def is_plain_path(name: object) -> bool:
    """Whether ``name`` is such a path, and one that every system can hold: without control
    characters and backslashes. Safe to put after a directory."""
    return isinstance(name, str) and is_relative(name) and not _NOT_EVERYWHERE.search(name)


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is one component of such a path and nothing else.

    False also for what cannot be printed: lone surrogates, marks that turn the direction of text.
    """
    return is_plain_path(name) and "/" not in name and name.isprintable()


def check_object_name(name: str) -> str:
    """The name of an object. Raises UsageError unless it is a relative path in its one spelling."""
    if not is_relative(name):
        raise UsageError("no plain name of an object", file=name)
    return name
