"""Reports as JSON has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deltactl.core.errors import DeltactlError, Malformed
from deltactl.core.facts import as_json, facts_of


@dataclass(slots=True)
class Inner:
    name: str
    where: Path

    def facts(self) -> dict[str, Any]:
        return facts_of(self, "name")


@dataclass(frozen=True, slots=True)
class Outer:
    steps: tuple[int, ...]
    inner: list[Inner]
    place: Path
    counts: dict[int, float] = field(default_factory=dict)
    error: DeltactlError | None = None

    @property
    def many(self) -> int:
        return len(self.steps)


OUTER = Outer((1, 2), [Inner("a", Path("x"))], Path("b/c"), {3: 0.5})


def test_all_fields_in_their_order_whatever_they_hold() -> None:
    found = facts_of(OUTER)
    assert list(found) == ["steps", "inner", "place", "counts", "error"]
    assert found == {
        "steps": [1, 2],
        "inner": [{"name": "a"}],
        "place": "b/c",
        "counts": {"3": 0.5},
        "error": None,
    }
    assert json.loads(json.dumps(found)) == found


def test_names_say_which_and_in_which_order_and_others_stand_for_some() -> None:
    found = facts_of(OUTER, "many", "steps", "place", place=None, more=OUTER.inner)
    assert list(found.items()) == [
        ("many", 2), ("steps", [1, 2]), ("place", None), ("more", [{"name": "a"}])
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="missing"):
        facts_of(OUTER, "missing")


def test_an_error_is_its_facts_and_its_hint() -> None:
    error = Malformed("torn", file=Path("f"), step=3, found=b"x", hint="fetch it again")
    assert as_json(error) == {**error.facts(), "hint": "fetch it again"}
    assert as_json([error])[0]["found"] == "b'x'"
