"""Which layers a reload is trusted with, by the names of what vLLM has laid them out with."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltactl.core.errors import Unsupported
from deltactl.vllm.layout.derived import made_over
from deltactl.vllm.layout.proven import layout, refusal, unproven
from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import record


def thing(kind: str, **has: Any) -> Any:
    """An object of a class of that name, as vLLM has them."""
    return type(kind, (SimpleNamespace,), {})(**has)


def unmapped(parameter: Tensor) -> bool:
    return False


class Layer(nn.Module):
    def __init__(self, **has: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        for name, value in has.items():
            setattr(self, name, value)


class MLAAttention(Layer):
    def process_weights_after_loading(self) -> None: ...


class Attention(MLAAttention): ...


def int8(**of_kernel: Any) -> Layer:
    chosen = thing("method", __name__="_apply_weights_onednn")
    of_kernel = {"linear_method": chosen, "scales_kept": True, **of_kernel}
    kernel = thing("CPUInt8ScaledMMLinearKernel", **of_kernel)
    scheme = thing("CompressedTensorsW8A8Int8", kernel=kernel)
    return Layer(quant_method=thing("CompressedTensorsLinearMethod"), scheme=scheme)


def wna16(method: str, **has: Any) -> Layer:
    kernel = thing("CPUWNA16LinearKernel", config=SimpleNamespace(**has.pop("config", {})))
    return Layer(quant_method=thing(method, kernel=kernel), **has)


def experts(kind: str) -> Layer:
    kernel = SimpleNamespace(fused_experts=thing(kind))
    return Layer(quant_method=thing("UnquantizedFusedMoEMethod", moe_kernel=kernel))


@pytest.mark.parametrize("layer", [
    Layer(),
    Layer(quant_method=thing("UnquantizedLinearMethod")),
    Layer(quant_method=thing("UnquantizedEmbeddingMethod")),
    Attention(),
    Attention(quant_method=thing("CompressedTensorsKVCacheMethod"), kv_cache_dtype="auto"),
    int8(),
    wna16("AutoGPTQLinearMethod"),
    wna16("AutoAWQMarlinLinearMethod", config={"zero_points": True}),
    experts("CPUUnquantizedExperts"),
])  # fmt: skip
def test_what_was_proven(layer: nn.Module) -> None:
    assert unproven(nn.Sequential(nn.Identity(), layer), unmapped) is None


@pytest.mark.parametrize(("layer", "name"), [
    (Layer(quant_method=thing("Fp8LinearMethod")), "Fp8LinearMethod"),
    (MLAAttention(), "MLAAttention"),
    (Attention(quant_method=thing("Fp8KVCacheMethod"), kv_cache_dtype="fp8_e4m3"),
     "Attention with Fp8KVCacheMethod with a cache in fp8_e4m3"),
    (int8(scales_kept=False),
     "CompressedTensorsW8A8Int8 with CPUInt8ScaledMMLinearKernel by oneDNN"),
    (int8(linear_method=thing("m", __name__="_apply_weights_sgl")),
     "CompressedTensorsW8A8Int8 with CPUInt8ScaledMMLinearKernel by _apply_weights_sgl, "
     "scales kept"),
    (int8(config=SimpleNamespace(is_static_input_scheme=True, input_symmetric=False)),
     "CompressedTensorsW8A8Int8 with CPUInt8ScaledMMLinearKernel by oneDNN, scales kept, "
     "scales of inputs, asymmetric inputs"),
    (int8(config=SimpleNamespace(is_channelwise=False)),
     "CompressedTensorsW8A8Int8 with CPUInt8ScaledMMLinearKernel by oneDNN, scales kept, "
     "one scale a tensor"),
    (wna16("AutoGPTQLinearMethod", use_w4a8=True),
     "AutoGPTQLinearMethod with CPUWNA16LinearKernel as W4A8"),
    (wna16("AutoGPTQLinearMethod", config={"has_g_idx": True}),
     "AutoGPTQLinearMethod with CPUWNA16LinearKernel, groups in an order of their own"),
    (experts("TritonExperts"), "UnquantizedFusedMoEMethod with TritonExperts"),
])  # fmt: skip
def test_what_was_not_proven_is_named(layer: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Identity(), layer)
    assert unproven(model, unmapped) == f"1 is laid out by {name}"
    assert unproven(model, lambda parameter: True) is None  # it is as it was loaded


@pytest.mark.parametrize(("layer", "taken"), [
    (experts("TritonExperts"), True),
    (Layer(quant_method=thing("Fp8LinearMethod")), False),
])  # fmt: skip
def test_of_what_is_not_known_to_be_loaded_only_plain_matrices_may_be(
    layer: nn.Module, taken: bool
) -> None:
    """After a start on dummy weights no tensor is where the map says until one was loaded."""
    assert (unproven(layer, unmapped, lambda parameter: True) is None) is taken


def test_on_another_device_what_was_proven_on_the_cpu_is_not() -> None:
    assert (
        unproven(Layer(quant_method=thing("UnquantizedLinearMethod")).to("meta"), unmapped) is None
    )
    assert unproven(int8().to("meta"), unmapped) is not None


def test_what_a_plain_module_makes_of_its_weights_is_not_proven() -> None:
    layer = Layer()
    layer.turned = SimpleNamespace(here=layer.weight.t().contiguous())  # type: ignore[assignment]
    why = unproven(nn.Sequential(layer), unmapped)
    assert why == "0 (Layer) also computes with turned.here"
    layer.turned = SimpleNamespace(here=layer.weight.t())  # type: ignore[assignment]
    assert unproven(nn.Sequential(layer), unmapped) is None


def test_a_method_is_told_by_its_layer() -> None:
    method = MLAAttention()
    method.create_weights = lambda: None  # type: ignore[assignment]
    assert layout(method) is None


def test_the_refusal_names_the_layer_what_was_proven_and_the_way_out() -> None:
    error = refusal("x is laid out by Fp8LinearMethod", ["b", "a"])
    assert isinstance(error, Unsupported)
    assert (error.tensor, error.found) == ("a", "x is laid out by Fp8LinearMethod")
    assert "AutoGPTQLinearMethod with CPUWNA16LinearKernel" in str(error.expected)
    assert error.hint == "pull the step, and start the server anew on it"


class Quantised(nn.Module):
    """A fused layer of which the loader finds the scale alone, once it has been laid out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].gate_up = Layer(quant_method=thing("AutoAWQMarlinLinearMethod"))
        self.layers[0].gate_up.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = Layer()
        self.load = {"model.layers.0.gate.scale": self.layers[0].gate_up.scale}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.load:
                self.load[name].data.copy_(tensor)


def test_a_tensor_that_a_laid_out_layer_takes_no_more_is_not_called_ignored() -> None:
    names = ("model.layers.0.gate.scale", "model.layers.0.gate.qweight", "model.rotary.freq")
    found = record(Quantised(), [TensorSpec(name, "F32", (3,)) for name in names])
    assert found.ignored == ("model.rotary.freq",)
    assert found.unmapped == {
        "model.layers.0.gate.scale":
            "layers.0.gate_up also computes with weight, made when it was loaded",
        "model.layers.0.gate.qweight":
            "the loader does nothing with it now that its layer is laid out",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "near"), [
    ("model.layers.0.mlp.gate_proj.qweight", True),
    ("language_model.layers.0.q_proj.g_idx", True),
    ("layers.0.norm.weight", True),
    ("model.layers.1.mlp.up.qweight", False),
    ("model.layers.10.mlp.up.qweight", False),
    ("lm_head.weight", False),
    ("weight", False),
])  # fmt: skip
def test_what_is_near_a_layer_that_was_made_over(name: str, near: bool) -> None:
    assert made_over(Quantised())(name) is near
