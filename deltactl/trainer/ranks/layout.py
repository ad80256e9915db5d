"""Who holds what, and who writes what: the same on every rank.

Each tensor has one owner, who writes it: tensors are dealt out so that all ranks write about as
much. Each part of it that ranks hold has one reader among them, who watches it and tells the owner
what changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from deltactl.core.dtypes import nbytes_of
from deltactl.core.errors import Unsupported, UsageError
from deltactl.format.header import utf8
from deltactl.trainer.ranks.piece import Piece


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: ``dtype`` is the code of what is published."""

    dtype: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor. ``number``: its place in order of name; ``readers``: rank to what it watches."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    owner: int
    readers: Mapping[int, Piece]


class Layout:
    """All tensors, in order of name, as ``rank`` sees them."""

    def __init__(self, tensors: Sequence[Placed], rank: int) -> None:
        self.rank = rank
        self.tensors = tuple(tensors)
        self.read = {t.name: t for t in tensors if rank in t.readers}
        self.owned = {t.name: t for t in tensors if t.owner == rank}


def lay_out(held: Sequence[Mapping[str, Part]], rank: int) -> Layout:
    """``held``: by rank, what it holds, by name.

    Raises UsageError where ranks differ in what a tensor is, Unsupported where what they hold
    together is not all of it.
    """
    names = sorted({name for parts in held for name in parts}, key=utf8)
    whole = {name: _whole(name, held) for name in names}
    owners = _deal(whole, len(held))
    return Layout(
        [
            Placed(number, name, *whole[name], owners[name], _readers(name, owners[name], held))
            for number, name in enumerate(names)
        ],
        rank,
    )


def _whole(name: str, held: Sequence[Mapping[str, Part]]) -> tuple[str, tuple[int, ...]]:
    found = {(part.dtype, part.piece.shape) for parts in held if (part := parts.get(name))}
    if len(found) != 1:
        what = "ranks differ in what a tensor is"
        raise UsageError(what, tensor=name, found=sorted(found))
    return found.pop()


def _deal(whole: Mapping[str, tuple[str, tuple[int, ...]]], ranks: int) -> dict[str, int]:
    """Largest first, each to the rank that has the fewest bytes yet."""
    sizes = {name: nbytes_of(*spec) for name, spec in whole.items()}
    loads = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], utf8(name))):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _readers(name: str, owner: int, held: Sequence[Mapping[str, Part]]) -> dict[int, Piece]:
    """Of each distinct part one rank that holds it: the owner where it does, as that is the
    shortest way, else another one for each tensor."""
    holders: dict[Piece, list[int]] = {}
    for rank, parts in enumerate(held):
        if name in parts and parts[name].piece.elements:
            holders.setdefault(parts[name].piece, []).append(rank)
    shape = next(parts[name].piece.shape for parts in held if name in parts)
    total = sum(piece.elements for piece in holders)
    if total != prod(shape):
        what = "what the ranks hold of a tensor is not all of it, once"
        raise Unsupported(what, tensor=name, expected=prod(shape), found=total)
    return {
        owner if owner in ranks else ranks[owner % len(ranks)]: piece
        for piece, ranks in holders.items()
    }
