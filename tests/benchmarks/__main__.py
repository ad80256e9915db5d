"""Print every limit beside what was measured: ``python -m tests.benchmarks``.

Without A and B the two checkpoints are made. Exit status 1 if a limit is not reached.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

from deltactl.core.parallel import cores
from tests.benchmarks.limits import Row, memory_rows, size_rows, speed_rows
from tests.support.pairs import write_pair


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("a", nargs="?", type=Path, help="a safetensors file")
    parser.add_argument("b", nargs="?", type=Path, help="the same a step later")
    parser.add_argument("--params", type=int, default=1 << 28, help="parameters of made ones")
    parser.add_argument("--lr", type=float, default=1e-6, help="their learning rate")
    parser.add_argument("--memory-gb", type=float, default=4.0, help="0: no memory is measured")
    parser.add_argument("--scratch", type=Path, help="where files are made")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and say by the exit status whether every limit is reached."""
    options = _arguments()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        a, b = options.a, options.b
        if a is None or b is None:
            made = write_pair(Path(scratch), options.params, lr=options.lr)
            a, b = (place / "model.safetensors" for place in made)
        rows, speed = speed_rows(a, b)
        rows += size_rows(a, b)
    if options.memory_gb:
        rows += memory_rows(options.memory_gb, options.scratch or Path(tempfile.gettempdir()))
    if options.json:
        print(json.dumps({"rows": [vars(row) for row in rows], "speed": speed}))
    else:
        _print(rows, speed)
    return 0 if all(row.reached for row in rows) else 1


def _print(rows: list[Row], speed: dict[str, float]) -> None:
    print(f"{cores()} cores, {platform.machine()}, Python {platform.python_version()}")
    for name, gigabytes in speed.items():
        print(f"{name:<42} {gigabytes:9.2f} GB of one checkpoint a second")
    print()
    for row in rows:
        bound = ">=" if row.at_least else "<="
        verdict = "reached" if row.reached else "MISSED"
        print(f"{row.what:<42} {row.found:9.2f} {row.unit:<5} {bound} {row.limit:<6g} {verdict}")


if __name__ == "__main__":
    sys.exit(main())
