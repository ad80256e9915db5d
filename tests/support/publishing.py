"""What tests of the publisher share: a small model, its bits at each step, a bucket with moods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Object
from deltactl.ops.pull import pull
from deltactl.ops.verify import verify_bucket
from tests.support.checkpoints import read_tensors

Bits = dict[str, tuple[str, bytes]]
"""By checkpoint name: torch's dtype, and the little-endian bytes."""

_CODES = {"BF16": "bfloat16", "F32": "float32", "I64": "int64", "F16": "float16", "BOOL": "bool"}


def bits_of(tensors: Mapping[str, torch.Tensor]) -> Bits:
    """By torch alone; a copy."""
    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in tensors.items()
    }


def rebuilt(bucket: LocalBucket, step: int, place: Path) -> Bits:
    """A step of the chain, pulled from nothing."""
    pull(bucket, place, step=step)
    return {name: (_CODES[dtype], data) for name, (dtype, _, data) in read_tensors(place).items()}


def assert_chain(bucket: LocalBucket, expected: Mapping[int, Bits], scratch: Path) -> None:
    """The chain verifies at level rebuild, and has exactly these steps, bit for bit."""
    report = verify_bucket(bucket, level="rebuild")
    assert report.ok, report.errors
    assert read_chain(bucket).steps == sorted(expected)
    for step, bits in expected.items():
        assert rebuilt(bucket, step, scratch / f"rebuilt-{step}") == bits, step


def small(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.nn.Module:
    """Two layers of 24 by 24."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)).to(dtype)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int = 0) -> None:
    """One step of training, the same for the same model and number."""
    draw = torch.Generator().manual_seed(batch)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, 24, generator=draw).to(dtype)
    model(inputs).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class MoodyBucket(LocalBucket):
    """Calls ``before(name)`` and ``after(name)`` around each put; they may wait, or raise."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self.lists = self.reads = 0

    def put(self, name: str, source: Path) -> bool:
        self.before(name)
        created = super().put(name, source)
        self.after(name)
        return created

    def list(self) -> Iterator[Object]:
        self.lists += 1
        return super().list()

    def read(self, name: str, start: int, stop: int) -> bytes:
        self.reads += 1
        return super().read(name, start, stop)
