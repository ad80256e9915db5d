"""Rollouts travel whole, and what is no rollout is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.bucket import open_bucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Malformed
from deltactl.demo.game import game, tokens
from deltactl.demo.game.rollouts import (
    Batch,
    Rollout,
    Turn,
    batch_name,
    groups,
    put_batch,
    read_batch,
)

TURN = Turn((1, 2, 3), (-0.5, -1.25, -3.0), "B.t", (4, 5))


def batch(number: int = 5) -> Batch:
    rollouts = (Rollout(9, (TURN, TURN), 0.875), Rollout(9, (TURN,), 0.0), Rollout(8, (TURN,), 1.0))
    return Batch(number, rollouts)


turns = st.builds(
    Turn,
    st.tuples(*[st.integers(0, tokens.VOCAB_SIZE - 1)] * game.LETTERS),
    st.tuples(*[st.floats(max_value=0, allow_infinity=False, allow_nan=False)] * game.LETTERS),
    st.text("abzABZ.!", min_size=game.LETTERS, max_size=game.LETTERS),
    st.lists(st.integers(0, 10**6), min_size=2, max_size=2).map(lambda s: (min(s), max(s))),
)
rollouts = st.builds(
    Rollout,
    st.integers(0, 2**63 - 1),
    st.lists(turns, min_size=1, max_size=game.GUESSES).map(tuple),
    st.floats(0, 1),
)


@given(st.builds(Batch, st.just(3), st.lists(rollouts, min_size=1, max_size=4).map(tuple)))
def test_a_batch_comes_back_as_it_was(tmp_path_factory: Any, made: Batch) -> None:
    place = tmp_path_factory.mktemp("bucket")
    bucket = open_bucket(str(place / "bucket"))
    assert read_batch(bucket, 3) is None
    put_batch(bucket, made, place / "scratch")
    assert read_batch(bucket, 3) == made


def test_batches_lie_beside_a_chain_and_are_no_part_of_it(tmp_path: Path) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"))
    put_batch(bucket, batch(), tmp_path / "scratch")
    assert [object.name for object in bucket.list()] == ["rollouts/batch_000005.json"]
    assert not read_chain(bucket).all_steps


def test_staleness_counts_from_the_oldest_step_that_had_a_part() -> None:
    assert [rollout.step for rollout in batch().rollouts] == [4, 4, 4]
    assert batch(6).staleness == 2
    assert batch().by_step() == {4: 3}
    assert batch().reward == pytest.approx(0.625)
    assert [len(group) for group in groups(batch().rollouts)] == [2, 1]


Change = Callable[[dict[str, Any]], Any]


def first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["rollouts"][0]
    return found


WRONG: dict[str, Change] = {
    "another number": lambda d: d.update(number=6),
    "a number that is none": lambda d: d.update(number="5"),
    "no rollouts": lambda d: d.update(rollouts=[]),
    "rollouts that are none": lambda d: d.update(rollouts={"a": 1}),
    "a rollout that is none": lambda d: d["rollouts"].append(None),
    "no turns": lambda d: first(d).update(turns=[]),
    "too many turns": lambda d: first(d).update(turns=first(d)["turns"] * 4),
    "no seed": lambda d: first(d).pop("seed"),
    "a seed below zero": lambda d: first(d).update(seed=-1),
    "a reward above all": lambda d: first(d).update(reward=1.5),
    "a reward that is none": lambda d: first(d).update(reward=True),
    "a short turn": lambda d: first(d)["turns"][0].update(tokens=[1, 2]),
    "a token past the last": lambda d: first(d)["turns"][0].update(tokens=[1, 2, 64]),
    "a token below the first": lambda d: first(d)["turns"][0].update(tokens=[1, 2, -1]),
    "a probability above one": lambda d: first(d)["turns"][0].update(logprobs=[-1.0, 0.5, -1.0]),
    "a mark that is none": lambda d: first(d)["turns"][0].update(marks="B.#"),
    "a begin token among marks": lambda d: first(d)["turns"][0].update(marks=["<begin>", "a", "b"]),
    "steps that fall": lambda d: first(d)["turns"][0].update(steps=[5, 4]),
    "one step": lambda d: first(d)["turns"][0].update(steps=[5]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_batch_is_refused(tmp_path: Path, name: str) -> None:
    document = json.loads(json.dumps(asdict(batch())))
    WRONG[name](document)
    put_raw(tmp_path, json.dumps(document).encode())


RAW = [b"", b"{", b"[]", b"null", b"\xff", b'{"number": 5}', b'{"number": 5, "number": 5}']


@pytest.mark.parametrize("raw", [*RAW, b'{"number": NaN}', b"[" * 100_000], ids=lambda r: r[:20])
def test_what_is_no_json_is_refused(tmp_path: Path, raw: bytes) -> None:
    put_raw(tmp_path, raw)


def test_a_probability_of_none_is_refused(tmp_path: Path) -> None:
    text = json.dumps(asdict(batch())).replace("-3.0", "-1e999", 1)
    put_raw(tmp_path, text.encode())


def put_raw(place: Path, raw: bytes) -> None:
    """Have a bucket hold this as batch 5, and see it refused."""
    bucket, source = open_bucket(str(place / "bucket")), place / "raw"
    source.write_bytes(raw)
    assert bucket.put(batch_name(5), source)
    with pytest.raises(Malformed) as refused:
        read_batch(bucket, 5)
    assert refused.value.file == batch_name(5)
