"""What several ranks say of themselves, as one; and what is no such thing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.core.errors import Conflict, DeltactlError, Malformed, Transient, Unsupported
from deltactl.server.state import EngineState, error_of, of_ranks

URL, CALL = "http://a", "c"
IDS = st.sampled_from(["staging", "staged", "ready", "already", "committed", "refused", "failed"])


def reply(rank: int = 0, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "deltactl": "0.1.0", "protocol": 2, "rank": rank, "world_size": ranks, "call": CALL,
        "dtype": "bfloat16", "model": "m", "backend": True, "identity": "known", "step": 1,
        "state": "aa", "bucket": None, "poisoned": None, "error": None, "update": None,
        "session": False, "map": {"tensors": 3, "unmapped": {}, "ignored": []}, "audit": None,
    }  # fmt: skip
    return known | changes


def update(phase: str, **changes: Any) -> dict[str, Any]:
    return {"id": "u", "phase": phase, "elements": 5, "seconds": {"write": 1.5}} | changes


def both(one: dict[str, Any], two: dict[str, Any]) -> EngineState:
    return of_ranks([reply(0, 2) | one, reply(1, 2) | two], CALL, URL)


def test_one_rank() -> None:
    engine = of_ranks([reply(update=update("ready"))], CALL, URL)
    assert engine.update is not None
    assert (engine.step, engine.state, engine.update.phase) == (1, "aa", "ready")
    assert engine.sound
    assert engine.mapped == 3


@pytest.mark.parametrize(
    ("one", "two", "phase"),
    [
        ("staging", "staged", "staging"),
        ("staging", "failed", "staging"),
        ("staged", "failed", "failed"),
        ("ready", "staged", "staged"),
        ("refused", "ready", "refused"),
        ("committed", "committed", "committed"),
        ("rolled_back", "rolled_back", "rolled_back"),
    ],
)
def test_phases(one: str, two: str, phase: str) -> None:
    for pair in ((one, two), (two, one)):
        engine = both(*({"update": update(p)} for p in pair))
        assert engine.update is not None
        assert engine.update.phase == phase
        assert engine.update.elements == 10
        assert engine.sound


@given(IDS)
def test_what_one_rank_has_written_and_another_has_not_is_not_sound(other: str) -> None:
    engine = both({"update": update("committed")}, {"update": update(other)})
    assert engine.sound is (other == "committed")
    assert engine.update is not None
    assert engine.update.written


@pytest.mark.parametrize("other", [None, update("committed", id="another")])
def test_an_update_that_not_all_have(other: Any) -> None:
    engine = both({"update": update("committed")}, {"update": other})
    assert not engine.sound
    engine = both({"update": update("ready")}, {"update": other and update("ready", id="x")})
    assert engine.sound
    assert engine.update is not None
    assert engine.update.phase == "failed"


def test_states() -> None:
    assert not both({}, {"state": "bb"}).sound
    assert both({}, {"state": None, "step": None, "identity": "running"}).sound
    facts = {"what": "torn", "kind": "Malformed"}
    engine = both({}, {"poisoned": facts})
    assert isinstance(engine.poisoned, Malformed)


def test_what_a_rank_says_of_unknown_weights_stands_before_that_ranks_differ() -> None:
    facts = {"what": "written by half", "kind": "Malformed"}
    engine = both({"state": "aa"}, {"state": "bb", "poisoned": facts})
    assert engine.poisoned is not None and engine.poisoned.what == "written by half"
    assert "hold different weights" in str(both({"state": "aa"}, {"state": "bb"}).poisoned)


@pytest.mark.parametrize(
    ("one", "two", "known"),
    [
        ("known", "running", "running"),
        ("unknown", "known", "unknown"),
        ("failed", "known", "failed"),
    ],
)
def test_identities(one: str, two: str, known: str) -> None:
    assert both({"identity": one}, {"identity": two}).identity == known


@pytest.mark.parametrize(
    "changes", [{"rank": 0}, {"world_size": 3}, {"call": "b"}, {"call": None}], ids=str
)
def test_replies_of_another_call(changes: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match="out of step"):
        both({}, changes)


def test_another_protocol() -> None:
    with pytest.raises(Unsupported):
        of_ranks([reply(protocol=3)], CALL, URL)


def test_an_unknown_phase() -> None:
    with pytest.raises(Malformed):
        of_ranks([reply(update=update("done"))], CALL, URL)


def test_errors_keep_their_kind_and_facts() -> None:
    facts = {
        "kind": "Conflict", "what": "another base", "step": 3, "tensor": "t", "expected": 1,
        "found": "x", "file": "f", "hint": "try", "more": 1,
    }  # fmt: skip
    error = error_of(facts)
    assert isinstance(error, Conflict)
    assert str(error) == "step 3, f, tensor 't': another base; expected 1, found x"
    assert error.hint == "try"
    assert isinstance(error_of({"kind": "Transient", "what": "w"}), Transient)


@pytest.mark.parametrize("kind", [None, "Any", "annotations", "SystemExit", 3, "DeltactlError"])
def test_errors_of_no_kind(kind: object) -> None:
    assert type(error_of({"kind": kind, "what": "w"})) is DeltactlError


_TEXTS = st.text("ab0", max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner),
    max_leaves=5,
)
KEYS = sorted(reply())
PARTS = sorted({*update(""), "error", "reloaded", "full", "fetched_bytes", "to_step"})


@given(st.dictionaries(st.sampled_from(KEYS), values))
def test_any_reply_is_understood_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(DeltactlError):
        assert isinstance(of_ranks([reply() | changes], CALL, URL), EngineState)


@given(st.sampled_from(["update", "map", "audit", "poisoned"]), st.dictionaries(
    st.sampled_from([*PARTS, "tensors", "unmapped", "checked", "differing", "kind", "what"]), values
))  # fmt: skip
def test_any_part_of_a_reply_too(key: str, part: dict[str, Any]) -> None:
    known = update("ready") if key == "update" else {}
    with contextlib.suppress(DeltactlError):
        assert isinstance(of_ranks([reply() | {key: known | part}], CALL, URL), EngineState)


@given(st.lists(values, max_size=3))
def test_what_is_no_reply(replies: list[Any]) -> None:
    with pytest.raises(DeltactlError):
        of_ranks(replies, CALL, URL)
