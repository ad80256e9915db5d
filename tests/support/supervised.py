"""Run a command that leaves nothing behind: ``python -m tests.support.supervised COMMAND...``.

The command and whatever it starts end when it ends by itself, when this process gets SIGTERM, and
when the standard input closes: the starter holds the other end of that pipe, so the kernel closes
it even where the starter is killed. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 10.0  # seconds between the request to end and the end


def main(command: list[str]) -> int:
    """Exit status: that of the command, or 128 and more where a signal ended it."""
    # Orphans become children of this process, wherever in the tree they were.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended, telling = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(telling, b"."))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def tell() -> None:
        child.wait()
        os.write(telling, b".")

    threading.Thread(target=tell, daemon=True).start()
    select.select([0, ended], [], [])
    child.terminate()
    try:
        status = child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        status = child.wait()
    _end_the_others()
    return status if status >= 0 else 128 - status


def _end_the_others() -> None:
    while children := children_of(os.getpid()):
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def children_of(pid: int) -> list[int]:
    """The processes whose parent this is now."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def descendants_of(pid: int) -> list[int]:
    """Children, their children and so on; one that ends meanwhile may be missing."""
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
