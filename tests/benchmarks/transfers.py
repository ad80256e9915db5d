"""Print how fast files go to and come from S3, beside boto3's transfer manager on the same server:
``python -m tests.benchmarks.transfers``.

Both in turn, several rounds, each on files that are new to the server; the ratio is the median of
the rounds' ratios. Above 1 deltactl is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import boto3
import pytest

from deltactl.bucket import open_bucket
from deltactl.core.store import Bucket
from tests.support.s3_server import BUCKET, S3Server, run_s3_server, use_s3

_MEGA = 1_000_000


class _Comparison:
    """Uploads and downloads of one size, by both."""

    def __init__(self, server: S3Server, size: int, scratch: Path) -> None:
        url = server.new_url()
        self._bucket: Bucket = open_bucket(url)
        self._client: Any = boto3.client("s3")
        self._prefix = url.removeprefix(f"s3://{BUCKET}/")
        self._source, self._target = scratch / "source", scratch / "target"
        self._source.write_bytes(Random(size).randbytes(size))
        self._count = 0

    def round(self) -> dict[str, tuple[float, float]]:
        """Seconds of deltactl and of boto3, by what was done. Who begins alternates."""
        self._count += 1
        ours, theirs = f"{self._count}/ours", f"{self._count}/theirs"
        found = {
            "upload": self._both(
                lambda: self._bucket.put(ours, self._source),
                lambda: self._client.upload_file(str(self._source), BUCKET, self._key(theirs)),
            ),
            "download": self._both(
                lambda: self._bucket.fetch(ours, self._target),
                lambda: self._client.download_file(BUCKET, self._key(theirs), str(self._target)),
            ),
        }
        for name in (ours, theirs):
            self._client.delete_object(Bucket=BUCKET, Key=self._key(name))
        return found

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _both(
        self, ours: Callable[[], object], theirs: Callable[[], object]
    ) -> tuple[float, float]:
        if self._count % 2:
            return self._timed(ours), self._timed(theirs)
        second = self._timed(theirs)
        return self._timed(ours), second

    def _timed(self, work: Callable[[], object]) -> float:
        self._target.unlink(missing_ok=True)
        os.sync()  # what the last one wrote is not this one's to wait for
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.transfers")
    parser.add_argument("--mb", type=float, nargs="+", default=[256, 64, 4])
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    """Measure and print; the exit status is 1 where boto3 is faster."""
    options = _arguments()
    slower = 0
    with pytest.MonkeyPatch.context() as patch, run_s3_server() as server:
        use_s3(patch, server.endpoint)
        for size in options.mb:
            with tempfile.TemporaryDirectory() as scratch:
                comparison = _Comparison(server, int(size * _MEGA), Path(scratch))
                comparison.round()  # connections, imports, the server's first volumes
                rounds = [comparison.round() for _ in range(options.rounds)]
            for what in ("upload", "download"):
                pairs = [each[what] for each in rounds]
                ours, theirs = (size / median(times) for times in zip(*pairs, strict=True))
                ratio = median(b / a for a, b in pairs)
                slower += ratio < 1
                print(
                    f"{what:<9} {size:6g} MB  deltactl {ours:7.1f} MB/s  boto3 {theirs:7.1f} MB/s"
                    f"  ratio {ratio:.2f}"
                )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
