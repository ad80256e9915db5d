"""Print every limit beside what was measured: ``python -m tests.benchmarks``.

Speeds and sizes are those of ``deltactl bench``, whose report comes first. Without A and B the two
checkpoints are made. Exit status 1 if a limit is not reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from deltactl.bench.run import ROUNDS, bench
from deltactl.cli.bench import bench_lines
from deltactl.cli.interface import text
from deltactl.codec import ENCODINGS
from tests.benchmarks.limits import (
    Kind,
    Row,
    kind_rows,
    kinds,
    memory_rows,
    size_rows,
    speed_rows,
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("a", nargs="?", type=Path, help="a safetensors file")
    parser.add_argument("b", nargs="?", type=Path, help="the same a step later")
    parser.add_argument("--params", type=int, default=1 << 28, help="parameters of made ones")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kind-params", type=int, default=1 << 24, help="of other kinds; 0: none")
    parser.add_argument("--memory-gb", type=float, default=4.0, help="0: no memory is measured")
    parser.add_argument("--scratch", type=Path, help="where files are made")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and say by the exit status whether every limit is reached."""
    options = _arguments()
    found = bench(
        options.a,
        options.b,
        params=options.params,
        rounds=options.rounds,
        scratch=options.scratch,
    )
    document = found.facts()
    of_kinds = kinds(options.kind_params, options.scratch) if options.kind_params else []
    rows = [*speed_rows(document), *size_rows(document), *kind_rows(of_kinds)]
    if options.memory_gb:
        rows += memory_rows(options.memory_gb, options.scratch or Path(tempfile.gettempdir()))
    if options.json:
        tables = {"bench": document, "kinds": [vars(kind) for kind in of_kinds]}
        print(json.dumps({"rows": [vars(row) for row in rows], **tables}))
    else:
        print(*bench_lines(document), *_kinds(of_kinds), "", *map(_verdict, rows), sep="\n")
    return 0 if all(row.reached for row in rows) else 1


def _kinds(found: list[Kind]) -> list[str]:
    rows = [
        (kind.name, text.share(kind.changed), *(f"{size:.2f}" for size in kind.sizes.values()))
        for kind in found
    ]
    head = ("bytes per changed element", ">changed", *(f">{name}" for name in ENCODINGS))
    return ["", *text.table(head, rows)]


def _verdict(row: Row) -> str:
    bound = ">=" if row.at_least else "<="
    verdict = "reached" if row.reached else "MISSED"
    return f"{row.what:<42} {row.found:9.2f} {row.unit:<5} {bound} {row.limit:<6.4g} {verdict}"


if __name__ == "__main__":
    sys.exit(main())
