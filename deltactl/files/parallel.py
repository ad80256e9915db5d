"""Work over tensors on all cores, bounded by the machine; see core.threads for other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from deltactl.core.threads import cores
from deltactl.files.mapped import sound_sources

_WORTH_THREADS = 1 << 24  # bytes: some milliseconds of hashing

T = TypeVar("T")
R = TypeVar("R")


def map_largest_first(
    work: Callable[[T], R], items: Sequence[T], size: Callable[[T], int]
) -> list[R]:
    """``[work(item) for item in items]`` on all cores, largest first so that none is left for last.

    Raises the first error; work that has not begun by then is dropped. Raises Malformed for a
    mapped file that was torn meanwhile.
    """
    if len(items) < 2:  # no thread is begun for it
        with sound_sources():
            return [work(item) for item in items]
    order = sorted(range(len(items)), key=lambda i: -size(items[i]))
    results: dict[int, R] = {}
    with ThreadPoolExecutor(min(cores(), len(items))) as pool:
        futures = {pool.submit(work, items[i]): i for i in order}
        try:
            with sound_sources():
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[i] for i in range(len(items))]


def hash_threads(size: int, sizes: Iterable[int]) -> int:
    """Threads for hashing one tensor of ``size`` bytes among ``sizes``.

    One, as tensors are hashed side by side; all cores for a tensor so large that the others would
    wait for it, and not over before threads for it alone have begun.
    """
    return cores() if size >= _WORTH_THREADS and size * cores() > sum(sizes) else 1
