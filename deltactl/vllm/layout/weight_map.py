"""Where each checkpoint tensor lies in a running model.

Recorded, not known: the model's own ``load_weights`` is fed tensors without content and watched
(``tracing``). Nothing is written meanwhile. A tensor of which every element lands unchanged in a
parameter is *mapped*; one that the loader takes and does nothing with (the output layer of a tied
model) is *ignored*; every other is *unmapped*, with the reason, and has to go through the loader.

A recorded map is a claim: after loading, a layer may have rearranged what the loader wrote. So each
tensor is unproven until live bits, read through the map, have been found equal to those of a
checkpoint (``totals.owned_sums``). Where they are not, either other weights are live or a layer has
changed them, which only shows once the model's own loader has loaded a checkpoint that is known.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from deltactl.checkpoint.torch_dtypes import torch_dtypes
from deltactl.vllm.layout.derived import kept_beside, made_over
from deltactl.vllm.layout.ownership import Ownership, Summary, box, overlap, owners
from deltactl.vllm.layout.regions import Located, MappedTensor, Region, TensorSpec, region
from deltactl.vllm.layout.tracing import KeepData, Live, LiveStorages, Recorder, Write

__all__ = ["Located", "MappedTensor", "Region", "Storage", "TensorSpec", "WeightMap", "record"]

_FAILURES = 256  # of a loader; each costs a new start
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Storage:
    """The whole storage of a parameter: ``name``, and ``bits``, which shares its memory: 1-D, and
    uint8, int16, int32 or int64 by the width of the parameter's elements. ``parameter``: or of a
    buffer, if it is False."""

    name: str
    bits: torch.Tensor
    parameter: bool = True


@dataclass(slots=True)
class WeightMap:
    """``tensors``: those that are mapped, by name. ``unmapped``: name -> why, for a person.
    ``anywhere``: those that any rank has mapped; ``unproven``: those of them of which nothing has
    shown yet that they lie so.

    ``storages``: those of all parameters and buffers that are not empty; regions count in them.
    """

    storages: tuple[Storage, ...]
    tensors: dict[str, MappedTensor]
    ignored: tuple[str, ...]
    unmapped: dict[str, str]
    anywhere: set[str] = field(default_factory=set)
    unproven: set[str] = field(default_factory=set)

    def unmap(self, name: str, why: str) -> None:
        """Take a tensor out of the map."""
        self.tensors.pop(name, None)
        self.unproven.discard(name)
        self.ignored = tuple(other for other in self.ignored if other != name)
        self.unmapped[name] = why

    def places(self, *, proven: bool) -> set[int]:
        """Addresses of the storages in which tensors of the map lie; ``proven``: of those alone."""
        names = self.tensors.keys() - (self.unproven if proven else set())
        reached = {one.storage for name in names for one in self.tensors[name].regions}
        return {self.storages[n].bits.data_ptr() for n in reached}

    def prove(self, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
        """Call those tensors proven that hold what a checkpoint does. ``found``:
        ``totals.owned_sums``, added up over ranks; ``expected``: of the checkpoint's tensors."""
        known = self.unproven & found.keys() & expected.keys()
        self.unproven -= {name for name in known if found[name] == expected[name]}

    def distrust(self) -> None:
        """Call no tensor proven."""
        self.unproven = self.anywhere - self.unmapped.keys()

    def leave_unproven(self) -> None:
        """Take what is unproven out of the map, after the model's own loader has loaded it."""
        for name in sorted(self.unproven):
            self.unmap(name, "its layer changes it after loading")

    def summary(self) -> Summary:
        """What other ranks need to know of this one's map."""
        held = {
            name: (mapped.spec.shape, tuple(region.source for region in mapped.regions))
            for name, mapped in self.tensors.items()
        }
        return Summary(held, self.ignored, dict(self.unmapped))

    def settle(self, ownership: Ownership, rank: int) -> None:
        """Take over what all ranks have agreed on (``owners`` of their summaries)."""
        self.anywhere = {name for held in ownership.owned for name in held}
        self.unproven = set(self.anywhere)
        for name, why in ownership.unmapped.items():
            self.unmap(name, why)
        for name, owned in ownership.owned[rank].items():
            self.tensors[name].owned = owned
        self.ignored = ownership.ignored


def record(model: nn.Module, specs: Iterable[TensorSpec], *, ranks: int = 1) -> WeightMap:
    """Record the map of a model that has been loaded.

    Runs its ``load_weights`` and writes nothing; what the model computes meanwhile on another
    thread stays right, unless the loader exchanges parameters, which are put back only at the end.
    Takes about half a millisecond a tensor. A tensor with which the loader fails is unmapped. With
    one rank the map is settled; with several each rank's is to be settled with the others'. Raises
    nothing on purpose.
    """
    before = _Modules(model)
    live = LiveStorages(found for found, _ in _storages(model))
    storages = tuple(
        Storage(found.name, _bits(tensor), isinstance(tensor, nn.Parameter))
        for found, tensor in _storages(model)
        if found.nbytes
    )
    recording = _Recording(model, live)
    recording.run(list(specs))
    if before.restore():
        recording.distrust("the loader puts other parameters into the model")
    found = recording.map(storages)
    _leave_out_kept_beside(found, model, live)
    if ranks == 1:
        found.settle(owners([found.summary()]), 0)
    return found


def addresses(model: nn.Module) -> dict[str, int]:
    """Where each parameter lies: a map holds for as long as this is as it was when recorded."""
    return {
        name: parameter.untyped_storage().data_ptr()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.device.type != "meta" and parameter.layout == torch.strided
    }


def _storages(model: nn.Module) -> Iterator[tuple[Live, torch.Tensor]]:
    """The storages of all parameters and buffers, each once, and a tensor that is a view of it."""
    seen: set[int] = set()
    for name, tensor in _named(model):
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            width = tensor.dtype.itemsize
            yield Live(name, memory.data_ptr(), memory.nbytes() // width * width, width), tensor


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    memory = tensor.untyped_storage()
    kind = _INTEGERS.get(tensor.dtype.itemsize, torch.uint8)  # wider ones are never mapped
    whole = torch.empty(0, dtype=kind, device=tensor.device)
    return whole.set_(memory, 0, (memory.nbytes() // kind.itemsize,), (1,))


class _Modules:
    """The parameters and buffers that each module has now."""

    def __init__(self, model: nn.Module) -> None:
        self._had = [
            (table, dict(table))
            for module in model.modules()
            for table in (module._parameters, module._buffers)
        ]

    def restore(self) -> bool:
        """Put back what has been replaced since; says whether anything had been."""
        changed = False
        for table, had in self._had:
            same = table.keys() == had.keys() and all(table[name] is had[name] for name in had)
            if not same:
                changed = True
                table.clear()
                table.update(had)  # type: ignore[arg-type]
        return changed


class _Recording:
    """Runs the loader over tensors, anew after each with which it fails."""

    def __init__(self, model: nn.Module, live: LiveStorages) -> None:
        self._model = model
        self._recorder = Recorder(live)
        self._specs: list[TensorSpec] = []
        self._failed: dict[str, str] = {}

    def run(self, specs: Sequence[TensorSpec]) -> None:
        for spec in specs:
            if spec.dtype in torch_dtypes():
                self._specs.append(spec)
            else:
                self._failed[spec.name] = f"torch has no dtype for {spec.dtype}"
        todo, again = list(self._specs), list[TensorSpec]()
        while todo and len(self._failed) < _FAILURES:
            given, error = self._load(todo)
            if error is None:
                self._fail(todo[given:], "the loader did not ask for it")
                break
            if not self._recorder.in_step:  # whichever it is that it fails with
                again += todo
                break
            if not given:
                self._fail(todo, error)
                break
            if given < len(todo):
                self._fail([todo[given - 1]], error)
            else:  # it may have taken all before it did anything
                again.append(todo[-1])
            copied = self._copied()
            again += [spec for spec in todo[: given - 1] if spec.name not in copied]
            todo = todo[given:]
        else:
            self._fail(todo, f"the loader failed with {_FAILURES} tensors before this one")
        self._one_by_one(again)

    def _one_by_one(self, specs: Sequence[TensorSpec]) -> None:
        """Tensors of which a failure with another one may have kept the loader."""
        for at, spec in enumerate(specs):
            if len(self._failed) >= _FAILURES:
                self._fail(
                    specs[at:], f"the loader failed with {_FAILURES} tensors before this one"
                )
                break
            given, error = self._load([spec])
            if error is not None or not given:
                self._fail([spec], error or "the loader did not ask for it")

    def _fail(self, specs: Iterable[TensorSpec], why: str) -> None:
        self._failed.update((spec.name, why) for spec in specs)

    def _copied(self) -> set[str]:
        return {write.name for write in self._recorder.writes if write.name is not None}

    def _load(self, specs: Sequence[TensorSpec]) -> tuple[int, str | None]:
        """Feed the loader; how many it asked for, and how it failed if it did."""
        left = deque((spec.name, self._recorder.feed(spec)) for spec in specs)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            while left:
                self._recorder.in_hand = left[0][0]
                yield left.popleft()  # held by the loader alone, see Recorder.is_held

        try:
            with KeepData(self._recorder), self._recorder, torch.no_grad():
                self._model.load_weights(weights())  # type: ignore[operator]
        except Exception as error:
            return len(specs) - len(left), _failure(error)
        return len(specs) - len(left), None

    def distrust(self, why: str) -> None:
        """Call unmapped what looks as if the loader had done nothing with it."""
        copied = self._copied()
        self._fail((spec for spec in self._specs if spec.name not in copied), why)

    def map(self, storages: tuple[Storage, ...]) -> WeightMap:
        writes, regions = self._recorder.writes, self._regions()
        unmapped = {**self._failed, **self._recorder.spoilt}
        tensors: dict[str, MappedTensor] = {}
        ignored = []
        held = self._held([spec.name for spec in self._specs if spec.name not in regions])
        for spec in self._specs:
            found = regions.get(spec.name)
            if spec.name in unmapped:
                continue
            if found is None and spec.name in held:
                unmapped[spec.name] = "the loader keeps it, and copies it to no parameter"
            elif found is None:
                ignored.append(spec.name)
            elif None in found:
                unmapped[spec.name] = "the loader copies elements of it onto each other"
            else:
                distinct = dict.fromkeys(region for region in found if region is not None)
                tensors[spec.name] = MappedTensor(spec, tuple(distinct))
        for name, why in {**_written_again(writes), **_shared(tensors)}.items():
            if tensors.pop(name, None) is not None:
                unmapped[name] = why
        return WeightMap(storages, tensors, tuple(ignored), unmapped)

    def _regions(self) -> dict[str, list[Region | None]]:
        found: dict[str, list[Region | None]] = {}
        for write in self._recorder.writes:
            if write.name is not None:
                made = region(write.storage, write.source_offset, write.offset, write.axes)
                found.setdefault(write.name, []).append(made)
        return found

    def _held(self, names: Sequence[str]) -> set[str]:
        """Those of which the loader has kept a view."""
        held = {name for name in names if self._recorder.is_held(name)}
        if held:
            gc.collect()
        return {name for name in held if self._recorder.is_held(name)}


def _failure(error: Exception) -> str:
    """What an exception of a loader says, or where it was raised if it says nothing."""
    said = " ".join(str(error).split())[:200]
    if not said and (at := error.__traceback__) is not None:
        while at.tb_next is not None:
            at = at.tb_next
        said = f"{Path(at.tb_frame.f_code.co_filename).name}, line {at.tb_lineno}"
    return f"the loader fails with it: {type(error).__name__}: {said}"


def _written_again(writes: Sequence[Write]) -> dict[str, str]:
    """Tensors whose elements the loader writes over with something else."""
    found: dict[str, str] = {}
    earlier: dict[int, list[Write]] = {}
    for write in writes:
        before = earlier.setdefault(write.storage, [])
        if write.name is not None:
            before.append(write)
            continue
        for copied in before:
            if copied.name and copied.first <= write.last and write.first <= copied.last:
                found[copied.name] = "the loader goes on to change what it has copied"
    return found


def _shared(tensors: Mapping[str, MappedTensor]) -> dict[str, str]:
    """Tensors of which elements land where those of another land, or others of their own."""
    by_storage: dict[int, list[tuple[str, Region]]] = {}
    for name, mapped in tensors.items():
        for one in mapped.regions:
            by_storage.setdefault(one.storage, []).append((name, one))
    found: dict[str, str] = {}
    for regions in by_storage.values():
        if not _are_apart([one for _, one in regions]):
            names = dict.fromkeys(name for name, _ in regions)
            for name in names:
                others = ", ".join(other for other in names if other != name)
                found[name] = f"it shares live elements with {others or 'itself'}"
    return found


def _are_apart(regions: Sequence[Region]) -> bool:
    """Whether no two regions of one storage share an element in it."""
    spans = sorted((one.offset, one.offset + _span(one)) for one in regions)
    if all(before[1] < after[0] for before, after in pairwise(spans)):
        return True
    shape = _grid(regions)
    boxes = [box((one.offset, *_by_stride(one)), shape) for one in regions]
    known = [found for found in boxes if found is not None]
    return len(known) == len(boxes) and not overlap(known)


def _span(one: Region) -> int:
    return sum((n - 1) * s for n, s in zip(one.shape, one.strides, strict=True))


def _by_stride(one: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    axes = sorted(zip(one.shape, one.strides, strict=True), key=lambda axis: -axis[1])
    return tuple(n for n, _ in axes), tuple(s for _, s in axes)


def _grid(regions: Sequence[Region]) -> tuple[int, ...]:
    """The shape of a contiguous tensor along whose dimensions all the regions run, if they do."""
    strides = sorted({s for one in regions for s in one.strides} | {1}, reverse=True)
    end = max(one.offset + _span(one) for one in regions) + 1
    outer = (-(-end // strides[0]),)
    return outer + tuple(a // b for a, b in pairwise(strides))


def _leave_out_kept_beside(found: WeightMap, model: nn.Module, live: LiveStorages) -> None:
    reached = {one.storage for mapped in found.tensors.values() for one in mapped.regions}
    kept = kept_beside(
        model, lambda t: live.find(t) is not None, lambda parameter: live.find(parameter) in reached
    )
    reasons: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        at = live.find(parameter)
        if at is not None and name in kept:
            reasons.setdefault(at, kept[name])
    for name, mapped in list(found.tensors.items()):
        why = next((reasons[one.storage] for one in mapped.regions if one.storage in reasons), None)
        if why is not None:
            found.unmap(name, why)
    is_near = made_over(model)
    for name in filter(is_near, found.ignored):
        found.unmap(name, "the loader does nothing with it now that its layer is laid out")
