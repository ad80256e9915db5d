"""What it takes to catch up: a base, and 1, 10 or 100 deltas merged into one rebuild."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from deltactl.bench.made import write_steps
from deltactl.bench.timing import Timed
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.files.atomic import remove
from deltactl.format.delta import open_delta
from deltactl.ops.apply import write_result
from deltactl.ops.diff import diff

LINKS = (1, 10, 100)
PARAMS = 1 << 21
CHAIN_BYTES = (max(LINKS) + 1) * PARAMS * 2
"""Disk that the chain's checkpoints take."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """``links`` deltas of ``changed_elements`` together, and seconds to rebuild the last state."""

    links: int
    changed_elements: int
    delta_bytes: int
    seconds: float


class MadeChain:
    """A small chain of made checkpoints; only its base and the deltas stay on disk."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        steps = write_steps(scratch, PARAMS, max(LINKS) + 1, tensors=2)
        self._base = steps[0]
        self._deltas = []
        for number, (before, after) in enumerate(pairwise(steps)):
            out = scratch / f"{number}.delta"
            with open_checkpoint(before) as base, open_checkpoint(after) as result:
                self._deltas.append((out, diff(base, result, out)))
        for step in steps[1:]:
            remove(step)

    def works(self) -> dict[str, Timed]:
        """By name; those of ``row``."""
        clear = partial(remove, self._scratch / "rebuilt")
        return {_name(links): Timed(partial(self._rebuild, links), clear) for links in LINKS}

    def _rebuild(self, links: int) -> None:
        deltas = [open_delta(path) for path, _ in self._deltas[:links]]
        for delta in deltas:
            delta.check_payload()
        out, state = self._scratch / "rebuilt", deltas[-1].header.result_state
        with open_checkpoint(self._base) as base:
            write_result(base, deltas, out, in_place=False, expected=state)

    def rows(self, seconds: Mapping[str, float]) -> tuple[CatchUp, ...]:
        """What was measured, given the works' seconds by name."""
        return tuple(self._row(links, seconds[_name(links)]) for links in LINKS)

    def _row(self, links: int, seconds: float) -> CatchUp:
        reports = [report for _, report in self._deltas[:links]]
        changed = sum(report.changed_elements for report in reports)
        return CatchUp(links, changed, sum(report.delta_bytes for report in reports), seconds)


def _name(links: int) -> str:
    return f"catch up {links}"
