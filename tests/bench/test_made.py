"""Made checkpoints: what trained ones look like from one step to the next."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from deltactl.bench.made import WEIGHTS, write_steps
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.ops.stats import stats_pair
from tests.support.checkpoints import read_tensors


def test_a_step_changes_one_in_a_hundred_mostly_by_one(tmp_path: Path) -> None:
    """As reference checkpoints of real AdamW do: 1.1 % at lr 1e-6, nine of ten by one unit."""
    a, b = write_steps(tmp_path, 1 << 22, 2)
    with open_checkpoint(a) as base, open_checkpoint(b) as result:
        found = stats_pair(base, result).facts()
    assert found["total_elements"] == 1 << 22
    assert 0.009 < 1 - found["sparsity"] < 0.013
    assert 0.87 < found["ulp_steps"]["one_share"] < 0.93


def test_every_step_changes_as_much_and_shapes_are_kept(tmp_path: Path) -> None:
    steps = [read_tensors(path) for path in write_steps(tmp_path, 1 << 20, 4, tensors=2)]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step_{i:06d}" for i in range(4)]
    assert {name: (d, s) for name, (d, s, _) in steps[0].items()} == {
        f"model.layers.{i}.mlp.down_proj.weight": ("BF16", (512, 1024)) for i in range(2)
    }
    changes = []
    for before, after in pairwise(steps):
        assert before.keys() == after.keys()
        bits = [np.frombuffer(t[n][2], np.uint16) for t in (before, after) for n in sorted(before)]
        changes.append(sum(int((x != y).sum()) for x, y in zip(bits[:2], bits[2:], strict=True)))
    assert all(0.005 * (1 << 20) < count < 0.02 * (1 << 20) for count in changes)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        write_steps(tmp_path / str(i), 1 << 14, 2, seed=seed)[1] / WEIGHTS
        for i, seed in enumerate((1, 1, 2))
    )
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("BF16", torch.bfloat16), ("F8_E4M3", torch.float8_e4m3fn)],
    ids=["bf16", "fp8"],
)
def test_rounding_is_torchs(dtype: str, torch_dtype: torch.dtype, tmp_path: Path) -> None:
    """Made of one seed, fp32 holds the masters themselves; fp8 divides them by 1 / 1024."""
    places = [write_steps(tmp_path / d, 1 << 18, 2, dtype=d)[1] for d in (dtype, "F32")]
    rounded, masters = map(read_tensors, places)
    for name, (_, _, data) in masters.items():
        master = torch.from_numpy(np.frombuffer(data, np.float32).copy())
        scale = 1024 if dtype == "F8_E4M3" else 1
        expected = (master * scale).clamp(-448, 448).to(torch_dtype)
        assert rounded[name][2] == expected.view(torch.uint8).numpy().tobytes()
