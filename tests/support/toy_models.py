"""A model without a forward pass whose loader places weights in the ways that vLLM's do.

    shape = ToyShape(hidden=8, ranks=2)
    model = ToyModel(shape, rank=1)
    model.load_weights(checkpoint(shape, seed=0).items())

Slices for each rank of several, fused projections, experts one by one and all in one transposed
tensor, padded vocabulary, tied output layer, tensors that are left out, casts. Elements are random
bits, NaNs among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltactl.vllm.layout.regions import TensorSpec

CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}


@dataclass(frozen=True)
class ToyShape:
    """Sizes: all may be odd but what ``ranks`` has to divide: heads, inner, experts."""

    hidden: int = 6
    head: int = 3
    heads: int = 4
    kv_heads: int = 2
    inner: int = 4
    vocab: int = 13
    padded: int = 16
    experts: int = 4
    tied: bool = False
    ranks: int = 1
    spread_experts: bool = False
    """Whole experts on each rank, not a slice of each."""


def checkpoint(shape: ToyShape, seed: int) -> dict[str, Tensor]:
    """Random bits for every checkpoint tensor of that shape."""
    draw = torch.Generator().manual_seed(seed)
    return {
        spec.name: random_bits(spec.shape, dtype_of(spec), draw) for spec in checkpoint_specs(shape)
    }


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw)
    return data.view(dtype).view(shape)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    return next(dtype for dtype, code in CODES.items() if code == spec.dtype)


def checkpoint_specs(shape: ToyShape) -> list[TensorSpec]:
    h, inner, experts = shape.hidden, shape.inner, shape.experts
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (shape.vocab, h),
        "attn.q.weight": (shape.heads * shape.head, h),
        "attn.k.weight": (shape.kv_heads * shape.head, h),
        "attn.v.weight": (shape.kv_heads * shape.head, h),
        "attn.q.bias": (shape.heads * shape.head,),
        "attn.o.weight": (h, shape.heads * shape.head),
        "mlp.gate.weight": (inner, h),
        "mlp.up.weight": (inner, h),
        "mlp.down.weight": (h, inner),
        "norm.weight": (h,),
        "conv.weight": (h, 1, 3),
        "fused.gate_up": (experts, h, 2 * inner),
        "fused.down": (experts, inner, h),
        "scalar": (),
        "head.weight": (shape.vocab, h),
        "rotary.inv_freq": (h,),
    }
    for e in range(experts):
        shapes[f"experts.{e}.w1"] = shapes[f"experts.{e}.w3"] = (inner, h)
        shapes[f"experts.{e}.w2"] = (h, inner)
    specs = [TensorSpec(name, "BF16", found) for name, found in shapes.items()]
    return [*specs, TensorSpec("wide.weight", "F32", (h,)), TensorSpec("f8", "F8_E4M3", (h, h))]


class ToyModel(nn.Module):
    """One rank's part. Parameters hold 7 until they are loaded."""

    def __init__(self, shape: ToyShape, rank: int = 0) -> None:
        super().__init__()
        self.shape, self.rank = shape, rank
        h, ranks = shape.hidden, shape.ranks
        self.q_rows = shape.heads // ranks * shape.head
        self.kv_rows = max(1, shape.kv_heads // ranks) * shape.head
        self.slice = 1 if shape.spread_experts else ranks  # ways in which an expert is cut
        self.local = shape.experts // (ranks if shape.spread_experts else 1)
        inner = shape.inner // self.slice
        self.embed = _parameter(shape.padded // ranks, h)
        self.qkv = _parameter(self.q_rows + 2 * self.kv_rows, h)
        self.q_bias = _parameter(self.q_rows)
        self.o = _parameter(h, self.q_rows)
        self.gate_up = _parameter(2 * shape.inner // ranks, h)
        self.down = _parameter(h, shape.inner // ranks)
        self.norm = _parameter(h)
        self.conv = _parameter(h, 3)
        self.w13 = _parameter(self.local, 2 * inner, h)
        self.w2 = _parameter(self.local, h, inner)
        self.fused13 = _parameter(self.local, 2 * inner, h)
        self.fused2 = _parameter(self.local, h, inner)
        self.scalar = _parameter(1)
        self.head = self.embed if shape.tied else _parameter(shape.padded // ranks, h)
        self.wide = _parameter(h)
        self.f8 = _parameter(h, h, dtype=torch.float8_e4m3fn)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            if name == "rotary.inv_freq" or (name == "head.weight" and self.shape.tied):
                continue
            self._load(name, weight)
            loaded.add(name)
        return loaded

    def _load(self, name: str, weight: Tensor) -> None:
        match name.split("."):
            case ["embed" | "head" as which, _]:
                self._rows_of_vocabulary(getattr(self, which), weight)
            case ["attn", "q", "bias"]:
                self.q_bias.data.copy_(weight.narrow(0, self.rank * self.q_rows, self.q_rows))
            case ["attn", "o", _]:
                self.o.data.copy_(weight.narrow(1, self.rank * self.q_rows, self.q_rows))
            case ["attn", which, _]:
                self._projection(which, weight)
            case ["mlp", "down", _]:
                self.down.data.copy_(weight.chunk(self.shape.ranks, 1)[self.rank])
            case ["mlp", which, _]:
                rows = len(self.gate_up) // 2
                target = self.gate_up.data[:rows] if which == "gate" else self.gate_up.data[rows:]
                target.copy_(weight[self.rank * rows : (self.rank + 1) * rows])
            case ["norm", _]:
                self.norm.data[:] = weight
            case ["conv", _]:
                self.conv.data.copy_(weight.to(self.conv.device).squeeze(1).clone())
            case ["experts", e, which]:
                self._expert(self.w13.data, self.w2.data, int(e), which, weight)
            case ["fused", "gate_up"]:
                gate, up = weight.transpose(1, 2).chunk(2, dim=1)
                for e, (w1, w3) in enumerate(zip(gate.unbind(0), up.unbind(0), strict=True)):
                    self._expert(self.fused13.data, self.fused2.data, e, "w1", w1.contiguous())
                    self._expert(self.fused13.data, self.fused2.data, e, "w3", w3)
            case ["fused", "down"]:
                for e, w2 in enumerate(weight.transpose(1, 2).contiguous()):
                    self._expert(self.fused13.data, self.fused2.data, e, "w2", w2)
            case ["scalar"]:
                self.scalar.data.copy_(weight.view(1))
            case ["wide", _]:
                self.wide.data.copy_(weight)
            case ["f8"]:
                self.f8.data.view(torch.uint8).copy_(weight.view(torch.uint8).t())

    def _rows_of_vocabulary(self, target: nn.Parameter, weight: Tensor) -> None:
        first = min(self.rank * len(target), self.shape.vocab)
        rows = weight.narrow(0, first, min(len(target), self.shape.vocab - first))
        target[: len(rows)].data.copy_(rows)
        target[len(rows) :].data.fill_(0)

    def _projection(self, which: str, weight: Tensor) -> None:
        if which == "q":
            at, rows, part = 0, self.q_rows, self.rank
        else:
            at = self.q_rows + (self.kv_rows if which == "v" else 0)
            copies = max(1, self.shape.ranks // self.shape.kv_heads)  # ranks that share a head
            rows, part = self.kv_rows, self.rank // copies
        self.qkv.data.narrow(0, at, rows).copy_(weight.narrow(0, part * rows, rows))

    def _expert(self, w13: Tensor, w2: Tensor, e: int, which: str, weight: Tensor) -> None:
        if self.shape.spread_experts:
            e -= self.rank * self.local
            if not 0 <= e < self.local:
                return
        part = self.rank if self.slice > 1 else 0
        rows = self.shape.inner // self.slice
        if which == "w2":
            w2[e].copy_(weight.narrow(1, part * rows, rows))
        else:
            half = w13[e].narrow(0, 0 if which == "w1" else rows, rows)
            half.copy_(weight.narrow(0, part * rows, rows))


def _parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 7.0).to(dtype), requires_grad=False)


def bits_of(model: nn.Module) -> Mapping[str, bytes]:
    """Every parameter's bits."""
    return {name: data_of(tensor.data) for name, tensor in model.named_parameters()}


def data_of(tensor: Tensor) -> bytes:
    """Its bits in order, little-endian."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
