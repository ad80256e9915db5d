"""Watch a loader write: which view of what it was fed goes to which view of which live storage.

Two modes of torch do it. One sees every operation, and lets none of those that write to a live
tensor happen; views of what was fed are real views, whose addresses tell where they come from
(``address_space``), and copies of it are address space too. The other keeps ``parameter.data``
from being replaced, which is no operation.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deltactl.checkpoint.torch_dtypes import torch_dtypes
from deltactl.vllm.layout.address_space import Arena, Block, Blocks, Lost
from deltactl.vllm.layout.regions import Axis, TensorSpec

_COPY = torch.ops.aten.copy_.default
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_PLACEMENT = ("device", "pin_memory", "non_blocking")
"""Where a copy is to lie, which is of no interest here."""

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Live:
    """One live storage: its name, where it lies, and the bytes of one element."""

    name: str
    start: int
    nbytes: int
    width: int


class LiveStorages:
    """Live storages by address; ``all`` in order of ``found``, without the empty ones."""

    def __init__(self, found: Iterable[Live]) -> None:
        self.all = tuple(live for live in found if live.nbytes)
        self._order = sorted(range(len(self.all)), key=lambda at: self.all[at].start)
        self._starts = [self.all[at].start for at in self._order]

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage that the tensor is a view of; None for one that is not live."""
        if not self.all or tensor.device.type == "meta" or tensor.layout != torch.strided:
            return None
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a tensor that wraps others, or stands for none
            return None
        at = self._order[bisect_right(self._starts, address) - 1]
        live = self.all[at]
        return at if live.start <= address < live.start + live.nbytes else None


@dataclass(frozen=True, slots=True)
class Write:
    """A write to a live storage. ``name``: the checkpoint tensor whose elements are copied, None
    where the loader writes something else. Offsets and axes in elements; ``first`` and ``last``:
    the elements between which all of it lies."""

    storage: int
    name: str | None
    source_offset: int
    offset: int
    axes: tuple[Axis, ...]
    first: int
    last: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes in order, and in ``spoilt`` which tensors cannot be followed, and why.

    ``in_hand``: the tensor that the loader was given last; to be kept up to date. ``in_step``:
    whether each tensor was copied before the next one was given.
    """

    def __init__(self, live: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live
        self._arena = Arena()
        self._blocks = Blocks()
        self._fed: dict[str, weakref.ref[Any]] = {}
        self.writes: list[Write] = []
        self.spoilt: dict[str, str] = {}
        self.in_hand: str | None = None
        self.in_step = True

    def feed(self, spec: TensorSpec) -> torch.Tensor:
        """Zeros of that shape and dtype, which are recognised wherever they go."""
        dtype = torch_dtypes()[spec.dtype]
        memory = self._arena.take(spec.elements * dtype.itemsize)
        start = memory.ctypes.data
        whole = (max(spec.elements, 1), 1, 1)
        self._blocks.add(
            Block(start, start + memory.nbytes, spec.name, dtype.itemsize, 0, (whole,))
        )
        self._fed[spec.name] = weakref.ref(memory)
        return torch.from_numpy(memory).view(dtype).view(spec.shape)

    def is_held(self, name: str) -> bool:
        """Whether anybody still holds the tensor that was fed, or a view of it."""
        return name in self._fed and self._fed[name]() is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        to = list(_tensors(_argument(args, kwargs, place) for place in _written(func)))
        if any(self._live.find(t) is not None for t in to):
            self._on_write(func, args, kwargs, to)
            return to[0] if len(to) == 1 else tuple(to)
        sources = self._sources(args, kwargs)
        if not sources:
            return func(*args, **kwargs)
        if func in _COPIES:
            return self._copy(func, args[0], kwargs)
        if func._can_decompose():  # in inference mode composite operations come whole
            with self:
                return func.decompose(*args, **kwargs)
        found = func(*args, **kwargs)
        if self._is_more_than_a_view(found) or any(self._block(t) for t in to):
            for name in sources:
                self._spoil(name, f"the loader computes with it ({_name(func)})")
        return found

    def _on_write(
        self, func: Any, args: Sequence[Any], kwargs: Any, to: Sequence[torch.Tensor]
    ) -> None:
        sources = self._sources(args, kwargs)
        if func is _COPY and sources:
            try:
                self.writes.append(self._copied(args[0], args[1]))
                return
            except Lost as lost:
                self._spoil(next(iter(sources)), str(lost))
        else:
            for name in sources:
                self._spoil(name, f"the loader writes what it computes of it ({_name(func)})")
        for tensor in to:
            self._wrote(tensor)

    def _wrote(self, tensor: torch.Tensor) -> None:
        """Note that something else than a copy was to be written there."""
        at = self._live.find(tensor)
        if at is not None and tensor.numel():
            offset, reach = self._offset(tensor, at), _reach(tensor)
            self.writes.append(Write(at, None, 0, offset, (), offset, offset + reach))

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> Write:
        at = self._live.find(to)
        assert at is not None  # as the caller found
        if to.dtype.itemsize != self._live.all[at].width:
            raise Lost("the loader views the parameter with elements of another width")
        block, source_offset, axes = self._way(source, to)
        self.in_step &= block.name == self.in_hand
        offset = self._offset(to, at)
        return Write(
            at, block.name, source_offset, offset, tuple(axes), offset, offset + _reach(to)
        )

    def _offset(self, tensor: torch.Tensor, at: int) -> int:
        live = self._live.all[at]
        return (tensor.data_ptr() - live.start) // live.width

    def _copy(self, func: Any, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """What a clone, or a move to a device, of something fed gives: no memory either."""
        twin = torch.empty_strided(
            source.size(), source.stride(), dtype=source.dtype, device="meta"
        )
        like = func(twin, **{k: v for k, v in kwargs.items() if k not in _PLACEMENT})
        memory = self._arena.take((_reach(like) + 1) * like.dtype.itemsize)
        try:
            block, source_offset, ways = self._way(source, like)
        except Lost as lost:
            self._spoil(next(iter(self._sources((source,), {}))), str(lost))
        else:
            start = memory.ctypes.data
            axes = sorted(((n, own, way) for n, way, own in ways), key=lambda axis: -axis[1])
            stop, whole = start + memory.nbytes, tuple(axes) or ((1, 1, 1),)
            self._blocks.add(Block(start, stop, block.name, block.width, source_offset, whole))
        return torch.from_numpy(memory).view(like.dtype).as_strided(like.size(), like.stride())

    def _way(self, source: torch.Tensor, to: torch.Tensor) -> tuple[Block, int, list[Axis]]:
        """The block of which ``source`` is a view, and offset and axes in its checkpoint tensor of
        a copy to a tensor like ``to``. Raises Lost where the copy is more than that."""
        block = self._block(source)
        assert block is not None  # as the callers found
        if source.dtype != to.dtype:
            raise Lost(f"the loader casts it from {_plain(source.dtype)} to {_plain(to.dtype)}")
        if source.dtype.itemsize != block.width:
            raise Lost("the loader views it with elements of another width")
        source = source.expand(to.shape)
        if any(n > 1 and not s for n, s in zip(source.shape, source.stride(), strict=True)):
            raise Lost("the loader copies one element of it to many")
        axes = list(zip(source.shape, source.stride(), to.stride(), strict=True))
        return block, *block.source_of(source.data_ptr(), axes)

    def _block(self, tensor: torch.Tensor) -> Block | None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return None
        return self._blocks.find(tensor.data_ptr())

    def _sources(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, None]:
        """The names of the tensors that the arguments are views or copies of."""
        found = (self._block(tensor) for tensor in _tensors((*args, *kwargs.values())))
        return dict.fromkeys(block.name for block in found if block is not None)

    def _is_more_than_a_view(self, found: object) -> bool:
        if isinstance(found, torch.Tensor):
            return found.numel() > 0 and self._block(found) is None
        if isinstance(found, list | tuple):
            return any(map(self._is_more_than_a_view, found))
        return found is not None

    def _spoil(self, name: str, why: str) -> None:
        self.spoilt.setdefault(name, why)

    def replaced(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether ``tensor.data = value`` would replace a live tensor's elements; noted if so."""
        if self._live.find(tensor) is None:
            return False
        block = self._block(value)
        name = self.in_hand if block is None else block.name
        if name is not None:
            self._spoil(name, "the loader puts another tensor in the parameter's place")
        self._wrote(tensor)
        return True


class KeepData(TorchFunctionMode):
    """Does not let ``parameter.data`` be replaced, and tells the recorder that it would be."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA and self._recorder.replaced(args[0], args[1]):
            return None
        return func(*args, **(kwargs or {}))


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an operation writes to."""
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: tuple[int, str]) -> Any:
    at, name = place
    return args[at] if at < len(args) else kwargs.get(name)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _reach(tensor: torch.Tensor) -> int:
    """How many elements beyond its first its last one lies."""
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _name(func: Any) -> str:
    return str(func).removesuffix(".default")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
