"""A chain of checkpoints from real training, made once a session, and their bits by other means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

STEPS = 12


@pytest.fixture(scope="session")
def trained_chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The directories of 12 steps, step 1 first: bf16, several shards, an output layer of its own.

    Shared by all tests of the session: read them, never write.
    """
    return _train(tmp_path_factory.mktemp("trained"), tied=False)


@pytest.fixture(scope="session")
def trained_chain_tied(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """As ``trained_chain``, with the output layer tied to the embedding."""
    return _train(tmp_path_factory.mktemp("trained_tied"), tied=True)


def _train(out: Path, *, tied: bool) -> list[Path]:
    from deltactl.demo.tiny_model import train

    return [done.path for done in train(out, STEPS, tied=tied)]


def load_bits(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory as the bits of its elements, read by the safetensors library.

    Independent of deltactl on purpose. Floats become integers of their own width, so that equality
    tells -0.0 from +0.0 and holds for NaNs.
    """
    import torch
    from safetensors.torch import load_file

    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in found, f"{name} is in two shards of {directory}"
            found[name] = tensor.view(as_int[tensor.element_size()])
    assert found, f"no tensors in {directory}"
    return found


def assert_same_bits(found: Path, expected: Path) -> None:
    """Both directories hold the same tensors: names, shapes, dtypes and every bit."""
    import torch
    from safetensors import safe_open

    dtypes = []
    for directory in (found, expected):
        row = {}
        for file in directory.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                row |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        dtypes.append(row)
    assert dtypes[0] == dtypes[1]
    left, right = load_bits(found), load_bits(expected)
    assert left.keys() == right.keys()
    differ = [name for name in right if not torch.equal(left[name], right[name])]
    assert not differ
