"""What a benchmark found, and the rates and ratios that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltactl.bench.catch_up import CatchUp
from deltactl.bench.encodings import EncodingRow
from deltactl.bench.peers import PeerRow


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run. ``checkpoint_bytes``: of one checkpoint's files; ``learning_rate``: of made
    checkpoints, else None; ``limits``: seconds by name, those of machine.Limits.works.
    """

    machine: Mapping[str, Any]
    checkpoint_bytes: int
    learning_rate: float | None
    rounds: int
    limits: Mapping[str, float]
    encodings: tuple[EncodingRow, ...]
    peers: tuple[PeerRow, ...]
    catch_up: tuple[CatchUp, ...]

    def facts(self) -> dict[str, Any]:
        """JSON-ready: bytes, seconds, bytes of one checkpoint a second, and ratios."""
        report = self.encodings[0].report
        return {
            "machine": dict(self.machine),
            "checkpoint": {
                "bytes": self.checkpoint_bytes,
                "elements": report.total_elements,
                "changed_elements": report.changed_elements,
                "sparsity": report.sparsity,
                "learning_rate": self.learning_rate,
            },
            "rounds": self.rounds,
            "limits": {name: self._rate(taken) for name, taken in self.limits.items()},
            "encodings": [self._encoding(row) for row in self.encodings],
            "peers": [_peer(row) for row in self.peers],
            "catch_up": [
                {
                    "links": row.links,
                    "changed_elements": row.changed_elements,
                    "bytes": row.delta_bytes,
                    "seconds": row.seconds,
                    "seconds_per_changed_element": _ratio(row.seconds, row.changed_elements),
                }
                for row in self.catch_up
            ],
        }

    def _rate(self, seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "bytes_per_second": self.checkpoint_bytes / seconds}

    def _encoding(self, row: EncodingRow) -> dict[str, Any]:
        limits = self.limits
        return {
            "encoding": row.encoding,
            "bytes": row.report.delta_bytes,
            "bytes_per_changed_element": row.report.bytes_per_changed_element,
            "times_smaller": row.report.times_smaller,
            "encode": {
                **self._rate(row.encode),
                "share_of_reading": limits["read"] / row.encode,
                "times_read_and_hash": row.encode / limits["read_and_hash"],
            },
            "decode": self._rate(row.decode),
            "apply": None if row.apply is None else self._rate(row.apply),
            "rebuild": {
                **self._rate(row.rebuild),
                "share_of_copy": limits["copy_and_hash"] / row.rebuild,
                "share_of_synced_copy": limits["copy_sync_and_hash"] / row.rebuild,
            },
        }


def _peer(row: PeerRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "problem": row.problem,
        "sample_bytes": row.nbytes if row.files.is_sample else None,
        "bytes": row.coded_bytes,
        "bytes_per_changed_element": _ratio(row.coded_bytes, row.files.changed_elements),
        "times_smaller": _ratio(row.nbytes, row.coded_bytes),
        "encode": _rate(row.nbytes, row.encode),
        "decode": _rate(row.nbytes, row.decode),
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _rate(size: int, seconds: float | None) -> dict[str, float] | None:
    return None if seconds is None else {"seconds": seconds, "bytes_per_second": size / seconds}
