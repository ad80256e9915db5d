"""What the state machine of an update needs from the rest, as protocols and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deltactl.vllm.peers import Sums


@dataclass(frozen=True)
class Identity:
    """What a model directory holds: ``state`` is its digest, ``sums`` the touch sum over all
    elements of each tensor."""

    state: str
    sums: Mapping[str, int]


@dataclass(frozen=True)
class Row:
    """What one tensor of one link has to add up to over all ranks; None is not known.

    ``old`` and ``new`` are touch sums over the elements that the link changes, ``count`` their
    number. ``what`` says link and tensor.
    """

    step: int | None
    name: str
    old: int | None
    new: int | None
    count: int | None


class Staged(Protocol):
    """All of an update that the pause needs, in memory; see deltactl.vllm.staging."""

    rows: list[Row]  # the same on every rank
    sums: Sums  # what of them is this rank's: uint64 [len(rows), 3] of old, new and count
    elements: int  # to be written, on this rank
    nbytes: int  # memory that it takes, on this rank
    fetched_bytes: int
    seconds: dict[str, float]  # "fetch", "stage"
    reloaded: tuple[str, ...]  # tensors that no region can express, loaded layer by layer
    ignored: tuple[str, ...]  # tensors of which the model keeps nothing
    full_sums: Mapping[str, int] | None  # of the result, where the update is a full one

    def check(self) -> bool:
        """Whether the live bits are the old ones."""
        ...

    def write(self) -> None:
        """Make the live bits the new ones."""
        ...

    def verify(self) -> bool:
        """Whether the live bits are the new ones."""
        ...

    def roll_back(self) -> bool:
        """Make the live bits the old ones again; whether they are."""
        ...


class Work(Protocol):
    """What can be done to the model of this rank. Errors are raised as DeltactlError."""

    def identify(self) -> Identity:
        """Hash the directory that the model was loaded from, and see that it is still that one."""
        ...

    def record(self) -> dict[str, Any]:
        """Record the weight map; what of it the other ranks have to know."""
        ...

    def agree(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Settle who owns what, from the records of all ranks; ``map`` of the state."""
        ...

    def stage(self, request: Mapping[str, Any]) -> Staged:
        """Fetch, prove, decode and lay out; writes nothing to the model."""
        ...

    def audit(self, names: list[str]) -> Sums:
        """Touch sum over this rank's part of each of these tensors, uint64 [len(names)].

        ``names`` are those of the identity; a tensor that cannot be audited gives 0.
        """
        ...

    def unaudited(self) -> list[str]:
        """Tensors that ``audit`` cannot sum: unmapped or ignored ones."""
        ...
