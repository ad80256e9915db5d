"""Deltas decoded, and applied in memory, give what the files would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import ENCODINGS
from deltactl.codec.bits import Bytes
from deltactl.core.digest import state_digest
from deltactl.core.errors import Conflict
from deltactl.format.delta import open_delta
from deltactl.replay.in_memory import apply_in_memory, decode_all
from tests.support.adversarial import small_blocks
from tests.support.chains import Tensors, every_kind, first_state, make_delta, next_state, write


@pytest.fixture
def states() -> list[Tensors]:
    first = first_state()
    second = every_kind(first)
    return [first, second, next_state(second, 5)]


def holds(tensors: dict[str, Bytes], state: Tensors) -> bool:
    return {name: data.tobytes() for name, data in tensors.items()} == {
        name: data for name, (_, _, data) in state.items()
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_after_the_other_and_both_at_once(
    encoding: str, states: list[Tensors], tmp_path: Path
) -> None:
    with small_blocks(32):
        paths = [write(tmp_path / str(i), state) for i, state in enumerate(states)]
        deltas = [
            open_delta(make_delta(tmp_path / f"{i}.delta", *states[i : i + 2], encoding=encoding))
            for i in range(2)
        ]
        tensors: dict[str, Bytes] = {}
        for i, delta in enumerate(deltas):
            kept = dict(tensors)
            with open_checkpoint(paths[i]) as base:
                found = apply_in_memory(base, [delta], tensors)
            assert holds(tensors, states[i + 1])
            assert state_digest(found) == delta.header.result_state
            assert [state.name for state in found] == sorted(states[i + 1])
            for name, array in kept.items():
                assert tensors[name] is array  # written over, not allocated anew
        together: dict[str, Bytes] = {"stranger": np.zeros(3, np.uint8)}
        with open_checkpoint(paths[0]) as base:
            apply_in_memory(base, deltas, together)
        assert holds(together, states[2])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_change_is_decoded(encoding: str, states: list[Tensors], tmp_path: Path) -> None:
    with small_blocks(32):
        base = write(tmp_path / "base", states[1])
        delta = open_delta(make_delta(tmp_path / "delta", *states[1:], encoding=encoding))
        with open_checkpoint(base) as opened:
            assert decode_all(opened, delta) == delta.header.changed_elements > 20


def test_another_base_is_refused(states: list[Tensors], tmp_path: Path) -> None:
    delta = open_delta(make_delta(tmp_path / "delta", *states[1:]))
    other = write(tmp_path / "other", {"model.embed": states[0]["model.embed"]})
    with open_checkpoint(other) as base:
        with pytest.raises(Conflict):
            decode_all(base, delta)
        with pytest.raises(Conflict):
            apply_in_memory(base, [delta], {})
