"""What is logged of requests to a bucket behind a network."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.bucket.test_retrying import CALLS, Shaky, Time, busy, over, source, time

__all__ = ["source", "time"]


@pytest.mark.parametrize("call", CALLS)
def test_each_request_and_each_failed_try(
    call: str, tmp_path: Path, source: Path, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "deltactl.bucket")
    bucket = Shaky(tmp_path / "bucket")
    bucket.put("there", source)
    bucket.errors = busy(2)
    CALLS[call](over(bucket, time), source)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.INFO, logging.DEBUG]
    tries = [record.getMessage() for record in caplog.records[:2]]
    assert [f"try {n} of at most 9: " in said for n, said in enumerate(tries, 1)] == [True, True]
    assert all(f"{bucket.url}: {call}" in record.getMessage() for record in caplog.records)
