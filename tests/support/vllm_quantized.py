"""Quantised checkpoints that a real vLLM serves, made of the small models' weights.

    write_quantized(tmp_path / "model", "int8", seed=1)

The matrices of the decoder layers are rounded to integers with scales, as the tools do that write
such checkpoints; nothing of the rounding is calibrated. Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.vllm_models import write_model

_GROUP = 32  # elements of a row that share a scale
_PACKED = 8  # four-bit integers in one int32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_quantized(out: Path, kind: str, *, seed: int = 0) -> Path:
    """A Hugging Face directory of a kind of ``KINDS``; returns ``out``."""
    from safetensors.torch import load_file, save_file

    config, quantize = KINDS[kind]
    write_model(out, "qwen3", seed=seed)
    file = out / "model.safetensors"
    found: dict[str, Any] = {}
    for name, tensor in load_file(file).items():
        if ".layers." in name and name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            found |= {stem + part: made for part, made in quantize(tensor).items()}
        else:
            found[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, {"format": "pt"})
    document = json.loads((out / "config.json").read_text())
    document["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(document))
    return out


def _int8(weight: Any) -> dict[str, Any]:
    """One scale a row."""
    import torch

    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": torch.round(weight.float() / scale).to(torch.int8), "weight_scale": scale}


def _int8_static(weight: Any) -> dict[str, Any]:
    """One scale for all inputs too."""
    import torch

    return {**_int8(weight), "input_scale": torch.tensor([0.05])}


def _grouped(weight: Any) -> tuple[Any, Any]:
    """Integers of 0 to 15 around 8 [rows, columns], and scales [rows, groups]."""
    import torch

    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // _GROUP, _GROUP)
    scale = grouped.abs().amax(2) / 7
    found = torch.round(grouped / scale.unsqueeze(2)).clamp(-8, 7).to(torch.int32) + 8
    return found.view(rows, columns), scale


def _pack(integers: Any, order: tuple[int, ...] = tuple(range(_PACKED))) -> Any:
    """Eight along the last dimension in one int32; ``order``: which of them comes in which bits."""
    import torch

    lanes = integers.to(torch.int64).view(*integers.shape[:-1], -1, _PACKED)[..., list(order)]
    found = sum(lanes[..., n] << (4 * n) for n in range(_PACKED))
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def _w4a16(weight: Any) -> dict[str, Any]:
    import torch

    integers, scale = _grouped(weight)
    return {
        "weight_packed": _pack(integers),
        "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }


def _gptq(weight: Any) -> dict[str, Any]:
    import torch

    integers, scale = _grouped(weight)
    rows, columns = weight.shape
    zeros = torch.full((columns // _GROUP, rows), 7)  # one is added to what is stored
    return {
        "qweight": _pack(integers).t(),
        "qzeros": _pack(zeros),
        "scales": scale.t().to(torch.float16),
        "g_idx": (torch.arange(columns) // _GROUP).to(torch.int32),
    }


def _awq(weight: Any) -> dict[str, Any]:
    import torch

    integers, scale = _grouped(weight)
    rows, columns = weight.shape
    return {
        "qweight": _pack(integers.t().contiguous(), _AWQ_ORDER),
        "qzeros": _pack(torch.full((columns // _GROUP, rows), 8), _AWQ_ORDER),
        "scales": scale.t().to(torch.float16),
    }


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_OF_CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_OF_GROUP = {**_OF_CHANNEL, "num_bits": 4, "strategy": "group", "group_size": _GROUP}
_OF_TOKEN = {**_OF_CHANNEL, "strategy": "token", "dynamic": True}
_OF_INPUT = {**_OF_CHANNEL, "strategy": "tensor", "dynamic": False}

KINDS: dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "int8": (_compressed(_OF_CHANNEL, _OF_TOKEN, "int-quantized"), _int8),
    "int8-static": (_compressed(_OF_CHANNEL, _OF_INPUT, "int-quantized"), _int8_static),
    "w4a16": (_compressed(_OF_GROUP, None, "pack-quantized"), _w4a16),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
        _gptq,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True,
         "version": "gemm"},
        _awq,
    ),
}  # fmt: skip
"""What the configuration says, and what becomes of a matrix."""
