"""Parts of a loop that do what a test wants: ``python -m tests.support.loop_parts JSON``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

from deltactl.core.errors import Conflict
from deltactl.demo.loop.processes import part, tell


def work(settings: dict[str, Any]) -> None:
    act = settings["act"]
    if act == "tell":
        print("a library's own words")
        os.write(1, b"and more\n")
        tell(event="first", text="a\nb")
        tell(event="last", n=1)
    elif act == "fail":
        raise Conflict("it is another", file="x", step=3, expected=1, found=2, hint="try")
    elif act == "crash":
        raise RuntimeError("no reason at all")
    elif act == "hang":
        tell(event="ready", pid=os.getpid())
        threading.Event().wait()
    elif act == "shout":
        sys.stderr.write("x" * (1 << 20))
        threads = [threading.Thread(target=_shout, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _shout(number: int) -> None:
    for n in range(100):
        tell(event="shout", number=number, n=n, text="y" * 1000)


def family() -> None:
    """Not on a leash itself: a process that has children and grandchildren, and says which."""
    code = "import subprocess,sys,time; p=subprocess.Popen(['sleep','600'],start_new_session=True)"
    code += "; print(p.pid, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    print(os.getpid(), child.pid, child.stdout.readline().strip(), file=sys.stderr, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    family() if sys.argv[1] == "family" else part(work)
