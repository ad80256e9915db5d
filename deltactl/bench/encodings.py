"""An encoding of ours: its size, and how fast its delta is made, decoded, applied and rebuilt.

``encode``: two checkpoints to a delta that is written and synced, with both digests. ``decode``:
its changes alone. ``apply``: the whole result in memory, with its digest. ``rebuild``: base and
delta to a new checkpoint on disk, both checked, synced.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltactl.bench.timing import Timed
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec.bits import Bytes
from deltactl.core.digest import state_digest
from deltactl.core.errors import Malformed
from deltactl.files.atomic import remove
from deltactl.format.delta import open_delta
from deltactl.ops.apply import apply_delta
from deltactl.ops.diff import DiffReport, diff
from deltactl.replay.in_memory import apply_in_memory, decode_all


@dataclass(frozen=True, slots=True)
class EncodingRow:
    """One encoding: its delta's size, and seconds of each stage; None where it was left out."""

    encoding: str
    report: DiffReport
    encode: float
    decode: float
    apply: float | None
    rebuild: float


class EncodingRun:
    """One encoding on one pair of checkpoints."""

    def __init__(self, encoding: str, a: Path, b: Path, scratch: Path) -> None:
        self._encoding = encoding
        self._a, self._b = a, b
        self._delta = scratch / f"{encoding}.delta"
        self._rebuilt = scratch / "rebuilt"
        self._report: DiffReport | None = None
        self._mapped = ExitStack()

    def works(self, room: dict[str, Bytes] | None) -> dict[str, Timed]:
        """The stages; ``room``: arrays for the result in memory, None where it would not fit."""
        works = {
            "encode": Timed(self._encode, self._forget),
            "decode": Timed(self._decode),
            "rebuild": Timed(self._rebuild, partial(remove, self._rebuilt)),
        }
        if room is not None:
            works["apply"] = Timed(partial(self._apply, room))
        return {f"{self._encoding} {stage}": work for stage, work in works.items()}

    def row(self, seconds: Mapping[str, float]) -> EncodingRow:
        """What was measured, given the works' seconds by name."""
        assert self._report is not None
        encode, decode, rebuild = (
            seconds[f"{self._encoding} {stage}"] for stage in ("encode", "decode", "rebuild")
        )
        apply = seconds.get(f"{self._encoding} apply")
        return EncodingRow(self._encoding, self._report, encode, decode, apply, rebuild)

    def _forget(self) -> None:
        """Unmap what was encoded, which otherwise a process's end does, and is not counted."""
        self._mapped.close()
        remove(self._delta)

    def _encode(self) -> None:
        base = self._mapped.enter_context(open_checkpoint(self._a))
        result = self._mapped.enter_context(open_checkpoint(self._b))
        self._report = diff(base, result, self._delta, encoding=self._encoding)

    def _decode(self) -> None:
        with open_checkpoint(self._a) as base:
            decode_all(base, open_delta(self._delta))

    def _apply(self, room: dict[str, Bytes]) -> None:
        delta = open_delta(self._delta)
        with open_checkpoint(self._a) as base:
            state = state_digest(apply_in_memory(base, [delta], room))
        if state != delta.header.result_state:
            what = "the delta does not lead to the result that it names"
            raise Malformed(what, file=self._b, expected=delta.header.result_state, found=state)

    def _rebuild(self) -> None:
        apply_delta(self._delta, self._a, self._rebuilt)
