"""When a step gets an anchor beside its delta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deltactl.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class SinceAnchor:
    """What lies between the newest anchor and the tip, when a step has just been confirmed.

    ``step``: the tip; ``deltas``: the links from the anchor to it, ``delta_bytes`` together;
    ``anchor_step`` and ``anchor_bytes``: of the newest anchor.
    """

    step: int
    anchor_step: int
    deltas: int
    delta_bytes: int
    anchor_bytes: int


class AnchorPolicy(Protocol):
    """Says which steps get an anchor. The chain's first step always has one."""

    def due(self, since: SinceAnchor) -> bool:
        """Whether the tip is to have an anchor. Asked once for each confirmed step, in order; not
        for those that are confirmed while an anchor is still on its way."""
        ...


@dataclass(frozen=True, slots=True)
class AnchorEvery:
    """TRL's rule: each step that is a multiple of ``steps``, or the first after one that was passed
    over. 0: only the first step."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UsageError("the cadence of anchors is not negative", found=self.steps)

    def due(self, since: SinceAnchor) -> bool:
        """See AnchorPolicy."""
        return self.steps > 0 and since.step // self.steps > since.anchor_step // self.steps
