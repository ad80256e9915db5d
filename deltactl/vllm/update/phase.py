"""One update on one rank: its phase, what is staged, and what the state tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltactl.core.errors import DeltactlError, UsageError
from deltactl.vllm.update.contract import Staged

STEADY = ("staging", "staged", "ready")
"""Phases of an update that is under way: another has to wait, or to discard it."""

_TEXTS = ("id", "bucket", "to_state")
_KEYS = (*_TEXTS, "from_step", "from_state", "to_step", "links", "full")


@dataclass
class Update:
    """One update on this rank."""

    request: dict[str, Any]
    phase: str = "staging"
    staged: Staged | None = None
    error: DeltactlError | None = None
    told: dict[str, Any] = field(default_factory=dict)
    sums_after: dict[str, int] = field(default_factory=dict)  # of all tensors, once it is sealed

    @property
    def id(self) -> str:
        return str(self.request["id"])

    @property
    def full(self) -> bool:
        return bool(self.request.get("full"))

    def end(self, phase: str, error: DeltactlError | None = None) -> None:
        """Enter a phase in which the staged bits are of no more use, and free them."""
        self.phase, self.error, self.staged = phase, error, None

    def keep(self, staged: Staged) -> None:
        """Note what the state tells of a staged update, also after it is gone."""
        self.staged = staged
        self.told |= {
            "elements": staged.elements,
            "bytes": staged.nbytes,
            "fetched_bytes": staged.fetched_bytes,
            "seconds": dict(staged.seconds),
            "reloaded": sorted(staged.reloaded),
            "ignored": sorted(staged.ignored),
        }

    def as_json(self) -> dict[str, Any]:
        """``update`` of the state."""
        empty = {"elements": 0, "bytes": 0, "fetched_bytes": 0, "worked_bytes": 0}
        lists: dict[str, Any] = {"seconds": {}, "reloaded": [], "ignored": [], "unasked": False}
        steps = {key: self.request.get(key) for key in ("from_step", "to_step")}
        told = {**empty, **lists, **self.told}
        head = {"id": self.id, "phase": self.phase, **steps, "full": self.full}
        return {**head, **told, "error": facts(self.error)}


def facts(error: DeltactlError | None) -> dict[str, Any] | None:
    """An error as JSON: its facts, ``hint`` and ``kind``, the name of its class."""
    if error is None:
        return None
    return {**error.facts(), "hint": error.hint, "kind": type(error).__name__}


def wrapped(error: Exception, what: str) -> DeltactlError:
    """``error`` if it is ours, else one of ours that tells it."""
    if isinstance(error, DeltactlError):
        return error
    return DeltactlError(what, found=f"{type(error).__name__}: {error}")


def checked_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request to stage with all its keys, of the right types. Raises UsageError."""
    if not isinstance(request, Mapping):
        raise UsageError("the update is no JSON object", found=type(request).__name__)
    unknown = sorted(set(request) - set(_KEYS))
    if unknown:
        raise UsageError("the update has keys that this version does not know", found=unknown)
    found = {key: request.get(key) for key in _KEYS}
    full = found["full"] = bool(found["full"])
    texts = (*_TEXTS, *(() if full else ("from_state",)))
    links = found["links"]
    wrong = [key for key in texts if not isinstance(found[key], str) or not found[key]]
    wrong += [] if type(found["to_step"]) is int else ["to_step"]
    good = isinstance(links, list | tuple) and all(isinstance(link, str) for link in links)
    wrong += [] if good else ["links"]
    if wrong:
        raise UsageError("the update is not whole", expected=", ".join(wrong))
    return found


def gist(error: DeltactlError) -> str:
    """An error as one line, for the other ranks."""
    return f"{type(error).__name__}: {error}"


def phases(everyone: list[Any]) -> str:
    """The first of what each rank gave, for people."""
    return ", ".join(f"rank {rank}: {row[0]}" for rank, row in enumerate(everyone))
