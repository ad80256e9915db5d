"""On a CPU server with this backend, weights stay as they were loaded.

vLLM packs linear weights and experts for the CPU's matrix kernels: oneDNN keeps the packed copy to
itself and leaves an empty parameter, the grouped kernel of the experts permutes them in place. Such
weights cannot be read back or written element by element, and a layerwise reload leaves the packed
copies of a tied output layer and of experts as they were. Some processors also die of SIGILL in the
AMX kernel for small weights. So where this backend is configured, and nowhere else, both steps are
left out, and plain torch computes on the parameters themselves.

Matrices of int8 stay with oneDNN. It reads their scales where they lay when it packed the matrix,
which after a reload is memory that was freed: here they are kept.

The modules that pack are patched once they are imported, by whoever needs them, so that a process
that never builds a layer pays nothing. Whether to leave a layer unpacked is decided when it is
processed, from the vLLM configuration then in force.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Of a gate, to be multiplied by the other half; experts with another one are packed as ever."""


def install() -> None:
    """Patch what is imported already, and the rest as soon as it is. Idempotent."""
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _ours() -> bool:
    """Whether the vLLM configuration in force names this backend."""
    from vllm.config import get_current_vllm_config_or_none

    from deltactl.vllm import BACKEND

    config = get_current_vllm_config_or_none()
    transfer = config and config.weight_transfer_config
    return bool(transfer and transfer.backend == BACKEND)


def _patch_linears(module: ModuleType) -> None:
    packed = module.dispatch_cpu_unquantized_gemm
    if getattr(packed, "by_deltactl", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        import torch

        if _ours() and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packed(layer, remove_weight)

    dispatch.by_deltactl = True  # type: ignore[attr-defined]
    module.dispatch_cpu_unquantized_gemm = dispatch  # type: ignore[attr-defined]


def _patch_experts(module: ModuleType) -> None:
    experts = module.CPUUnquantizedExperts
    pack, packed_apply = experts.process_weights_after_loading, experts.apply
    if getattr(pack, "by_deltactl", False):
        return
    plain_experts = _operation()

    def process(self: Any, layer: Any) -> None:
        self.unpacked = _ours() and self.moe_config.activation.value in _ACTIVATIONS
        if not self.unpacked:
            pack(self, layer)

    def apply(self: Any, **given: Any) -> None:  # by keyword, as vLLM's kernel calls it
        if not self.unpacked:
            packed_apply(self, **given)
            return
        shares = given["topk_weights"]
        if given["apply_router_weight_on_input"]:  # done, to the hidden states
            shares = shares.new_ones(shares.shape)
        plain_experts(
            given["output"],
            given["hidden_states"],
            given["w1"],
            given["w2"],
            self.w1_bias,
            self.w2_bias,
            shares,
            _places(given["topk_ids"], given["expert_map"]),
            given["activation"].value,
        )

    process.by_deltactl = True  # type: ignore[attr-defined]
    experts.process_weights_after_loading, experts.apply = process, apply


def _patch_int8(module: ModuleType) -> None:
    kernel = getattr(module, "CPUInt8ScaledMMLinearKernel", None)
    pack = getattr(kernel, "process_weights_for_onednn", None)
    if pack is None or getattr(pack, "by_deltactl", False):
        return  # without it, such layers are none of layouts.PROVEN_ON_CPU

    def process(self: Any, layer: Any) -> None:
        before = getattr(self, "dnnl_handler", None)
        self.scales_kept = getattr(self, "scales_kept", None) or _ours()
        pack(self, layer)
        if not self.scales_kept:
            return
        packed = self.dnnl_handler
        packed.scales = getattr(layer, self.layer_param_names[1])
        if before is not None:  # what torch.compile has captured goes on to lead to what is packed
            was = before.handler_tensor.clone()
            before.handler_tensor.copy_(packed.handler_tensor)
            packed.handler_tensor.copy_(was)  # to be released with this one
            before.scales, packed.scales = packed.scales, getattr(before, "scales", None)
            self.dnnl_handler = before

    process.by_deltactl = True  # type: ignore[attr-defined]
    kernel.process_weights_for_onednn = process  # type: ignore[union-attr]


def _places(chosen: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """The place on this rank of each chosen expert, -1 for one of another rank."""
    return chosen if expert_map is None else expert_map[chosen]


def _operation() -> Callable[..., None]:
    """``_plain_experts`` as an operation of torch, which torch.compile takes as it is: which
    experts are chosen shows only when it runs."""
    import torch

    return torch.library.custom_op(
        "deltactl::plain_experts",
        _plain_experts,
        mutates_args=("output",),
        schema="(Tensor(a!) output, Tensor tokens, Tensor gate_up, Tensor down, "
        "Tensor? gate_up_bias, Tensor? down_bias, Tensor shares, Tensor places, "
        "str activation) -> ()",
    )


def _plain_experts(
    output: torch.Tensor,
    tokens: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    shares: torch.Tensor,
    places: torch.Tensor,
    activation: str,
) -> None:
    """Write the weighted sum of each token's experts.

    ``output`` and ``tokens``: [tokens, hidden]. ``gate_up``: [experts, 2 * width, hidden];
    ``down``: [experts, hidden, width]; their biases likewise, without the last dimension.
    ``shares`` and ``places``: weight and place of the experts of each token [tokens, k]. The sum is
    taken in float32.
    """
    import torch
    from torch.nn.functional import linear

    total = torch.zeros(output.shape, dtype=torch.float32)
    for place in torch.unique(places).tolist():
        if place < 0:
            continue
        rows, slots = (places == place).nonzero(as_tuple=True)
        bias = None if gate_up_bias is None else gate_up_bias[place]
        inner = _gated(linear(tokens[rows], gate_up[place], bias), activation)
        found = linear(inner, down[place], None if down_bias is None else down_bias[place])
        total.index_add_(0, rows, found.float() * shares[rows, slots].float().unsqueeze(-1))
    output.copy_(total)


def _gated(wide: torch.Tensor, activation: str) -> torch.Tensor:
    """The first half of the last dimension, activated, times the second half."""
    from torch.nn.functional import gelu, silu

    gate, up = wide.chunk(2, dim=-1)
    if activation == "silu":
        return silu(gate) * up
    return gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.model_executor.layers.utils": _patch_linears,
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": _patch_experts,
    "vllm.model_executor.kernels.linear.scaled_mm.cpu": _patch_int8,
}


class _Watch(importlib.abc.MetaPathFinder):
    """Finds the modules to patch where they are, and patches them after they were executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader, _PATCHES[name])
        return spec


class _Patching(importlib.abc.Loader):
    """A module's own loader, and then the patch."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
