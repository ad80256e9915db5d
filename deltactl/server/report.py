"""What became of one server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from deltactl.core.errors import DeltactlError
from deltactl.core.facts import facts_of


@dataclass(slots=True)
class Replica:
    """One server's part of an ``apply``.

    ``step_before``, ``step_after``, ``state``: None where not known. ``how``: by what the weights
    came; None where nothing was written. ``deltas``: how many. ``seconds_staging``: until the pause
    could begin; ``seconds_paused``: None where this client has not paused. ``elements``: written.
    ``bytes_fetched``: by the server; ``reloaded``: tensors that went through vLLM's own loader.
    ``paused``: whether the server was left paused, None where not known. ``notes``: what else the
    user has to know. ``error``: None where the server serves the step.
    """

    url: str
    step_before: int | None = None
    step_after: int | None = None
    state: str | None = None
    how: Literal["deltas", "full", "reload"] | None = None
    deltas: int = 0
    seconds_staging: float = 0.0
    seconds_paused: float | None = None
    elements: int = 0
    bytes_fetched: int = 0
    reloaded: tuple[str, ...] = ()
    paused: bool | None = None
    notes: list[str] = field(default_factory=list)
    error: DeltactlError | None = None

    def forget(self) -> None:
        """What was known of the server is not known any more."""
        self.paused = self.step_after = self.state = None

    def facts(self) -> dict[str, Any]:
        """JSON-ready: one row of ``replicas``."""
        return facts_of(self, ok=self.error is None)
