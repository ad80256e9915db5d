"""Which names objects may have."""

from __future__ import annotations

from pathlib import PurePosixPath

from deltactl.core.errors import UsageError


def check_name(name: str) -> str:
    """The name. Raises UsageError unless it is a relative path in its one spelling."""
    parts = PurePosixPath(name).parts
    if not parts or {"/", ".."} & set(parts) or "/".join(parts) != name or "\0" in name:
        raise UsageError("no plain name of an object", file=name)
    return name
