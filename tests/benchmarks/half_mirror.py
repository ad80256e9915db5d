"""Print what a mirror of half the size would be worth: ``python -m tests.benchmarks.half_mirror``.

It does not pay against the mirror on the disk, which holds no memory and, while its file is in the
system's cache, is as quick as one in memory; so it is not built in. A byte an element and a sum a
block miss nothing and hold half the memory, but the old elements that a delta needs are not the
nearest ones in 1.5 % of the blocks at a rate of 1e-6, 13 % at 1e-5 and 72 % at 1e-4 (0.05 %, 1.6 %
and 72 % after mending), whichever the byte, and have to be read from a mirror on the disk after
all, or from the last anchor and every delta since. A capture took 1.3 to 2.8 times that with a
mirror in memory, and as there is no snapshot left training would also wait for the digest, 1.1 to
2.1 times more: less than with a mirror on the disk that was dropped from the cache, 7 to 10 times,
but only where few elements change.

The first table is of made bf16 steps. ``missed``: the share of the changed elements whose byte is
as before. ``wrong``: that of the others for which the nearest element with the byte that is held is
not the old one. Of the blocks of 1024 elements: ``catch``, the share with a missed one, where only
the sum tells; ``again``, where what is found so has not the sum that is held, so that the old block
would have to be read again (beside it, with blocks of 4096); ``mended``, the share still to be read
once every other element with the byte has been tried for any one change of up to 128. ``fooled``:
the number of blocks that have the sum and are not the old ones.

A sum is one of 64-bit hashes of words of four elements and their place, each one to one in the
word. So two blocks that differ in one word never have the same, and others by a chance of 2^-64:
for a million steps of 70 billion elements 1 in 250 000 in all. Each sum that is tried in mending,
up to 2^15 a block, adds as much.

The second: see half_scan.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deltactl.codec.bits import Bits, Positions, mix64
from tests.benchmarks.half_scan import BLOCK, TIMED, costs

RATES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
MENDED = 128
"""Changes of a block up to which it is tried to be mended."""

_WARM = 25
_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """bf16 elements as bits before and after, shape (n,)."""

    name: str
    old: Bits
    new: Bits


def cases(params: int) -> Iterator[Case]:
    """A step of AdamW on float32 masters at each rate, and steps as large as they can be.

    Of ``params`` elements, a multiple of 4096, one in 512 is a norm's. The direction of the step is
    that of noisy gradients after 25 steps, and as good as the same at all rates.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int = _WIDTH) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw)

    rows = params // _WIDTH
    master = normal(rows) * 0.02 * torch.exp(0.3 * normal(rows, 1))
    master[::512] = 1 + 0.05 * normal(len(master[::512]))
    drift, m, v = 0.1 * normal(rows), torch.zeros_like(master), torch.ones_like(master)
    for _ in range(_WARM):
        gradient = normal(rows).add_(drift)
        m.mul_(0.9).add_(gradient, alpha=0.1)
        v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    direction = m.div_(1 - 0.9**_WARM).div_(v.sqrt_())
    for rate in RATES:
        yield Case(f"AdamW, {rate:.0e}", _bits(master), _bits(master - rate * direction))
    yield Case("drawn anew", _bits(master), _bits(normal(rows) * 0.02))
    yield Case("times four", _bits(master), _bits(master * 4))
    yield Case("from zero", _bits(torch.zeros_like(master)), _bits(-1e-6 * direction))


def _bits(master: torch.Tensor) -> Bits:
    return master.bfloat16().view(torch.uint16).numpy().reshape(-1)


def ordered(bits: Bits) -> Bits:
    """bf16 bits, u16, as integers that rise with the value."""
    return np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.uint16)


BYTES: dict[str, Callable[[Bits], Bits]] = {
    "low": lambda bits: bits.astype(np.uint8),
    "fold": lambda bits: (bits ^ (bits >> 8)).astype(np.uint8),
    "hash": lambda bits: ((ordered(bits) * np.uint16(0x9E37)) >> 8).astype(np.uint8),
    "order": lambda bits: ordered(bits).astype(np.uint8),
}
"""The byte that is held of each element: the low one; both, one XOR the other; the high one of a
multiple; the low one of the place in order, so that steps of less than 256 units differ."""


def nearest(byte: Callable[[Bits], Bits]) -> Bits:
    """For each element and each byte the nearest element in order that has this byte; shape (65536,
    256). The order is a ring; of two as near it is the lower one."""
    every = np.arange(1 << 16, dtype=np.uint16)
    by_order = np.empty_like(every)
    by_order[ordered(every)] = every
    codes, place = byte(by_order), np.arange(1 << 16)
    found = np.empty((1 << 16, 256), np.uint16)
    for code in range(256):
        at = np.flatnonzero(codes == code)
        ring = np.concatenate([at - (1 << 16), at, at + (1 << 16)])
        above = np.searchsorted(ring, place)
        upper, lower = ring[above], ring[above - 1]
        chosen = np.where(upper - place < place - lower, upper, lower)
        found[:, code] = by_order[chosen % (1 << 16)]
    return found[ordered(every)]


def sums_of(bits: Bits, block: int) -> Bits:
    """The sum of each block. The elements must fill whole blocks."""
    words = np.ascontiguousarray(bits).view(np.uint64)
    mixed = mix64(np.arange(words.size, dtype=np.uint64), words)
    found: Bits = mixed.reshape(-1, block // 4).sum(axis=1, dtype=np.uint64)
    return found


class Code:
    """A byte, and what can be told from one."""

    def __init__(self, byte: Callable[[Bits], Bits]) -> None:
        self.byte = byte
        self.nearest = nearest(byte)
        every = byte(np.arange(1 << 16, dtype=np.uint16))
        self._alike = np.argsort(every, kind="stable").astype(np.uint16).reshape(256, 256)
        """The elements that have each byte; as many as of every other."""

    def mend(self, guess: Bits, first: int, held: Bits, at: Positions, lacking: np.uint64) -> None:
        """Put another element with the byte held into one of the places ``at`` of a block, where
        exactly one makes up what the block's sum lacks. ``first``: the number of its first word."""
        words, lane = guess.view(np.uint64)[at // 4], (at % 4 * 16).astype(np.uint64)
        index = (first + at // 4).astype(np.uint64)
        others = self._alike[held[at]]
        rest = words & ~(np.uint64(0xFFFF) << lane)
        trials = rest[:, None] | (others.astype(np.uint64) << lane[:, None])
        gained = mix64(np.broadcast_to(index[:, None], trials.shape), trials)
        hits = np.argwhere(gained == (mix64(index, words) + lacking)[:, None])
        if len(hits) == 1:
            place, which = hits[0]
            guess[at[place]] = others[place, which]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a byte, and the sums of blocks, tell of a step; see the module. Shares; ``changed`` of
    all elements, ``fooled`` a number of blocks."""

    changed: float
    missed: float
    wrong: float
    catch: float
    again: float
    larger: float
    left: float
    fooled: int


def judge(case: Case, code: Code) -> Finding:
    """Detect ``case`` from bytes and sums of the old elements."""
    old, new = case.old, case.new
    held, changed = code.byte(old), old != new
    seen = held != code.byte(new)
    guess = np.where(seen, code.nearest[new, held], new)
    wrong = guess != old
    unproven, fooled = _unproven(guess, old, BLOCK)
    larger, _ = _unproven(guess, old, 4 * BLOCK)
    _mend(guess, held, seen, sums_of(old, BLOCK), code)
    left, fooled_by_mending = _unproven(guess, old, BLOCK)
    return Finding(
        float(changed.mean()),
        float((wrong & ~seen).sum() / changed.sum()),
        float((wrong & seen).sum() / max(1, seen.sum())),
        float((wrong & ~seen).reshape(-1, BLOCK).any(axis=1).mean()),
        float(unproven.mean()),
        float(larger.mean()),
        float(left.mean()),
        fooled + fooled_by_mending,
    )


def _unproven(guess: Bits, old: Bits, block: int) -> tuple[Bits, int]:
    """The blocks of ``guess`` without the old sum, and how many have it and are not the old."""
    unproven = sums_of(guess, block) != sums_of(old, block)
    wrong = (guess != old).reshape(-1, block).any(axis=1)
    return unproven, int((wrong & ~unproven).sum())


def _mend(guess: Bits, held: Bits, seen: Bits, sums: Bits, code: Code) -> None:
    lacking = sums - sums_of(guess, BLOCK)
    for number in map(int, np.flatnonzero(lacking)):
        span = slice(number * BLOCK, (number + 1) * BLOCK)
        at = np.flatnonzero(seen[span])
        if 0 < at.size <= MENDED:
            code.mend(guess[span], number * BLOCK // 4, held[span], at, lacking[number])


def main(arguments: list[str]) -> int:
    """Print both tables; 1 if a block was taken for the old one and is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=1 << 22, help="a multiple of 4096")
    parser.add_argument("--copies", type=int, default=16, help="of these, to be timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where the mirror's file is made")
    options = parser.parse_args(arguments)
    print(
        f"{'case':12} {'byte':5} {'changed':>8} {'missed':>8} {'wrong':>8} {'catch':>7}"
        f" {'again':>7} {'(4096)':>7} {'mended':>7} {'fooled':>6}"
    )
    codes = {name: Code(byte) for name, byte in BYTES.items()}
    fooled, timed = 0, []
    for case in cases(options.params):
        if case.name in TIMED:
            timed.append(case)
        for name, code in codes.items():
            found = judge(case, code)
            fooled += found.fooled
            print(
                f"{case.name:12} {name:5} {found.changed:8.3%} {found.missed:8.3%}"
                f" {found.wrong:8.3%} {found.catch:7.2%} {found.again:7.2%} {found.larger:7.2%}"
                f" {found.left:7.2%} {found.fooled:6}"
            )
    for case in timed:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            rows = costs(case.old, case.new, options.copies, options.rounds, Path(scratch))
        print(f"\n{case.name:32} {'time':>6} {'held':>6} {'most':>6}")
        for row in rows:
            print(
                f"{row.way:32} {row.seconds / rows[0].seconds:6.2f} {row.held:6.3f} {row.most:6.3f}"
            )
    return 1 if fooled else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
