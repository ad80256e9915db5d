"""What may enter a chain: the model that the chain is of, or another only where somebody says so.

Names, dtypes and shapes are compared, and the architecture that the config names. A refusal tells
what most likely happened: a wrapper's names, an adapter without its base, weights that were not
gathered, another dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deltactl.checkpoint.model_names import ADAPTER_FIX, adapter_names, plain_name, wrapper_of
from deltactl.core.dtypes import elements_of
from deltactl.core.errors import Conflict, listed


class Described(Protocol):
    """A tensor without its elements."""

    @property
    def dtype(self) -> str:
        """The safetensors code."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements of ``dtype``."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a ``config.json`` says of the model; None and () where it says nothing."""

    model_type: str | None = None
    classes: tuple[str, ...] = ()

    def differs(self, other: Architecture) -> bool:
        """Whether both say something, and not the same."""
        types = {self.model_type, other.model_type} - {None}
        classes = {self.classes, other.classes} - {()}
        return len(types) > 1 or len(classes) > 1

    def __str__(self) -> str:
        return " ".join(filter(None, (", ".join(self.classes), self.model_type)))


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint as the gate sees it. ``is_adapter``: it says that it is one, and no model;
    ``part``: what of a model it is by its name, where that is not all."""

    tensors: Mapping[str, Described]
    architecture: Architecture = field(default_factory=Architecture)
    is_adapter: bool = False
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """``other``: it is another model, and was let in because that is meant. ``notes``: what else
    there is to say of it, a sentence each."""

    other: bool
    notes: tuple[str, ...]


def check_same_model(
    chain: Model,
    new: Model,
    *,
    way: str,
    file: object = None,
    tip: int | None = None,
    allow: bool = False,
) -> Admitted:
    """Raise Conflict where ``new`` is another model than ``chain``, the tip; with ``allow`` tell.

    It is another where the configs name other architectures; where more than half of the chain's
    tensors are gone, or some are there under a wrapper's names, or it is a shard alone and any are;
    where more than half of the tensors that both have are of another shape, or more than half of
    them or of their elements of another dtype; and where any loses all its elements, or had none
    and has some. Less than that, such as a new head, is noted.

    ``file``: what is to enter; ``tip``: the step that the chain is at, for the error's text, which
    names no step of its own; ``way``: the hint's end, on what to do where it
    is meant.
    """
    change = _Change(chain, new)
    faults, fix = change.faults(), change.likely()
    if faults and not allow:
        at = "" if tip is None else f", step {tip}"
        raise Conflict(
            f"another model than the chain's tip{at}: {'; '.join(faults)}",
            file=file,
            expected=_summary(chain, change.example),
            found=_summary(new, change.example),
            hint="; ".join(filter(None, (fix, way))),
        )
    return Admitted(bool(faults), tuple(faults or change.notes()))


def check_first(
    new: Model, *, way: str, file: object = None, allow: bool = False
) -> tuple[str, ...]:
    """What to say of a chain's first checkpoint. Raises Conflict, unless ``allow``, for an adapter
    without its model, a shard alone, and where most tensors have no elements."""
    empty = [name for name, tensor in new.tensors.items() if not _elements(tensor)]
    notes = []
    found = None
    if _is_adapter(new):
        found, fix = "a LoRA adapter, and not the model it belongs to", ADAPTER_FIX
    elif new.part is not None:
        found, fix = new.part, _WHOLE
    elif 2 * len(empty) > len(new.tensors):
        found, fix = f"{len(empty)} of {len(new.tensors)} tensors have no elements", _GATHER
    if found is not None and not allow:
        raise Conflict(
            "this is no whole model, and a chain begins with one",
            file=file,
            found=f"{found}: {_names(empty or new.tensors)}",
            hint=f"{fix}; {way}",
        )
    if found is not None:
        notes.append(found)
    wrapper = wrapper_of(new.tensors)
    if wrapper is not None and not _is_adapter(new):
        notes.append(f"{wrapper.says}, and a server may not know them: {wrapper.fix}")
    return tuple(notes)


_WHOLE = "name the directory with all shards and their index"
_GATHER = (
    "DeepSpeed ZeRO-3 leaves such tensors where they are not gathered: set "
    "stage3_gather_16bit_weights_on_model_save, or run zero_to_fp32.py"
)


def _elements(tensor: Described) -> int:
    return elements_of(tensor.dtype, tensor.shape)


class _Change:
    """What lies between the tip and what is to follow it."""

    def __init__(self, chain: Model, new: Model) -> None:
        self._chain, self._new = chain, new
        before, after = chain.tensors, new.tensors
        both = before.keys() & after.keys()
        self._both = both
        self._gone, self._added = before.keys() - both, after.keys() - both
        self._dtypes = {name for name in both if before[name].dtype != after[name].dtype}
        self._shapes = {name for name in both if before[name].shape != after[name].shape}
        self._emptied = {name for name in self._shapes if self._size(name) and not self._now(name)}
        self._filled = {name for name in self._shapes if self._now(name) and not self._size(name)}
        self._wrapped = {name for name in self._added if plain_name(name) in self._gone}
        self._unwrapped = {name for name in self._gone if plain_name(name) in self._added}

    def _size(self, name: str) -> int:
        return _elements(self._chain.tensors[name])

    def _now(self, name: str) -> int:
        return _elements(self._new.tensors[name])

    @property
    def example(self) -> set[str]:
        """The names to show: of what changed, where anything did."""
        return self._gone | self._added or self._emptied or self._shapes or self._dtypes

    def faults(self) -> list[str]:
        """What makes it another model."""
        found = []
        if self._new.part is not None and self._gone:
            found.append(f"it is {self._new.part}")
        if self._chain.architecture.differs(self._new.architecture):
            found.append(f"{self._chain.architecture} became {self._new.architecture}")
        total, both = len(self._chain.tensors), len(self._both)
        if 2 * len(self._gone) > total or self._wrapped or self._unwrapped:
            found.append(f"{len(self._gone)} of {total} names are gone: {_names(self._gone)}")
        if self._most_dtypes():
            kinds = f"{self._dtypes_of(self._chain)} became {self._dtypes_of(self._new)}"
            found.append(f"{len(self._dtypes)} of {both} tensors have another dtype: {kinds}")
        if self._emptied or self._filled:
            names = self._emptied or self._filled
            what = "have no elements any more" if self._emptied else "had no elements before"
            found.append(f"{len(names)} of {both} tensors {what}: {_names(names)}")
        elif 2 * len(self._shapes) > both:
            shown = _names(self._shapes)
            found.append(f"{len(self._shapes)} of {both} tensors have another shape: {shown}")
        return found

    def _most_dtypes(self) -> bool:
        changed = sum(map(self._size, self._dtypes))
        most = 2 * changed > sum(map(self._size, self._both))
        return most or 2 * len(self._dtypes) > len(self._both)

    def _dtypes_of(self, side: Model) -> str:
        return ", ".join(sorted({side.tensors[name].dtype for name in self._dtypes}))

    def likely(self) -> str | None:
        """What most likely happened, and what mends it."""
        if self._new.part is not None:
            return _WHOLE
        if _is_adapter(self._new):
            return f"this is a LoRA adapter: {ADAPTER_FIX}"
        wrapper = wrapper_of(self._wrapped) or wrapper_of(self._added)
        if wrapper is not None:
            return f"{wrapper.says}: {wrapper.fix}"
        if (wrapper := wrapper_of(self._unwrapped)) is not None:
            return f"the chain's names have {wrapper.mark!r} in them, and these have not"
        if (front := _front(self._added, self._gone)) is not None:
            return f"the names begin with {front!r} now: save the part that is the model"
        if (front := _front(self._gone, self._added)) is not None:
            return f"the chain's names begin with {front!r}, and these do not"
        if self._emptied:
            return _GATHER
        if self._most_dtypes():
            return f"save it as the chain has it, {self._dtypes_of(self._chain)}"
        return None

    def notes(self) -> list[str]:
        """What changed, and does not make another model of it."""
        found = []
        if self._added:
            found.append(f"{_tensors(self._added)} new: {_names(self._added)}")
        if self._gone:
            found.append(f"{_tensors(self._gone)} gone: {_names(self._gone)}")
        if self._dtypes:
            found.append(f"{_tensors(self._dtypes)} of another dtype: {_names(self._dtypes)}")
        if self._shapes:
            found.append(f"{_tensors(self._shapes)} of another shape: {_names(self._shapes)}")
        return found


def _is_adapter(model: Model) -> bool:
    return model.is_adapter or (
        bool(model.tensors) and len(adapter_names(model.tensors)) == len(model.tensors)
    )


def _front(longer: Iterable[str], shorter: set[str]) -> str | None:
    """What to take from the front of most of the longer names to get shorter ones; None if none."""
    names = sorted(longer)
    if not names:
        return None
    parts = names[0].split(".")[:-1]
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end]) + "."
        fit = sum(name.removeprefix(prefix) in shorter for name in names)
        if 2 * fit > len(names):
            return prefix
    return None


def _summary(model: Model, names: set[str]) -> str:
    """How many tensors, and one of those named that it has."""
    name = min(names & model.tensors.keys() or model.tensors, default=None)
    if name is None:
        return "no tensors"
    tensor = model.tensors[name]
    count = len(model.tensors)
    return f"{count} tensors such as {name[:120]!r}, {tensor.dtype} {list(tensor.shape)}"


def _names(names: Iterable[str]) -> str:
    return listed([name[:120] for name in sorted(names)], 3)


def _tensors(names: set[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"
