"""One run over one pair of checkpoints: everything is measured in turn, in the same minutes."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

from deltactl.bench.catch_up import CHAIN_BYTES, CatchUp, MadeChain
from deltactl.bench.encodings import EncodingRow, EncodingRun
from deltactl.bench.machine import Limits, available_memory, facts, files_of
from deltactl.bench.made import write_steps
from deltactl.bench.peers import PEERS, TRL, Files, MeasuredPeer
from deltactl.bench.report import BenchReport
from deltactl.bench.timing import Timed, medians
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.checkpoint.sampling import sample_pair
from deltactl.codec import DEFAULT, ENCODINGS
from deltactl.codec.bits import Bytes
from deltactl.core.errors import DeltactlError, NotFound, UsageError
from deltactl.core.progress import Meter, Progress, silent
from deltactl.ops.diff import diff
from deltactl.replay.rebuild import write_file

PARAMS = 1 << 26
ROUNDS = 5
LEARNING_RATE = 1e-6
_SAMPLE_PIECES = 8
_SAMPLE_PIECE_BYTES = 1 << 22


def bench(
    a: Path | None = None,
    b: Path | None = None,
    *,
    params: int = PARAMS,
    lr: float = LEARNING_RATE,
    rounds: int = ROUNDS,
    scratch: Path | None = None,
    progress: Progress = silent,
) -> BenchReport:
    """Measure every encoding, the machine's own limits and the peers on checkpoints ``a``, ``b``.

    Without them a pair of ``params`` parameters, one AdamW step at ``lr`` apart, is made, and a
    small chain. Temporary files go below ``scratch``, by default the system's place for such, and
    are removed. Raises UsageError for one checkpoint alone, NotFound where there is no ``scratch``,
    DeltactlError where it has too little room, and what opening checkpoints raises.
    """
    if (a is None) != (b is None):
        raise UsageError("one checkpoint alone", expected="two checkpoints, or none")
    if rounds < 1 or params < 1:
        raise UsageError("nothing to measure", expected="1 or more", found=min(rounds, params))
    if scratch is not None and not scratch.is_dir():
        raise NotFound("no such directory", file=scratch, hint=f"mkdir -p {scratch}")
    with tempfile.TemporaryDirectory(prefix="deltactl-bench-", dir=scratch) as directory:
        place = Path(directory)
        if a is None or b is None:
            _check_room(place, 4 * params + CHAIN_BYTES, 2 * params)
            old, new = write_steps(place / "made", params, 2, lr=lr)
            return _Run(old, new, place, MadeChain(place / "chain")).report(rounds, lr, progress)
        with open_checkpoint(b) as result:
            _check_room(place, 0, result.nbytes)
        return _Run(a, b, place, None).report(rounds, None, progress)


def _check_room(place: Path, made: int, checkpoint: int) -> None:
    """Raise DeltactlError unless there is room for what is made, for one copy of a checkpoint at a
    time, for the samples, and for deltas: how large they become nobody knows, so a checkpoint's."""
    needed = made + 2 * checkpoint + 4 * _SAMPLE_PIECES * _SAMPLE_PIECE_BYTES
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DeltactlError(
            "too little room for temporary files",
            file=place.parent,
            expected=f"{needed} bytes",
            found=free,
            hint="deltactl bench --scratch DIR, on a larger disk",
        )


class _Run:
    """The parts, made ready on one pair of checkpoints; the works of all are timed in turn."""

    def __init__(self, a: Path, b: Path, scratch: Path, chain: MadeChain | None) -> None:
        self._chain = chain
        with open_checkpoint(a) as base, open_checkpoint(b) as result:
            self._limits = Limits(base, result, scratch)
            self._nbytes = sum(path.stat().st_size for path in files_of(result))
            self._fits = result.nbytes < available_memory() // 2
            sample = _sample(base, result, scratch)
            trl = MeasuredPeer(TRL, _whole(base, result) or sample, scratch)
        self._peers = [trl, *(MeasuredPeer(peer, sample, scratch) for peer in PEERS)]
        self._encodings = [EncodingRun(name, a, b, scratch) for name in ENCODINGS]

    def report(self, rounds: int, lr: float | None, progress: Progress) -> BenchReport:
        """Time everything. ``lr``: that of made checkpoints."""
        works = self._works()
        meter = Meter(progress, "measuring", self._nbytes * len(works) * (rounds + 1))
        seconds = medians(works, rounds, done=partial(meter.add, self._nbytes))
        encodings = tuple(measured.row(seconds) for measured in self._encodings)
        return BenchReport(
            machine=facts(),
            checkpoint_bytes=self._nbytes,
            learning_rate=lr,
            rounds=rounds,
            limits={name: seconds[name] for name in self._limits.works()},
            encodings=encodings,
            peers=tuple(peer.row(seconds) for peer in self._peers),
            catch_up=self._chain.rows(seconds) if self._chain else _one_link(encodings),
        )

    def _works(self) -> dict[str, Timed]:
        works = self._limits.works()
        room: dict[str, Bytes] | None = {} if self._fits else None
        for encoding in self._encodings:
            works |= encoding.works(room)
        for peer in self._peers:
            works |= peer.works()
        return works | (self._chain.works() if self._chain else {})


def _one_link(encodings: tuple[EncodingRow, ...]) -> tuple[CatchUp, ...]:
    """A pair of checkpoints is a chain of one delta."""
    (row,) = (row for row in encodings if row.encoding == DEFAULT)
    return (CatchUp(1, row.report.changed_elements, row.report.delta_bytes, row.rebuild),)


def _sample(base: Checkpoint, result: Checkpoint, scratch: Path) -> Files:
    """A bounded part of the pair, for peers that would take minutes for all of it."""
    samples = sample_pair(base, result, pieces=_SAMPLE_PIECES, piece_bytes=_SAMPLE_PIECE_BYTES)
    places = (scratch / "sample-a.safetensors", scratch / "sample-b.safetensors")
    for sample, place in zip(samples, places, strict=True):
        with open(place, "wb") as file:
            write_file(sample, [], file)
    return Files(*places, diff(*samples, None).changed_elements, is_sample=True)


def _whole(base: Checkpoint, result: Checkpoint) -> Files | None:
    """The pair itself, if each is one safetensors file and both fit in memory twice."""
    a, *more = files_of(base)
    b, *more_of_b = files_of(result)
    fits = 2 * (base.nbytes + result.nbytes) < available_memory()
    if more or more_of_b or not fits or {a.suffix, b.suffix} != {".safetensors"}:
        return None
    return Files(a, b, diff(base, result, None).changed_elements, is_sample=False)
