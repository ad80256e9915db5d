"""The compiled inner loops, where this installation has them.

``KERNEL`` is None where it was installed without a C compiler; then numpy does the same work in
more passes over memory. Callers in codec choose; nobody else needs to know.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = "kernel.shared"
"""The file beside this one that .ci/build_hook.py compiles from kernel.c; not a name to import."""

_VERSION = 5  # of the functions' signatures: as deltactl_kernel_version in kernel.c
_WIDTHS = (1, 2, 4, 8)

Array = npt.NDArray[Any]

_POINTER, _INT, _COUNT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


class Kernel:
    """kernel.c. Arrays are contiguous and of the dtypes that its comments name; elements may be of
    any width. No check is made here: counts and positions are the caller's to check."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.deltactl_kernel_version() != _VERSION:
            raise OSError(f"{path} is of another version")
        p = _POINTER
        self._compare = _by_width(
            library, "compare", _COUNT, (p, p, _COUNT, _COUNT, _U64, p, p, p, p)
        )
        self._touch_sum = _by_width(library, "touch_sum", _U64, (p, p, _COUNT, _U64))
        self._steps = _by_width(library, "steps", _COUNT, (p, p, _COUNT, _INT, p, p, p))
        self._take_steps = _by_width(
            library, "take_steps", None, (p, _COUNT, _COUNT, p, p, _COUNT, p, p, _INT)
        )
        self._gaps = _function(library, "gaps", None, (p, _COUNT, p))
        self._split = _function(library, "split", _COUNT, (p, _COUNT, _INT, p, p))
        self._join = _function(library, "join", None, (p, p, _COUNT, _INT, p))
        scan = (p, _COUNT, _INT, _U32, p, p, _INT)
        self._ranks = _by_width(library, "class_ranks", None, (*scan, p, _COUNT, p, p, p))
        self._select = _by_width(library, "class_select", _COUNT, (*scan, p, p, p))
        self._holds = _function(library, "holds", _INT, (p, _COUNT))
        self._put = _function(library, "put", _INT, (p, _COUNT))
        self._take = _function(library, "take", _INT, (p, _COUNT))
        self._replace = _function(library, "replace", _COUNT, (p, p, _COUNT))
        self._rectangle = _by_width(library, "rectangle", _U64, (p, _COUNT, p, p, p, _U64))

    def compare(
        self, old: Array, new: Array, first: int, index: int
    ) -> tuple[Array, Array, Array, int, int]:
        """Positions from ``first`` on, bits before and after, touch sums before and after."""
        positions = np.empty(old.size, np.int64)
        before, after = np.empty(old.size, old.dtype), np.empty(old.size, old.dtype)
        sums = (_U64 * 2)()
        count = self._compare[old.itemsize](
            *_at(old, new), old.size, first, index, *_at(positions, before, after), sums
        )
        return positions[:count], before[:count], after[:count], sums[0], sums[1]

    def touch_sum(self, positions: Array, bits: Array, index: int) -> int:
        """The touch sum of elements whose index in the tensor is ``index`` more."""
        found: int = self._touch_sum[bits.itemsize](*_at(positions, bits), bits.size, index)
        return found

    def steps(
        self, before: Array, after: Array, sign_magnitude: bool
    ) -> tuple[Array, Array, Array]:
        """Signs packed into bytes, lengths less one, and the places of those that are not 0."""
        down = np.empty(-(-before.size // 8), np.uint8)
        beyond, longer = np.empty(before.size, before.dtype), np.empty(before.size, np.int64)
        count: int = self._steps[before.itemsize](
            *_at(before, after), before.size, sign_magnitude, *_at(down, beyond, longer)
        )
        return down, beyond, longer[:count]

    def take_steps(
        self,
        elements: Array,
        start: int,
        places: Array,
        runs: Array,
        down: Array,
        beyond: Array,
        sign_magnitude: bool,
    ) -> None:
        """Take the steps, as ``steps`` gives them, at those ``places``, u32, in runs of so many
        that rise, int64, that are among the elements from ``start`` on, in place."""
        self._take_steps[elements.itemsize](
            *_at(elements), start, elements.size, *_at(places, runs), runs.size,
            *_at(down, beyond), sign_magnitude,
        )  # fmt: skip

    def gaps(self, positions: Array) -> Array:
        """Gaps between rising positions, u32."""
        gaps = np.empty(positions.size, np.uint32)
        self._gaps(*_at(positions), positions.size, *_at(gaps))
        return gaps

    def split(self, values: Array, k: int) -> tuple[Array, Array, int]:
        """Bit planes of the k low bits of u32 values, bytes above them, how many of those are
        255."""
        planes = np.empty(k * -(-values.size // 8), np.uint8)
        high = np.empty(values.size, np.uint8)
        escapes: int = self._split(*_at(values), values.size, k, *_at(planes, high))
        return planes, high, escapes

    def join(self, planes: Array, high: Array, k: int) -> Array:
        """The u64 values that ``split`` took apart, but for what escapes stand for."""
        values = np.empty(high.size, np.uint64)
        self._join(*_at(planes, high), high.size, k, *_at(values))
        return values

    def class_ranks(self, scan: ClassScan, positions: Array) -> tuple[Array, Array, Array]:
        """Of each changed element the rank in its class, u32, and the class, u8; and the active
        elements of each of 256 classes, u32."""
        ranks, classes = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
        totals = np.zeros(256, np.uint32)
        self._ranks[scan.width](
            *scan.arguments, *_at(positions), positions.size, *_at(ranks, classes, totals)
        )
        return ranks, classes, totals

    def class_select(
        self, scan: ClassScan, ranks: Array, starts: Array, order: Array | None
    ) -> int:
        """Make ranks, u32, the positions of the elements that have them; how many were found.
        ``order``, u32: gets their places in ``ranks`` by rising position."""
        places = (None,) if order is None else _at(order)
        found: int = self._select[scan.width](*scan.arguments, *_at(ranks, starts), *places)
        return found

    def holds(self, rows: Array) -> bool:
        """Whether the elements at the positions of every row are its bits.

        Rows, int64 of shape (n, 6): the addresses of elements, positions and bits, how many
        positions, the bytes of an element, and of a position, 4 or 8.
        """
        return bool(self._holds(*_at(rows), len(rows)))

    def put(self, rows: Array) -> None:
        """Write the bits of every row, as above, to the elements at its positions."""
        self._put(*_at(rows), len(rows))

    def take(self, rows: Array) -> None:
        """Read the elements at the positions of every row, as above, into its bits."""
        self._take(*_at(rows), len(rows))

    def replace(self, before: Array, after: Array) -> int:
        """Where the elements are the bits of the first rows, as above, make them those of the
        others, which are of the same positions, and read them back.

        How many were replaced, in order: those after them are left as they are, since one of the
        next is not as before. -1 where what was written did not read back.
        """
        found: int = self._replace(*_at(before, after), len(before))
        return found

    def rectangle(self, elements: Array, axes: Array, index: int) -> int:
        """The touch sum of a rectangle of elements, from the first one given on, whose index in
        the tensor is ``index``. Axes, int64 of shape (3, up to 16), outermost first: sizes, strides
        among the elements, and strides among the indices."""
        shape, strides, steps = axes
        found: int = self._rectangle[elements.itemsize](
            *_at(elements), len(shape), *_at(shape, strides, steps), index
        )
        return found


class ClassScan:
    """What both class functions scan: elements, how their class is found, which segments count."""

    def __init__(
        self,
        bits: Array,
        shift: int,
        mask: int,
        class_of: Array,
        active: Array,
        segment_shift: int,
    ) -> None:
        self._held = (bits, class_of, active)  # as long as their addresses are in use
        self.width = bits.itemsize
        self.arguments = (
            *_at(bits), bits.size, shift, mask, *_at(class_of, active), segment_shift,
        )  # fmt: skip


def _at(*arrays: Array) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    function = library[f"deltactl_{name}"]
    function.restype, function.argtypes = result, arguments
    return function


def _by_width(
    library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]
) -> dict[int, Any]:
    return {width: _function(library, f"{name}_{width}", result, arguments) for width in _WIDTHS}


def _load() -> Kernel | None:
    path = Path(__file__).with_name(LIBRARY)
    if sys.byteorder != "little" or not path.exists():
        return None
    try:
        return Kernel(path)
    except (OSError, AttributeError):  # of another processor, or another version
        return None


KERNEL = _load()
