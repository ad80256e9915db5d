"""How things are measured: the best of several runs, side by side, and memory from outside."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def best_in_turn(works: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Seconds of the fastest run of each, after one warm-up; run in turn, so that a machine whose
    speed drifts is as slow for one as for the other."""
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            took = time.perf_counter() - start
            if number:
                best[name] = min(best.get(name, took), took)
    return best


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
