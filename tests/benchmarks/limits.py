"""The limits that deltactl sets itself, each measured beside what it is a share of."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltactl.core.checkpoint import open_checkpoint
from deltactl.core.diff import diff
from tests.benchmarks import peers
from tests.benchmarks.measure import anonymous_peak, best_in_turn
from tests.support.pairs import write_pair


@dataclass(frozen=True)
class Row:
    """One limit: ``found`` is to be at most, or at least, ``limit``."""

    what: str
    found: float
    limit: float
    at_least: bool
    unit: str

    @property
    def reached(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def speed_rows(a: Path, b: Path) -> tuple[list[Row], dict[str, float]]:
    """diff with both digests against reading, hashing, and TRL's way; GB of one file a second."""
    with tempfile.TemporaryDirectory(dir=a.parent) as scratch:
        out = Path(scratch)
        works = {
            "diff": partial(_diff, a, b, out / "delta.safetensors", "ulp"),
            "read both": partial(peers.read_both, a, b),
            "read and BLAKE3 both": partial(peers.read_and_hash_both, a, b),
            "TRL's way": partial(peers.trl_way, a, b, out / "trl.safetensors"),
        }
        seconds = best_in_turn(works)
    speed = {name: a.stat().st_size / took / 1e9 for name, took in seconds.items()}
    rows = [
        Row("diff, GB of one checkpoint a second", speed["diff"], 2.0, True, "GB/s"),
        Row("diff, share of reading both", speed["diff"] / speed["read both"], 0.16, True, "x"),
        Row("diff, times TRL's way", speed["diff"] / speed["TRL's way"], 1.5, True, "x"),
    ]
    return rows, speed


def _diff(a: Path, b: Path, out: Path, encoding: str):
    with open_checkpoint(a) as base, open_checkpoint(b) as result:
        return diff(base, result, out, encoding=encoding)


def size_rows(a: Path, b: Path) -> list[Row]:
    """Bytes of the whole delta file per changed element; TRL's two encodings beside ours."""
    limits = {"ulp": 1.30, "gap_delta": 4.05, "raw": 6.05}
    rows = []
    with open_checkpoint(a) as base, open_checkpoint(b) as result:
        for encoding, limit in limits.items():
            found = diff(base, result, None, encoding=encoding).bytes_per_changed_element or 0.0
            rows.append(Row(f"{encoding}, bytes per changed element", found, limit, False, "B"))
    return rows


_MEMORY = {
    "diff": """
import sys; from pathlib import Path
from deltactl.core.checkpoint import open_checkpoint; from deltactl.core.diff import diff
a, b, scratch = map(Path, sys.argv[1:])
diff(open_checkpoint(a), open_checkpoint(b), scratch / "delta.safetensors")
""",
    "apply": """
import sys; from pathlib import Path
from deltactl.core.apply import apply_delta
a, b, scratch = map(Path, sys.argv[1:])
apply_delta(scratch / "delta.safetensors", a, scratch / "applied")
""",
    "push": """
import os, sys; from pathlib import Path
from deltactl.bucket import open_bucket; from deltactl.core.publish import push
a, b, scratch = map(Path, sys.argv[1:])
os.environ["DELTACTL_CACHE"] = str(scratch / "cache")
push(a, open_bucket(str(scratch / "bucket"))); push(b, open_bucket(str(scratch / "bucket")))
""",
    "pull": """
import sys; from pathlib import Path
from deltactl.bucket import open_bucket; from deltactl.core.pull import pull
a, b, scratch = map(Path, sys.argv[1:])
pull(open_bucket(str(scratch / "bucket")), scratch / "pulled")
""",
}


def memory_rows(gigabytes: float, where: Path) -> list[Row]:
    """Peak memory above the mapped files, for a checkpoint and for one twice as large."""
    peaks = {size: _peaks(size, where) for size in (gigabytes, 2 * gigabytes)}
    rows = []
    for size, of_size in peaks.items():
        for verb, peak in of_size.items():
            rows.append(Row(f"{verb} of {size:g} GB, peak memory", peak / 1e6, 600, False, "MB"))
    for verb in _MEMORY:
        growth = peaks[2 * gigabytes][verb] / peaks[gigabytes][verb]
        rows.append(Row(f"{verb}, memory at twice the size", growth, 1.15, False, "x"))
    return rows


def _peaks(gigabytes: float, where: Path) -> dict[str, int]:
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        a, b = write_pair(Path(scratch), int(gigabytes * 1e9 / 2))
        arguments = [str(a), str(b), scratch]
        return {verb: anonymous_peak(code, arguments) for verb, code in _MEMORY.items()}
