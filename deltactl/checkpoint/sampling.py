"""A small pair of checkpoints that stands for a large one: slices, evenly spread over its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from deltactl.checkpoint.checkpoint import Checkpoint, Shard, Tensor
from deltactl.core.dtypes import element_bytes, element_dtype

_UNIT = 8  # bytes: a multiple of every element's width


def sample_pair(
    base: Checkpoint, result: Checkpoint, *, pieces: int, piece_bytes: int
) -> tuple[Checkpoint, Checkpoint]:
    """Up to ``pieces`` slices, each of up to ``piece_bytes``, of tensors that both have alike.

    A slice is a tensor ``name@offset`` of one dimension; its bytes are views of the mapped ones. A
    pair that is no larger than the sample comes whole. Tensors that were added, removed or replaced
    are left out.
    """
    spans = list(_spans(alike(base, result), pieces, piece_bytes))
    return _slices(base, spans), _slices(result, spans)


def alike(base: Checkpoint, result: Checkpoint) -> list[Tensor]:
    """The result's tensors that the base has with one dtype and shape, but for empty ones."""

    def form(tensor: Tensor | None) -> object:
        return None if tensor is None else (tensor.dtype, tensor.shape)

    tensors = result.tensors.values()
    return [t for t in tensors if t.nbytes and form(t) == form(base.tensors.get(t.name))]


def _spans(
    tensors: Sequence[Tensor], pieces: int, piece_bytes: int
) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and end of each slice; none overlaps another."""
    total = sum(tensor.nbytes for tensor in tensors)
    if total <= pieces * piece_bytes:
        yield from ((tensor.name, 0, tensor.nbytes) for tensor in tensors)
        return
    taken: dict[str, int] = {}
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    middles = iter(total * (2 * i + 1) // (2 * pieces) for i in range(pieces))
    middle = next(middles, None)
    for tensor, end in zip(tensors, ends, strict=True):
        while middle is not None and middle < end:
            at = middle - (end - tensor.nbytes) - piece_bytes // 2
            start = max(at // _UNIT * _UNIT, taken.get(tensor.name, 0))
            stop = min(start + piece_bytes, tensor.nbytes)
            taken[tensor.name] = stop
            if start < stop:
                yield tensor.name, start, stop
            middle = next(middles, None)


def _slices(checkpoint: Checkpoint, spans: Iterable[tuple[str, int, int]]) -> Checkpoint:
    tensors = {}
    for name, start, stop in spans:
        whole = checkpoint.tensors[name]
        dtype = element_dtype(whole.dtype)
        shape = ((stop - start) // element_bytes(dtype),)
        key = f"{name}@{start}"
        tensors[key] = Tensor(key, dtype, shape, whole.data[start:stop])
    return Checkpoint(checkpoint.path, tensors, (Shard("sample", tuple(tensors), {}),))
