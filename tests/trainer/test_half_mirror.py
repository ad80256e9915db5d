"""What a byte and the sum of its block do not prove is never taken for the old elements; and the
compiled scan that is timed does what is said of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from deltactl.codec.bits import Bits, take_steps
from tests.benchmarks import half_mirror, half_scan
from tests.benchmarks.half_mirror import BYTES, Case, Code, judge, ordered, sums_of
from tests.benchmarks.half_scan import BLOCK, HalfMirror, compiled, costs

ELEMENTS = 16 * BLOCK
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def codes() -> dict[str, Code]:
    return {name: Code(byte) for name, byte in BYTES.items()}


def _case(steps: list[int], seed: int) -> Case:
    """Any bits, one in a hundred of which goes one of ``steps`` units; the last block is as before,
    and in the one before that one element alone has changed."""
    draw = np.random.default_rng(seed)
    old = draw.integers(0, 1 << 16, ELEMENTS, np.uint16)
    new, at = old.copy(), draw.choice(ELEMENTS - 2 * BLOCK, ELEMENTS // 100, replace=False)
    at = np.append(at, ELEMENTS - 2 * BLOCK + 5)
    new[at] = take_steps(old[at], draw.choice(steps, at.size).astype(np.int16), "BF16")
    return Case(f"{steps}", old, new)


@pytest.mark.parametrize("steps", [[-1, 1], [256], [-512, 1, 3], [-129, 128, 200], [1000, -31000]])
def test_nothing_is_missed_by_both(codes: dict[str, Code], steps: list[int]) -> None:
    for seed in range(3):
        case = _case(steps, seed)
        for name, code in codes.items():
            found = judge(case, code)
            assert found.fooled == 0, name
            assert found.again >= found.catch, name
            assert found.left <= found.again <= 15 / 16, name


def test_where_the_byte_tells_nothing_the_sum_tells_all(codes: dict[str, Code]) -> None:
    found = judge(_case([256, -512], seed=0), codes["order"])
    assert (found.missed, found.catch, found.again, found.left) == (1, 15 / 16, 15 / 16, 15 / 16)


def test_a_step_of_few_units_gives_the_old_elements_back(codes: dict[str, Code]) -> None:
    found = judge(_case([-127, *range(-20, 0), 1, 128], seed=0), codes["order"])
    assert (found.missed, found.wrong, found.again) == (0, 0, 0)


def test_one_longer_step_in_a_block_is_mended(codes: dict[str, Code]) -> None:
    case = _case([1], seed=0)
    case.new[-1:] = take_steps(case.old[-1:], np.array([300], np.int16), "BF16")
    found = judge(case, codes["order"])
    assert (found.wrong > 0, found.again, found.left, found.fooled) == (True, 1 / 16, 0, 0)


def test_a_sum_is_judged_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sum that is always the same all that was missed is taken for old, and said to be."""
    monkeypatch.setattr(half_mirror, "sums_of", lambda bits, block: np.zeros(bits.size // block))
    found = judge(_case([256], seed=0), Code(BYTES["order"]))
    assert found.fooled > 0


@needs_cc
@pytest.mark.parametrize("steps", [[-1, 1], [256, 3], [-129, 128, 200, -31000]])
def test_the_scan_does_the_same(tmp_path: Path, codes: dict[str, Code], steps: list[int]) -> None:
    case, code = _case(steps, seed=1), codes["order"]
    half = HalfMirror(compiled(tmp_path), ELEMENTS)
    half.scan(case.old, 0)
    start = 4 * BLOCK
    noted = half.scan(case.new[start:], start)
    old, new = case.old[start:], case.new[start:]
    seen = code.byte(old) != code.byte(new)
    guess: Bits = np.where(seen, code.nearest[new, code.byte(old)], new)
    assert noted.positions is not None
    assert np.array_equal(noted.positions, np.flatnonzero(seen))
    assert np.array_equal(noted.before, guess[seen])
    assert np.array_equal(noted.after, new[seen])
    assert np.array_equal(noted.again, (guess != old).reshape(-1, BLOCK).any(axis=1))
    assert np.array_equal(half.held[start:], ordered(new).astype(np.uint8))
    assert np.array_equal(half.sums[start // BLOCK :], sums_of(case.new, BLOCK)[start // BLOCK :])
    assert half.scan(case.new[start:], start).before.size == 0


@needs_cc
def test_costs_are_measured(tmp_path: Path) -> None:
    case = _case([1, -1], seed=0)
    rows = {row.way: row for row in costs(case.old, case.new, 2, 2, tmp_path)}
    assert all(row.seconds > 0 for row in rows.values())
    assert rows[half_scan.IN_MEMORY].held == 2
    assert rows[half_scan.HALF].held == 1 + 8 / BLOCK
    assert rows[half_scan.ON_DISK].held == rows[half_scan.DROPPED].held == 0
    assert all(row.most > row.held for way, row in rows.items() if way != half_scan.DIGEST)
