"""What became of a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger("deltactl.trainer")
"""One line at INFO for each link that the bucket has confirmed; WARNING for what went wrong and is
tried again; ERROR for what ends the publishing."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A link that the bucket has confirmed.

    ``step``: the chain's; ``training_step``: the trainer's own count, which is lower where training
    went on from an earlier step than the chain had got to. ``kind``: "anchor" or "delta".
    ``changed_elements``: None for an anchor. ``bytes``: of all objects that were written.
    ``seconds``: from the beginning of the capture to the bucket's confirmation.
    ``blocked_seconds``: in which training waited, since the link before. ``merged_steps``: earlier
    steps whose changes are in this link, since they got none of their own. ``encoding``: of a
    delta. ``state``: the state digest.
    """

    step: int
    training_step: int
    kind: str
    changed_elements: int | None
    total_elements: int
    bytes: int
    seconds: float
    blocked_seconds: float
    merged_steps: int
    encoding: str | None
    state: str

    @property
    def sparsity(self) -> float | None:
        """Share of the elements that kept their bits; None for an anchor."""
        if self.changed_elements is None:
            return None
        return 1 - self.changed_elements / self.total_elements if self.total_elements else 1.0

    def __str__(self) -> str:
        what = f"anchor of {self.total_elements:,} elements"
        if self.changed_elements is not None:
            changed = f"{self.changed_elements:,} of {self.total_elements:,} elements changed"
            what = f"{changed} (sparsity {self.sparsity:.6f})"
        text = f"step {self.step}: {what}, {self.bytes:,} bytes"
        text += f" in {self.seconds:.3f} s, training blocked {self.blocked_seconds:.3f} s"
        text += f", {self.encoding}" if self.encoding else ""
        return text + (f", with {self.merged_steps} steps before" if self.merged_steps else "")
