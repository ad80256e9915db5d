"""When a chain gets its next anchor.

An anchor costs its bytes once, at the trainer. Without it every replica that starts, or that fell
behind, fetches and replays all deltas since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deltactl.core.errors import UsageError

BANDWIDTH = 1e9
"""Bytes a second that are counted on where nobody says better."""

ANCHOR_EVERY = 10
"""TRL's rule: the first step, and every tenth, is an anchor."""

REPLAY_SECONDS = 6e-8
"""For each changed element of a long run of deltas, as ``deltactl bench`` prints for a hundred."""


@dataclass(frozen=True, slots=True)
class Run:
    """The deltas since the newest anchor, that of ``step`` with them. Sizes in bytes; ``changed``
    counts elements."""

    step: int
    anchor_step: int
    anchor_bytes: int
    delta_bytes: int
    changed: int


class AnchorPolicy(Protocol):
    """A rule for anchors. The first step of a chain is one anyway."""

    def due(self, run: Run) -> bool:
        """Whether the step at the end of the run is to be an anchor as well."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Each step at or past the next multiple of ``steps`` (TRL's rule); 0: none but the first."""

    steps: int = ANCHOR_EVERY

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UsageError("the cadence of anchors is not negative", found=self.steps)

    def due(self, run: Run) -> bool:
        """See AnchorPolicy."""
        return self.steps > 0 and run.step // self.steps > run.anchor_step // self.steps


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Where catching up through the deltas would take a new replica longer than the anchor itself.

    That is, at ``bandwidth`` bytes a second, once fetching the deltas since the last anchor and
    replaying them takes as long as fetching an anchor. So what a replica waits for is never more
    than about twice the least, and an anchor is never written before the deltas cost as much.
    """

    bandwidth: float = BANDWIDTH

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise UsageError("the bandwidth is not above 0", found=self.bandwidth)

    def due(self, run: Run) -> bool:
        """See AnchorPolicy."""
        deltas = run.delta_bytes / self.bandwidth + run.changed * REPLAY_SECONDS
        return deltas >= run.anchor_bytes / self.bandwidth
