"""How memory is measured: from outside."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path


def anonymous_peak(code: str, arguments: Sequence[str]) -> int:
    """Peak bytes of a Python process that are not mapped files (RssAnon of /proc), sampled every 2
    ms.

    ``code`` runs with ``arguments`` as sys.argv[1:]. The interpreter and its imports are included.
    """
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    peak = 0
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        status = Path(f"/proc/{process.pid}/status")
        while not done.wait(0.002):
            try:
                text = status.read_text()
            except OSError:
                return
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if "RssAnon" in fields:
                peak = max(peak, int(fields["RssAnon"].split()[0]) * 1024)

    thread = threading.Thread(target=sample)
    thread.start()
    code_of_exit = process.wait()
    done.set()
    thread.join()
    if code_of_exit:
        raise RuntimeError(f"the measured process failed with {code_of_exit}")
    return peak
