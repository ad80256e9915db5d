"""A client that dies: ``python -m tests.support.killed_client``, one JSON object a line on stdin.

``{"bucket", "step", "url", "dies_before"}``: apply the step, and die without a word just before the
request of that number, counted from 0; looks after what works in the background, whose number is
chance, are not counted. For each line one of stdout: the exit status of the process that did it, 77
where it died.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from deltactl.bucket.local import LocalBucket
from deltactl.server.apply import apply_to_servers
from deltactl.server.http import wire
from deltactl.server.update import Options

DIED = 77

_BACKGROUND = ("deltactl_identify", "deltactl_stage")


def _die_before(number: int) -> None:
    asked = wire.Wire._ask
    done: list[str] = []

    def ask(self: wire.Wire, method: str, path: str, query: Any, body: Any) -> dict[str, Any]:
        name = str((body or {}).get("method", path))
        last = done[-1] if done else ""
        if not (name == last or (name == "deltactl_state" and last in _BACKGROUND)):
            if len(done) == number:
                os._exit(DIED)
            done.append(name)
        return asked(self, method, path, query, body)

    wire.Wire._ask = ask  # type: ignore[method-assign]


def _one(request: dict[str, Any]) -> int:
    """In a forked process."""
    _die_before(request["dies_before"])
    bucket = LocalBucket(Path(request["bucket"]))
    done = apply_to_servers(bucket, request["step"], [request["url"]], Options(grace=0))
    return int(done.replicas[0].error is not None)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                status = _one(json.loads(line))
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
