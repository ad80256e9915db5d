"""The command line over buckets that hang: ``python -m tests.support.hanging N ARGS...``

From the N-th read on no answer comes; "hangs" on stderr says when that is so. Buckets whose names
begin with "remote" are behind a network, the others are what they are.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import deltactl.bucket
from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.cli.app import main
from tests.support.remote import Fault, RemoteBucket


def hanging(after: int) -> Fault:
    lock, done = threading.Lock(), [0]

    def fault(name: str, start: int, data: bytes) -> bytes:
        with lock:
            done[0] += 1
            number = done[0]
        if number == after + 1:
            print("hangs", file=sys.stderr, flush=True)
        if number > after:
            threading.Event().wait()
        return data

    return fault


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    after = int(sys.argv.pop(1))

    def opened(url: str, **options: Any) -> Bucket:
        if not Path(url).name.startswith("remote"):
            return open_bucket(url, **options)
        bucket = RemoteBucket(Path(url), 1000)
        bucket.faults = [hanging(after)]
        return bucket

    deltactl.bucket.open_bucket = opened
    main()
