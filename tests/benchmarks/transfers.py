"""Print how fast files go to and come from S3, beside boto3's transfer manager on the same server:
``python -m tests.benchmarks.transfers``.

Of deltactl a download is measured twice: as the bucket's ``fetch``, which checks nothing, as boto3
does not; and as ``pull`` does it, with a journal, and BLAKE3 of every byte as it comes. The latter
stands beside boto3 alone, and beside boto3 and BLAKE3 of the file that it wrote.

In each round everybody uploads and then everybody downloads, in an order that is drawn anew, on a
file that is new to the server, and after the disk is quiet; before each download an upload of
boto3's went through the memory. The ratio is the median of the rounds' ratios, and beside it are
their quartiles. Above 1 deltactl is faster. The exit status is 1 if for any row it is slower in
three rounds of four.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import boto3
import pytest

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.ranges import Tally, Wanted, transfer
from deltactl.core.digest import hasher
from deltactl.core.progress import Meter, silent
from deltactl.format.anchor import AnchorFile
from deltactl.format.checker import expected_file
from tests.support.s3_server import BUCKET, S3Server, run_s3_server, use_s3

_MEGA = 1_000_000
_PIECE = 1 << 18

ROWS = {
    "upload": ("put", "upload_file"),
    "download, unchecked": ("fetch", "download_file"),
    "download, checked by deltactl": ("transfer", "download_file"),
    "download, checked by both": ("transfer", "download_file, BLAKE3"),
}
"""What is compared: deltactl's work and boto3's."""


class _Comparison:
    """All that is compared, on files of one size."""

    def __init__(self, server: S3Server, size: int, scratch: Path) -> None:
        url = server.new_url()
        self._bucket: Bucket = open_bucket(url)
        self._client: Any = boto3.client("s3")
        self._prefix = url.removeprefix(f"s3://{BUCKET}/")
        self._source, self._target = scratch / "source", scratch / "target"
        self._source.write_bytes(Random(size).randbytes(size))
        self._digest = _digest(self._source)
        self._random, self._count = Random(size), 0
        self._uploads: dict[str, Callable[[str], object]] = {
            "put": lambda name: self._bucket.put(name, self._source),
            "upload_file": self._upload,
        }
        self._downloads: dict[str, Callable[[str], object]] = {
            "fetch": lambda name: self._bucket.fetch(name, self._target),
            "transfer": self._transfer,
            "download_file": self._download,
            "download_file, BLAKE3": self._download_and_check,
        }

    def round(self) -> dict[str, float]:
        """Seconds of each work."""
        found = {}
        for works in (self._uploads, self._downloads):
            for work in self._random.sample([*works], len(works)):
                found[work] = self._timed(works[work], is_there=works is self._downloads)
        return found

    def _timed(self, work: Callable[[str], object], *, is_there: bool) -> float:
        self._count += 1
        name = f"object-{self._count}"
        if is_there:
            self._upload(name)
        self._target.unlink(missing_ok=True)
        os.sync()  # what the last one wrote is not this one's to wait for
        start = time.perf_counter()
        work(name)
        seconds = time.perf_counter() - start
        self._client.delete_object(Bucket=BUCKET, Key=self._key(name))
        return seconds

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _upload(self, name: str) -> None:
        self._client.upload_file(str(self._source), BUCKET, self._key(name))

    def _download(self, name: str) -> None:
        self._client.download_file(BUCKET, self._key(name), str(self._target))

    def _download_and_check(self, name: str) -> None:
        self._download(name)
        assert _digest(self._target) == self._digest

    def _transfer(self, name: str) -> None:
        size = self._source.stat().st_size
        partial = self._target.with_suffix(".partial")
        expected = expected_file(AnchorFile(name, size, self._digest, False), name, None)
        wanted = Wanted(expected, self._target, partial)
        transfer(self._bucket, [wanted], Meter(silent, "fetching", size), Tally())


def _digest(path: Path) -> str:
    digest = hasher()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return str(digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Ratio:
    """boto3's time over deltactl's: the median of all rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def slower(self) -> bool:
        """Whether deltactl is, in three rounds of four."""
        return self.high < 1


def ratio(rounds: Sequence[Mapping[str, float]], row: str) -> Ratio:
    """Of a row, from each round's seconds by work."""
    ours, theirs = ROWS[row]
    low, middle, high = quantiles(
        [each[theirs] / each[ours] for each in rounds], method="inclusive"
    )
    return Ratio(middle, low, high)


def _print(size: float, rounds: Sequence[Mapping[str, float]]) -> None:
    for row, works in ROWS.items():
        ours, theirs = (size / median(each[work] for each in rounds) for work in works)
        found = ratio(rounds, row)
        print(
            f"{size:3g} MB  {row:<29}  deltactl {ours:6.1f} MB/s  boto3 {theirs:6.1f} MB/s"
            f"  ratio {found.median:.2f} ({found.low:.2f} to {found.high:.2f})",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.transfers")
    parser.add_argument("--mb", type=float, nargs="+", default=[256, 64, 4])
    parser.add_argument("--rounds", type=int, default=7, help="2 or more")
    return parser.parse_args()


def main() -> int:
    """Measure and print; the exit status says whether deltactl is slower anywhere."""
    options = _arguments()
    slower = False
    with pytest.MonkeyPatch.context() as patch, run_s3_server() as server:
        use_s3(patch, server.endpoint)
        for size in options.mb:
            with tempfile.TemporaryDirectory() as scratch:
                comparison = _Comparison(server, int(size * _MEGA), Path(scratch))
                comparison.round()  # connections, imports, the server's first volumes
                rounds = [comparison.round() for _ in range(options.rounds)]
            _print(size, rounds)
            slower |= any(ratio(rounds, row).slower for row in ROWS)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
