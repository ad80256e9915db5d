"""What a report says, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

from deltactl.core.errors import DeltactlError


def facts_of(report: Any, *names: str, **others: object) -> dict[str, Any]:
    """The attributes of a report by name, by default all fields of its dataclass, as JSON has them.

    ``others``: what stands for some of the names, or beside them.
    """
    order = dict.fromkeys([*(names or (field.name for field in fields(report))), *others])
    return {n: as_json(others[n] if n in others else getattr(report, n)) for n in order}


def as_json(value: Any) -> Any:
    """A value as JSON has it: a report by its ``facts()`` or its fields, an error by its facts and
    its hint, a path as text, what is several as a list or an object."""
    if isinstance(value, DeltactlError):
        return {**value.facts(), "hint": value.hint}
    if hasattr(value, "facts"):
        return value.facts()
    if is_dataclass(value):
        return facts_of(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value
