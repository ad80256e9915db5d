"""Which encoding gets a delta there soonest, by what a sample of the very pair shows.

A small delta takes longer to make, so the best encoding depends on the bandwidth between the two
sides, on the machine and on how sparse the training is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltactl.chain.anchor_policy import BANDWIDTH
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.checkpoint.sampling import alike, sample_pair
from deltactl.codec import DEFAULT, ENCODINGS
from deltactl.core.errors import UsageError
from deltactl.format.delta import open_delta
from deltactl.ops.diff import diff
from deltactl.replay.in_memory import decode_all

AUTO = "auto"
"""The name that stands for whatever ``advise`` says."""

_PIECES = 4
_PIECE_BYTES = 1 << 22
_ROUNDS = 3  # the best counts: what else runs on the machine only ever makes one slower
_ENOUGH = 0.25  # seconds after which no further round begins

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one encoding is expected to cost: seconds to encode, ship and decode; bytes to ship."""

    encoding: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The encoding to take at ``bandwidth`` bytes a second, and what each would cost."""

    encoding: str
    bandwidth: float
    estimates: tuple[Estimate, ...]


def advise(
    base: Checkpoint,
    result: Checkpoint,
    bandwidth: float = BANDWIDTH,
    *,
    clock: Clock = time.perf_counter,
) -> Advice:
    """Find the encoding whose delta is made, shipped at ``bandwidth`` and decoded soonest.

    Encodes and decodes a bounded sample in every encoding, on this machine, and counts on the rest
    being like it. Where no element of the sample changed there is nothing to choose by, and it is
    the default. Raises UsageError for a bandwidth that is not above 0.
    """
    if not bandwidth > 0:
        raise UsageError("the bandwidth is not above 0", found=bandwidth)
    pair = sample_pair(base, result, pieces=_PIECES, piece_bytes=_PIECE_BYTES)
    changed = diff(*pair, None).changed_elements  # and the sample is in memory: none pays for that
    sampled, whole = pair[1].nbytes, sum(tensor.nbytes for tensor in alike(base, result))
    times = whole / sampled if sampled else 0.0
    carried = result.nbytes - whole  # as it is, in any encoding
    estimates = []
    for encoding, (seconds, size) in _measure(*pair, clock).items():
        size = round(size * times) + carried
        estimates.append(Estimate(encoding, seconds * times + size / bandwidth, size))
    best = min(estimates, key=lambda estimate: estimate.seconds).encoding
    return Advice(best if changed else DEFAULT, bandwidth, tuple(estimates))


def _measure(base: Checkpoint, result: Checkpoint, clock: Clock) -> dict[str, tuple[float, int]]:
    """By encoding: seconds to encode and decode, and the bytes of a delta but for its header."""
    best: dict[str, tuple[float, int]] = {}
    begin = clock()
    for _ in range(_ROUNDS):
        for encoding in ENCODINGS:
            found = _once(base, result, encoding, clock)
            best[encoding] = min(best.get(encoding, found), found)
        if clock() - begin > _ENOUGH:
            break
    return best


def _once(base: Checkpoint, result: Checkpoint, encoding: str, clock: Clock) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "delta")
        start = clock()
        with open(path, "w+b") as file:
            diff(base, result, file, encoding=encoding)
        delta = open_delta(path)
        decode_all(base, delta)
        return clock() - start, delta.payload_bytes
