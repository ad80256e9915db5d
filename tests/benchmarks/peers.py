"""What deltactl is measured against: the machine's own limits, and TRL's way to make a delta."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

_CHUNK = 1 << 20


def _chunks(path: Path, use) -> None:
    buffer = bytearray(_CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            use(memoryview(buffer)[:count])


def read_both(a: Path, b: Path) -> None:
    """Two threads, a file each: the speed at which this machine hands out what it has in memory."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda path: _chunks(path, lambda _: None), (a, b)))


def read_and_hash_both(a: Path, b: Path) -> None:
    """The same, and BLAKE3 of every byte: the least that any tool with both digests has to do."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda path: _chunks(path, blake3().update), (a, b)))


def trl_way(a: Path, b: Path, out: Path) -> None:
    """TRL's first dialect: load both, one mask over each whole tensor, nonzero, int32 and values.

    Proves nothing: no digest of base or result is made.
    """
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    old, new = load_file(a), load_file(b)
    tensors = {}
    for name, tensor in new.items():
        flat = tensor.view(-1)
        index = (flat != old[name].view(-1)).nonzero(as_tuple=True)[0]
        if index.numel():
            tensors[f"{name}.indices"] = index.to(torch.int32)
            tensors[f"{name}.values"] = flat[index]
    save_file(tensors, out)
