"""Layers that hold something else than the checkpoint's bits, loaded anew in a real model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.errors import Conflict
from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import record
from deltactl.vllm.update.reload import reload_tensors
from tests.support.vllm_in_process import loaded
from tests.support.vllm_models import write_model

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers packed as on most CPUs; by a stand-in for oneDNN, which has no bfloat16 on
    older ones, and not by the kernel that some cannot run."""
    import torch
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    monkeypatch.setattr(utils.ops, "_supports_onednn", True)
    monkeypatch.setattr(utils.ops, "create_onednn_mm", lambda weight, size: weight.clone())
    monkeypatch.setattr(
        utils.ops, "onednn_mm", lambda packed, x, bias: torch.nn.functional.linear(x, packed.t())
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        for seed in (0, 1):
            write_model(place / f"{kind}-{seed}", kind, seed=seed)
    return place


KINDS = ("qwen3", "qwen3-tied", "llama", "qwen3-moe")


def outputs(model: Any) -> dict[str, Any]:
    """What each layer with weights makes of the same input: packed ones can be known by that
    alone."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    found = {}
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            given = torch.randn(3, module.input_size, dtype=torch.bfloat16)
            found[name] = module.quant_method.apply(module, given)
        elif isinstance(module, VocabParallelEmbedding):
            found[name] = module.weight.clone()
        if isinstance(module, ParallelLMHead):
            given = torch.randn(3, module.embedding_dim, dtype=torch.bfloat16)
            found[name] = module.quant_method.apply(module, given)
    for name, parameter in model.named_parameters():
        found[f"{name} itself"] = parameter.clone()
    return found


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    """The layers that make the same of it, bit for bit."""
    import torch

    assert a.keys() == b.keys()
    return {name for name in a if torch.equal(a[name].view(torch.int16), b[name].view(torch.int16))}


def is_same_anyway(found: Mapping[str, Any], name: str) -> bool:
    """Norms, which are ones in every new checkpoint, and what has been packed away."""
    return "norm" in name or not found[name].numel()


@contextmanager
def model_and_next(models: Path, kind: str) -> Iterator[tuple[Any, Any, Checkpoint]]:
    """A model on one checkpoint, what layers of a fresh one make of the other, and the other."""
    with loaded(models / f"{kind}-1", packed=None) as fresh:
        expected = outputs(fresh)
    with (
        loaded(models / f"{kind}-0", packed=None) as model,
        open_checkpoint(models / f"{kind}-1") as after,
    ):
        before = outputs(model)
        assert same(before, expected) <= {n for n in before if is_same_anyway(before, n)}
        yield model, expected, after


def unmapped(model: Any, checkpoint: Checkpoint) -> list[str]:
    specs = [TensorSpec(t.name, t.dtype, t.shape) for t in checkpoint.tensors.values()]
    return list(record(model, specs).unmapped)


def config(model: Any) -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().model_config


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_are_as_of_a_fresh_model(kind: str, models: Path) -> None:
    with model_and_next(models, kind) as (model, expected, after):
        addresses = {name: p.data_ptr() for name, p in model.named_parameters() if p.numel()}
        names = list(after.tensors)
        assert "model.layers.1.self_attn.q_proj.weight" in unmapped(model, after)
        fed = reload_tensors(model, config(model), names, after)
        assert set(names) <= set(fed)
        assert same(outputs(model), expected) >= {n for n in expected if "norm" not in n}
        now = {name: p.data_ptr() for name, p in model.named_parameters() if p.numel()}
        assert {name for name in now if "experts" not in name} <= {
            name for name in now if now[name] == addresses[name]
        }


@pytest.mark.usefixtures("packed")
def test_of_one_tensor_its_decoder_layer_is_loaded_and_no_other(models: Path) -> None:
    with model_and_next(models, "qwen3") as (model, expected, after):
        before = outputs(model)
        name = "model.layers.1.self_attn.k_proj.weight"
        fed = reload_tensors(model, config(model), [name], after)
        assert all(other.startswith("model.layers.1.") for other in fed)
        found = outputs(model)
        loaded_ = {n for n in found if n.startswith("model.layers.1.")}
        assert same(found, expected) >= loaded_
        assert same(found, before) >= found.keys() - loaded_


@pytest.mark.usefixtures("packed")
def test_experts_that_are_not_loaded_are_left_alone(models: Path) -> None:
    with model_and_next(models, "qwen3-moe") as (model, expected, after):
        before = outputs(model)
        reload_tensors(model, config(model), ["model.layers.1.mlp.experts.2.up_proj.weight"], after)
        found = outputs(model)
        loaded_ = {n for n in found if n.startswith("model.layers.1.")}
        assert any("w13_weight" in name for name in loaded_)
        assert same(found, expected) >= loaded_
        assert same(found, before) >= found.keys() - loaded_


@pytest.mark.usefixtures("packed")
def test_a_layer_that_waits_for_more_gets_all_there_is(models: Path) -> None:
    """Padding looks to vLLM as if elements were still to come."""
    with model_and_next(models, "qwen3") as (model, expected, after):
        fed = reload_tensors(model, config(model), ["model.embed_tokens.weight"], after)
        assert set(fed) == set(after.tensors)
        assert same(outputs(model), expected) == expected.keys()


@pytest.mark.usefixtures("packed")
def test_nothing_is_begun_without_the_tensor(models: Path) -> None:
    with model_and_next(models, "qwen3") as (model, _, after):
        before = outputs(model)
        with pytest.raises(Conflict):
            reload_tensors(model, config(model), ["model.layers.9.none"], after)
        assert same(outputs(model), before) == before.keys()
