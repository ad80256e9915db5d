"""When anchors are due: by count, as TRL has it, and by what catching up costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.chain.anchor_policy import REPLAY_SECONDS, Adaptive, Every, Run
from deltactl.chain.next_step import NextStep
from deltactl.chain.reading import read_chain
from deltactl.core.errors import UsageError
from tests.support.chains import make_chain

STEPS = st.integers(0, 10**6)
SIZES = st.integers(0, 10**15)


def _run(
    step: int, anchor: int, *, anchor_bytes: int = 0, deltas: int = 0, changed: int = 0
) -> Run:
    return Run(step, anchor, anchor_bytes, deltas, changed)


@given(STEPS, STEPS, st.integers(1, 1000))
def test_a_multiple_between_the_anchor_and_the_step_makes_an_anchor(
    anchor: int, ahead: int, every: int
) -> None:
    step = anchor + ahead
    reached = any(n % every == 0 for n in (range(anchor + 1, step + 1) if ahead < 2000 else [0]))
    assert Every(every).due(_run(step, anchor)) is (reached or ahead >= every)


@given(STEPS, STEPS)
def test_every_nought_makes_none(anchor: int, ahead: int) -> None:
    assert not Every(0).due(_run(anchor + ahead, anchor))


@given(SIZES, SIZES, st.integers(0, 10**12), st.sampled_from([1e6, 1e9, 1e12]))
def test_an_anchor_is_due_once_the_deltas_take_as_long(
    size: int, deltas: int, changed: int, bandwidth: float
) -> None:
    due = Adaptive(bandwidth).due(_run(9, 1, anchor_bytes=size, deltas=deltas, changed=changed))
    assert due is (deltas / bandwidth + changed * REPLAY_SECONDS >= size / bandwidth)
    if deltas >= size:
        assert due


def test_a_faster_link_makes_more_anchors_as_replaying_takes_its_time() -> None:
    run = _run(9, 1, anchor_bytes=10**9, deltas=10**8, changed=10**8)
    assert Adaptive(1e9).due(run)
    assert not Adaptive(1e7).due(run)


@pytest.mark.parametrize("make", [lambda: Every(-1), lambda: Adaptive(0), lambda: Adaptive(-1.0)])
def test_what_is_no_policy_is_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


class _Seen:
    def __init__(self) -> None:
        self.runs: list[Run] = []

    def due(self, run: Run) -> bool:
        self.runs.append(run)
        return False


def test_the_run_is_what_lies_between_the_newest_anchor_and_the_step(tmp_path: Path) -> None:
    weights = np.zeros(4096, np.uint32)
    steps = []
    for step in range(1, 8):
        weights[:step] += 1
        steps.append({"w": ("U32", weights.shape, weights.tobytes())})
    bucket = make_chain(tmp_path, steps, anchor_every=3)
    chain = read_chain(bucket)
    assert sorted(chain.anchors) == [1, 3, 6]
    seen = _Seen()
    next_step = NextStep(chain, seen)
    next_step.anchor_due(8, 100, 8)
    next_step.anchor_due(7, chain.deltas[7].bytes, 7)  # it is in the chain, and counts once
    after_six = chain.deltas[7].bytes
    size = chain.anchors[6].bytes
    assert seen.runs == [
        Run(8, 6, size, after_six + 100, 7 + 8),
        Run(7, 6, size, after_six, 7),
    ]
