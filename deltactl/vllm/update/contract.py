"""What the state machine of an update needs from the rest, as protocols and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.int64]
"""To be added over ranks element by element, modulo 2^64."""

Tell = Callable[[int, int], None]
"""Called while an update is staged, from any thread: bytes fetched so far, and bytes of all work,
which rise for as long as it gets on."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint holds: ``state`` is its digest, ``sums`` the touch sum over all elements of
    each tensor, by name."""

    state: str
    sums: Mapping[str, int]


class Staged(Protocol):
    """All of an update that the pause needs, on one rank; see deltactl.vllm.staging.staging."""

    @property
    def elements(self) -> int:
        """How many it writes on this rank."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes on this rank."""
        ...

    @property
    def fetched_bytes(self) -> int:
        """Bytes that this rank fetched for it, for all of its host."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of "fetch" and "stage"."""
        ...

    @property
    def reloaded(self) -> tuple[str, ...]:
        """Tensors that are not in the map, and go through the model's loader."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that it changes and of which the model keeps nothing."""
        ...

    @property
    def values(self) -> Values:
        """What of the sums is this rank's; of one shape on all ranks."""
        ...

    def judge(self, total: Values) -> str:
        """ "ready", or "already" where the result is live; ``total``: values of all ranks.

        The same on every rank. Raises Conflict, Malformed.
        """
        ...

    def sums_after(self, before: Mapping[str, int], total: Values) -> dict[str, int]:
        """Touch sums over all elements of each tensor once this is written; ``before``: now."""
        ...

    def replace(self) -> bool:
        """Where the live bits are the old ones make them the new ones, and read them back; else
        False, and they are as they were. Only of what can be taken back.

        After whatever it or ``complete`` raises ``roll_back`` is called.
        """
        ...

    def complete(self) -> None:
        """Write the rest, once all ranks have replaced theirs, and read it back."""
        ...

    def roll_back(self) -> bool:
        """Make the live bits the old ones again; whether they are."""
        ...


class Work(Protocol):
    """What can be done to the model of this rank. Errors are raised as DeltactlError.

    ``identify``, ``sums`` and ``stage`` may run in a thread, and only read; all else runs on the
    worker's main thread, which owns the model.
    """

    def stands(self) -> bool:
        """Whether a map is recorded, and every parameter still lies where it was then."""
        ...

    def record(self) -> Any:
        """Record where checkpoint tensors lie; what of it the other ranks have to know."""
        ...

    def agree(self, records: list[Any], rank: int) -> None:
        """Settle who owns what, from the records of all ranks."""
        ...

    def identify(self) -> Identity:
        """What the directory holds that the model was loaded from, as far as anybody knows."""
        ...

    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor of the checkpoint that the model was loaded from."""
        ...

    def sums(self, names: list[str]) -> Values:
        """Touch sum over this rank's part of each of these tensors, 0 for those of which it has
        none, and last that over all that no mapped tensor reaches, (len(names) + 1,)."""
        ...

    def prove(self, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
        """Note of which tensors the map is shown to be right: they hold what a checkpoint does.
        ``found``: sums over all ranks."""
        ...

    def distrust(self) -> None:
        """Have the next full update load every tensor through the model's loader."""
        ...

    def leave_unproven(self) -> None:
        """After that, take out of the map what ``prove`` has not noted: it changes on loading.
        Raises Unsupported where a layer of that kind should not be loaded so."""
        ...

    def describe(self) -> dict[str, Any]:
        """``map`` of the state: ``tensors`` (how many), ``unmapped``, ``ignored``, ``refused``: of
        those that only a reload could load the ones that it should not, with the reason; and
        ``proven``: the layers that it may load."""
        ...

    def stage(self, request: Mapping[str, Any], tell: Tell) -> Staged:
        """Fetch, prove, decode and lay out."""
        ...

    def took_over(self, staged: Any) -> None:
        """What was staged, by ``stage``, is what is live now."""
        ...
