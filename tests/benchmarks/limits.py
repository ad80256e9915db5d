"""The limits that deltactl sets itself, beside what ``deltactl bench`` and these find."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltactl.bench.made import write_steps
from deltactl.bench.peers import TRL
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import ENCODINGS
from deltactl.ops.diff import diff
from tests.benchmarks.measure import anonymous_peak

GIGA = 1e9
SIZES = {"raw": 6.05, "gap_delta": 4.05, "ulp": 1.25, "ulp_ctx": 0.90}
"""Bytes of the whole delta for each changed element, on bf16 at learning rate 1e-6."""

OURS = ("ulp", "ulp_ctx")
"""Encodings that promise never to be larger than TRL's gap_delta."""


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


def speed_rows(document: Mapping[str, Any]) -> list[Row]:
    """Of what ``deltactl bench --json`` prints: speeds, most as shares of the machine's own."""
    found = {row["encoding"]: row for row in document["encodings"]}
    encode, rebuild = found["ulp"]["encode"], found["ulp"]["rebuild"]
    (trl,) = (row["encode"] for row in document["peers"] if row["name"] == TRL.name)
    times_trl = encode["bytes_per_second"] / trl["bytes_per_second"]
    rows = [
        Row("diff, ulp", encode["bytes_per_second"] / GIGA, 2.0, True, "GB/s"),
        Row("diff, ulp, share of reading both", encode["share_of_reading"], 0.16, True, "x"),
        Row("diff, ulp, times TRL's way", times_trl, 1.5, True, "x"),
        Row(
            "diff, ulp, time over read and BLAKE3 both",
            encode["times_read_and_hash"],
            1.7,
            False,
            "x",
        ),
        Row(
            "apply in memory with digest, ulp",
            found["ulp"]["apply"]["bytes_per_second"] / GIGA,
            2.0,
            True,
            "GB/s",
        ),
        Row("rebuild, ulp, share of cp and BLAKE3", rebuild["share_of_copy"], 0.8, True, "x"),
    ]
    if "ulp_ctx" in found:
        speed = found["ulp_ctx"]["encode"]["bytes_per_second"] / GIGA
        rows.append(Row("diff, ulp_ctx", speed, 0.5, True, "GB/s"))
    return rows


def size_rows(document: Mapping[str, Any]) -> list[Row]:
    """Of the same: bytes for each changed element."""
    return [
        Row(
            f"{row['encoding']}, bytes per changed element",
            row["bytes_per_changed_element"],
            SIZES[row["encoding"]],
            False,
            "B",
        )
        for row in document["encodings"]
    ]


KINDS: dict[str, dict[str, Any]] = {
    "bf16, lr 1e-7": {"lr": 1e-7},
    "bf16, lr 3e-6": {"lr": 3e-6},
    "fp32, lr 1e-6": {"lr": 1e-6, "dtype": "F32"},
    "fp8, lr 1e-6": {"lr": 1e-6, "dtype": "F8_E4M3"},
}
"""Checkpoints that no encoding of ours was made for."""


@dataclass(frozen=True)
class Kind:
    """One of KINDS: share of the elements that changed, and bytes for each by encoding."""

    name: str
    changed: float
    sizes: dict[str, float]


def kinds(params: int, where: Path | None) -> list[Kind]:
    """Every encoding on every kind of checkpoint."""
    found = []
    for name, options in KINDS.items():
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            a, b = write_steps(Path(scratch), params, 2, **options)
            with open_checkpoint(a) as base, open_checkpoint(b) as result:
                reports = {e: diff(base, result, None, encoding=e) for e in ENCODINGS}
        changed = 1 - reports["raw"].sparsity
        sizes = {e: report.bytes_per_changed_element or 0.0 for e, report in reports.items()}
        found.append(Kind(name, changed, sizes))
    return found


def kind_rows(found: list[Kind]) -> list[Row]:
    """None of ours is to be worse than TRL's smaller one."""
    return [
        Row(f"{encoding}, {kind.name}", kind.sizes[encoding], kind.sizes["gap_delta"], False, "B")
        for kind in found
        for encoding in OURS
        if encoding in kind.sizes
    ]


_MEMORY = {
    "diff": """
import sys; from pathlib import Path
from deltactl.checkpoint.checkpoint import open_checkpoint; from deltactl.ops.diff import diff
a, b, scratch = map(Path, sys.argv[1:])
diff(open_checkpoint(a), open_checkpoint(b), scratch / "delta.safetensors")
""",
    "apply": """
import sys; from pathlib import Path
from deltactl.ops.apply import apply_delta
a, b, scratch = map(Path, sys.argv[1:])
apply_delta(scratch / "delta.safetensors", a, scratch / "applied")
""",
    "push": """
import os, sys; from pathlib import Path
from deltactl.bucket import open_bucket; from deltactl.ops.push import push
a, b, scratch = map(Path, sys.argv[1:])
os.environ["DELTACTL_CACHE"] = str(scratch / "cache")
push(a, open_bucket(str(scratch / "bucket"))); push(b, open_bucket(str(scratch / "bucket")))
""",
    "pull": """
import sys; from pathlib import Path
from deltactl.bucket import open_bucket; from deltactl.ops.pull import pull
a, b, scratch = map(Path, sys.argv[1:])
pull(open_bucket(str(scratch / "bucket")), scratch / "pulled")
""",
}


_CHANCE = 40
"""MB by which one run's peak differs from the next's: by what the threads hold at one moment."""


def memory_rows(gigabytes: float, where: Path) -> list[Row]:
    """Peak memory above the mapped files, for a checkpoint and for one twice as large."""
    peaks = {size: _peaks(size, where) for size in (gigabytes, 2 * gigabytes)}
    rows = []
    for size, of_size in peaks.items():
        for verb, peak in of_size.items():
            rows.append(Row(f"{verb} of {size:g} GB, peak memory", peak / 1e6, 600, False, "MB"))
    for verb in _MEMORY:
        growth = (peaks[2 * gigabytes][verb] - peaks[gigabytes][verb]) / 1e6
        rows.append(Row(f"{verb}, more at twice the size", growth, _CHANCE, False, "MB"))
    return rows


def _peaks(gigabytes: float, where: Path) -> dict[str, int]:
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        a, b = write_steps(Path(scratch), int(gigabytes * 1e9 / 2), 2)
        arguments = [str(a), str(b), scratch]
        return {verb: anonymous_peak(code, arguments) for verb, code in _MEMORY.items()}
