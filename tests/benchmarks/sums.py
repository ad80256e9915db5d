"""Print how fast live weights are summed, which is done before every update: ``python -m
tests.benchmarks.sums``.

The weights are bf16 in memory, mapped as vLLM lays them out: a matrix of its own, three that are
fused, and one of which each row is cut for two ranks.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from deltactl.core import native
from deltactl.vllm.layout.regions import MappedTensor, Region, TensorSpec, region
from deltactl.vllm.layout.weight_map import Storage, WeightMap
from deltactl.vllm.staging.totals import owned_sums, rest_sum

_COLUMNS = 4096


def live_weights(gigabytes: float) -> WeightMap:
    """Of so many gigabytes, half of them in one matrix."""
    rows = max(4, round(gigabytes * 1e9 / 2 / _COLUMNS) // 4 * 4)
    whole, fused, cut = rows // 2, rows // 4, rows - rows // 2 - rows // 4
    storages = []
    for count in (whole * _COLUMNS, fused * _COLUMNS, cut * _COLUMNS):
        bits = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16)
        storages.append(Storage(f"storage {len(storages)}", bits))
    tensors = {"whole": _tensor("whole", (whole, _COLUMNS), _run(0, 0, whole * _COLUMNS))}
    first = 0
    for name, share in (
        ("q", fused // 2),
        ("k", fused // 4),
        ("v", fused - fused // 2 - fused // 4),
    ):
        size = share * _COLUMNS
        tensors[name] = _tensor(name, (share, _COLUMNS), _run(1, first, size))
        first += size
    axes = [(cut, 2 * _COLUMNS, _COLUMNS), (_COLUMNS, 1, 1)]
    left = region(2, 0, 0, axes)
    assert left is not None
    tensors["cut"] = _tensor("cut", (cut, 2 * _COLUMNS), left)
    return WeightMap(tuple(storages), tensors, (), {})


def _run(number: int, offset: int, count: int) -> Region:
    return Region(number, (count,), 0, (1,), offset, (1,))


def _tensor(name: str, shape: tuple[int, ...], *regions: Region) -> MappedTensor:
    return MappedTensor(TensorSpec(name, "BF16", shape), regions)


def speed(gigabytes: float, rounds: int) -> float:
    """Bytes a second, of the best round; by the compiled kernel, where there is one."""
    weights = live_weights(gigabytes)
    size = sum(storage.bits.nbytes for storage in weights.storages)
    return size / min(_timed(weights) for _ in range(rounds))


def _timed(weights: WeightMap) -> float:
    start = time.perf_counter()
    owned_sums(weights)
    rest_sum(weights)
    return time.perf_counter() - start


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="of live weights")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    found = speed(options.gb, options.rounds)
    milliseconds = 1000 * options.gb * 1e9 / found
    by = "torch" if native.KERNEL is None else "the compiled kernel"
    print(f"{options.gb:g} GB of live weights summed by {by} in {milliseconds:.0f} ms: ", end="")
    print(f"{found / 1e9:.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
