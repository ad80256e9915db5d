"""Which names objects may have."""

from __future__ import annotations

from pathlib import PurePosixPath

from deltactl.core.errors import UsageError


def check_name(name: str) -> str:
    """The name. Raises UsageError unless it is a relative path in its one spelling."""
    if not is_name(name):
        raise UsageError("no plain name of an object", file=name)
    return name


def is_name(name: str) -> bool:
    """Whether it is a relative path in its one spelling."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and not {"/", ".."} & set(parts) and "\0" not in name
    return plain and "/".join(parts) == name
