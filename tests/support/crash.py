"""A verb of the library killed at every moment: ``crashes`` runs it in processes that end so.

Each run dies just before its n-th call of something that changes a file system, n = 1, 2, ...,
until one comes to its end. A write that is hit is done by half. Each has its own copy of the start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from deltactl.bucket.local import LocalBucket
from deltactl.files import atomic
from deltactl.ops.apply import apply_delta
from deltactl.ops.copy import copy_chain
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from tests.support.remote import RemoteBucket

KILLED = 77
_CALLS = (
    "chmod", "copy_file_range", "fsync", "ftruncate", "link", "mkdir", "pwrite", "rename",
    "replace", "rmdir", "unlink",
)  # fmt: skip


def crashes(root: Path, verb: str, **options: Any) -> list[tuple[Path, str]]:
    """The copies of ``root/start`` that each crash left, and the call that it did not live to make.

    ``verb``: a key of VERBS; ``fallback=True``: on a system that cannot exchange two names at once.
    """
    command = [sys.executable, "-m", "tests.support.crash"]
    request = json.dumps({"root": str(root), "verb": verb} | options)
    done = subprocess.run(
        command, input=request, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return [(root / str(n), call) for n, call in enumerate(json.loads(done.stdout), 1)]


def _apply(place: Path) -> None:
    apply_delta(place.parent / "delta.safetensors", place / "model", None)


def _apply_file(place: Path) -> None:
    apply_delta(place.parent / "delta.safetensors", place / "model.safetensors", None)


def _pull(place: Path) -> None:
    pull(LocalBucket(place.parent / "bucket"), place / "model")


def _pull_remote(place: Path) -> None:
    bucket = RemoteBucket(place.parent / "bucket", part_bytes=700, jobs=2)
    pull(bucket, place / "model")


def _push(place: Path) -> None:
    os.environ["DELTACTL_CACHE"] = str(place / "cache")
    push(place.parent / "source", LocalBucket(place / "bucket"), step=2, anchor_every=2)


def _copy(place: Path) -> None:
    copy_chain(LocalBucket(place.parent / "bucket"), LocalBucket(place / "copy"))


VERBS: dict[str, Callable[[Path], None]] = {
    "apply": _apply,
    "apply file": _apply_file,
    "copy": _copy,
    "pull": _pull,
    "pull remote": _pull_remote,
    "push": _push,
}


def _die_before(number: int, report: int) -> None:
    """Let this process end at the ``number``-th call, whose name it writes to ``report``."""
    lock, calls = threading.Lock(), count(1)

    def dying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                if next(calls) == number:
                    if name == "pwrite":
                        fd, data, at = args
                        function(fd, data[: len(data) // 2], at)
                    os.write(report, name.encode())
                    os._exit(KILLED)
            return function(*args, **kwargs)

        return call

    os.fsync = lambda _: None  # the machine does not fail, only the process
    for name in _CALLS:
        setattr(os, name, dying(name, getattr(os, name)))
    atomic._renameat2 = dying("renameat2", atomic._renameat2)


def _one(request: dict[str, Any], place: Path, number: int, report: int) -> int:
    """In a forked process."""
    if request.get("fallback"):
        atomic._renameat2 = lambda *_: False
    _die_before(number, report)
    VERBS[request["verb"]](place)
    return 0


def main() -> None:
    request = json.load(sys.stdin)
    root = Path(request["root"])
    calls = []
    for number in count(1):
        place = root / str(number)
        shutil.copytree(root / "start", place, symlinks=True)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                status = _one(request, place, number, writer)
            finally:
                sys.excepthook(*sys.exc_info()) if status else None
                os._exit(status)
        os.close(writer)
        with open(reader) as stream:
            calls.append(stream.read())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            shutil.rmtree(place)
            break
        if status != KILLED:
            sys.exit(f"run {number} ended with {status}")
    json.dump(calls[:-1], sys.stdout)


if __name__ == "__main__":
    main()
