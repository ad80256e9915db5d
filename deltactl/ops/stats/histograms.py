"""Counts over elements that add up: how far they moved, and how large they were before."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.codec.bits import Bits, SplitSteps, Steps
from deltactl.core.dtypes import FLOATS

_BINS = 64
_EDGES = np.array([1 << n for n in range(_BINS)], np.uint64)


class StepCounts:
    """How many elements moved how far, in units in the last place, up and down.

    Bin 0 holds steps of 1, bin 1 those of 2, bin 2 those of 3 and 4, and so on by powers of two.
    ``sign_flips``: how many of them changed their sign; None where the steps alone are known.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, _BINS), np.int64)
        self.sign_flips: int | None = 0

    def add(self, steps: Steps) -> None:
        """Count signed steps, shape (n,), of any width; those of 0 are none."""
        moved = steps[steps != 0].astype(np.int64)
        length = np.abs(moved).view(np.uint64)  # as unsigned, right for the lowest step too
        bins = np.searchsorted(_EDGES, length)
        bins[moved < 0] += _BINS
        self._counts += np.bincount(bins, minlength=2 * _BINS).reshape(2, _BINS)

    def add_all(self, steps: SplitSteps) -> None:
        """Count steps that are not joined, some at a time."""
        for piece in steps.pieces():
            self.add(piece)

    def add_flips(self, before: Bits, after: Bits) -> None:
        """Count the elements, shape (n,), whose top bit, the sign, differs."""
        if self.sign_flips is not None:
            top = before.dtype.type(1 << (8 * before.itemsize - 1))
            self.sign_flips += int(np.count_nonzero((before ^ after) & top))

    def merge(self, other: StepCounts) -> None:
        """Add another's counts to these."""
        self._counts += other._counts
        if self.sign_flips is not None:
            self.sign_flips += other.sign_flips or 0

    @property
    def counted(self) -> int:
        """All steps."""
        return int(self._counts.sum())

    def facts(self) -> dict[str, Any]:
        """``counted``, ``one_share``, ``sign_flips``, and the ``bins`` that hold any: min, max, up,
        down."""
        counted, used = self.counted, np.flatnonzero(self._counts.any(axis=0)).tolist()
        ones = int(self._counts[:, 0].sum())
        return {
            "counted": counted,
            "one_share": ones / counted if counted else None,
            "sign_flips": self.sign_flips,
            "bins": [
                {
                    "min": (1 << n >> 1) + 1 if n else 1,
                    "max": 1 << n,
                    "up": int(self._counts[0, n]),
                    "down": int(self._counts[1, n]),
                }
                for n in used
            ],
        }


class ExponentCounts:
    """For each biased exponent of the base: how many elements have it, and how many of them change.

    Floats alone; counts of different dtypes are kept apart.
    """

    def __init__(self) -> None:
        self._counts: dict[str, npt.NDArray[np.int64]] = {}

    def add(self, base: Bits, changed: Bits, dtype: str) -> None:
        """Count all elements of a piece of the base, and those of it that change."""
        if dtype not in FLOATS:
            return
        counts = self._of(dtype)
        counts[0] += _by_exponent(base, dtype)
        counts[1] += _by_exponent(changed, dtype)

    def _of(self, dtype: str) -> npt.NDArray[np.int64]:
        return self._counts.setdefault(dtype, np.zeros((2, 1 << FLOATS[dtype].exponent), np.int64))

    def merge(self, other: ExponentCounts) -> None:
        """Add another's counts to these."""
        for dtype, counts in other._counts.items():
            self._of(dtype)[:] += counts

    def facts(self) -> list[dict[str, Any]]:
        """A row for each exponent that is there: dtype, exponent (biased), power (of two, of the
        smallest normal number for subnormal ones), elements, changed, rate."""
        rows = []
        for dtype, (elements, changed) in sorted(self._counts.items()):
            bias = FLOATS[dtype].bias
            for exponent in np.flatnonzero(elements).tolist():
                count, moved = int(elements[exponent]), int(changed[exponent])
                rows.append(
                    {
                        "dtype": dtype,
                        "exponent": exponent,
                        "power": max(exponent, 1) - bias,
                        "elements": count,
                        "changed": moved,
                        "rate": moved / count,
                    }
                )
        return rows


def _by_exponent(bits: Bits, dtype: str) -> npt.NDArray[np.int64]:
    """How many elements have each exponent, shape (2^bits of the exponent,)."""
    width, mantissa = FLOATS[dtype].exponent, FLOATS[dtype].mantissa
    shifted = (bits >> bits.dtype.type(mantissa)).astype(np.uint8 if width <= 8 else np.uint16)
    if width < 8 or width > 8:
        shifted &= shifted.dtype.type((1 << width) - 1)  # else the sign was cut off already
    return np.bincount(shifted, minlength=1 << width)
