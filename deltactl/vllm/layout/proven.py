"""Layers of which it was shown that a reload by vLLM leaves them as a fresh server has them.

When loading ends, vLLM makes what its kernels want out of what was loaded, and some of that it
keeps where no parameter shows it. A reload makes it anew, or forgets it, or makes it of memory that
is freed afterwards: the parameters read right, and the answers are noise. Which of these it is only
a test tells that compares answers. So what such a test has shown stands here, by the names of
vLLM's classes; every other layout is refused before the server is paused.

A layer whose parameters are the checkpoint's own bits, found so through the map, needs no proof:
there is nothing that could be made of them in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from deltactl.core.errors import Unsupported
from deltactl.vllm.layout.derived import FINISH, kept_by

PROVEN = frozenset(
    {
        "UnquantizedLinearMethod",
        "UnquantizedEmbeddingMethod",
        "Attention",
        "Attention with CompressedTensorsKVCacheMethod",
    }
)
"""Everywhere: matrices that are computed with as they are, or on a CPU with a packed copy that is
made anew, and attention, which makes nothing of weights unless its cache has scales."""

PROVEN_ON_CPU = frozenset(
    {
        "UnquantizedFusedMoEMethod with CPUUnquantizedExperts",
        "CompressedTensorsW8A8Int8 with CPUInt8ScaledMMLinearKernel by oneDNN, scales kept",
        "CompressedTensorsWNA16 with CPUWNA16LinearKernel",
        "AutoGPTQLinearMethod with CPUWNA16LinearKernel",
        "AutoAWQMarlinLinearMethod with CPUWNA16LinearKernel, zero points",
    }
)
"""In tests/vllm/real: reloaded, and compared with a fresh server's answers."""

RESTART = "pull the step, and start the server anew on it"
"""The way to a step that a running server cannot take."""


def unproven(
    model: nn.Module,
    is_own: Callable[[torch.Tensor], bool],
    is_mapped: Callable[[torch.Tensor], bool] | None = None,
) -> str | None:
    """The first layer that a reload may leave as something else than a fresh server has, and why.

    ``is_own``: whether a parameter's live bits are a checkpoint's own, by the map. ``is_mapped``:
    whether they would be, if the map is right; of plain matrices that is enough, as the sums after
    the reload tell, while quantised ones are known to be made over.
    """
    mapped = is_own if is_mapped is None else is_mapped
    live = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    proven = PROVEN | PROVEN_ON_CPU if _on_cpu(model) else PROVEN
    for name, module in model.named_modules():
        own, made = list(module.parameters(recurse=False)), layout(module)
        plain = made is None or made.startswith("Unquantized")
        if made in proven or (own and all(map(mapped if plain else is_own, own))):
            continue
        if made is not None:
            return f"{name or 'the model'} is laid out by {made}"
        kept = kept_by(module, lambda t: t.untyped_storage().data_ptr() in live) if own else None
        if kept is not None:
            return f"{name or 'the model'} ({type(module).__name__}) also computes with {kept}"
    return None


def layout(module: nn.Module) -> str | None:
    """What makes something of a layer's weights once they are loaded; None where nothing does."""
    if callable(getattr(module, "create_weights", None)):  # a method, which is told by its layer
        return None
    method = getattr(module, "quant_method", None)
    if method is None:
        return type(module).__name__ if callable(getattr(module, FINISH, None)) else None
    scheme = getattr(module, "scheme", None)
    parts = [type(scheme or method).__name__]
    if callable(getattr(module, FINISH, None)):  # attention: the method is of its scales
        parts.insert(0, type(module).__name__)
        kept_as = str(getattr(module, "kv_cache_dtype", "auto"))
        parts += [f"a cache in {kept_as}"] if kept_as.startswith(("fp8", "int", "nvfp")) else []
    kernel = getattr(scheme or method, "kernel", None)
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    parts += [type(found).__name__ for found in (kernel, experts) if found is not None]
    return " with ".join(parts) + _way(module, kernel)


def _way(module: nn.Module, kernel: Any) -> str:
    """Which of its ways a kernel has taken, where it has several."""
    chosen = getattr(getattr(kernel, "linear_method", None), "__name__", "")
    told = " by oneDNN" if chosen.endswith("_onednn") else f" by {chosen}" if chosen else ""
    told += ", scales kept" if getattr(kernel, "scales_kept", False) else ""
    told += " as W4A8" if getattr(module, "use_w4a8", False) else ""
    config = getattr(kernel, "config", None)
    return told + "".join(f", {way}" for way, key, value in _WAYS if _is(config, key, value))


_WAYS = (
    ("one scale a tensor", "is_channelwise", False),
    ("scales of inputs", "is_static_input_scheme", True),
    ("asymmetric inputs", "input_symmetric", False),
    ("zero points", "zero_points", True),
    ("groups in an order of their own", "has_g_idx", True),
)
"""What a kernel's configuration may say, and that it does."""


def _is(config: object, key: str, value: bool) -> bool:
    return getattr(config, key, not value) is value


def _on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def known() -> list[str]:
    """What was proven, by name."""
    return sorted(PROVEN | PROVEN_ON_CPU)


def refusal(why: str, names: Collection[str]) -> Unsupported:
    """The error for tensors that only a reload could load, where that was not proven."""
    return Unsupported(
        "these tensors would go through vLLM's own loader, and for a layer like this it was not "
        "proven that the answers are right afterwards",
        tensor=min(names, default=None),
        expected="one of " + ", ".join(known()),
        found=why,
        hint=RESTART,
    )
