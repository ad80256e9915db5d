"""What a model computes with beside its parameters.

When loading ends, vLLM's layers may make things of their weights and keep those: packed matrices on
the CPU, products of projections in latent attention. A parameter that is patched in place leaves
them as they were, and the model then computes with the old weights although every parameter reads
as new. Nobody declares them, so they are searched for: tensors that a module holds without having
registered them, and parameters of its own that no checkpoint tensor reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_DEPTH = 6  # objects from the module to a tensor that it computes with
_OF_MODULE = frozenset({"_parameters", "_buffers", "_modules", "kv_cache"})
_ELSEWHERE = ("torch.", "torch_", "vllm.compilation", "vllm.config", "vllm.distributed")
"""Packages whose objects hold tensors that are no weights: examples that a compiler has traced,
buffers for communication."""

_WEIGHTS = (torch.Tensor, nn.Parameter, nn.Buffer)  # others of torch's kinds stand for no memory

FINISH = "process_weights_after_loading"
"""The method of a vLLM module that makes things of the weights below it."""


def kept_beside(
    model: nn.Module, is_live: Callable[[torch.Tensor], bool], reached: Callable[[Any], bool]
) -> dict[str, str]:
    """Name of each parameter that cannot be patched in place -> why, for a person.

    ``is_live``: whether a tensor is a view of a parameter or buffer. ``reached``: whether some
    checkpoint tensor is copied into a parameter.
    """
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        finishes = callable(getattr(module, FINISH, None)) or _is_made_over(module)
        why = kept_by(module, is_live) or (_made(module, reached) if finishes else None)
        if why is None:
            continue
        where = prefix or "the model"
        for name, _ in module.named_parameters(prefix, recurse=finishes, remove_duplicate=False):
            found.setdefault(name, f"{where} also computes with {why}, made when it was loaded")
    return found


def made_over(model: nn.Module) -> Callable[[str], bool]:
    """Says of a checkpoint tensor whether its decoder layer, or else its module, has weights that
    a method of quantisation has made over. What the loader does with such a tensor when loading is
    over tells nothing of what it did before."""
    names = [f".{name}." for name, module in model.named_modules() if _is_made_over(module)]

    def near(tensor: str) -> bool:
        parts = tensor.split(".")
        at = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
        key = ".".join(parts[:-1] if at is None else parts[max(at - 1, 0) : at + 1])
        return any(f".{key}." in name for name in names)

    return near


def _is_made_over(module: nn.Module) -> bool:
    """Whether a method other than vLLM's for plain matrices has had its way with its weights."""
    method = getattr(module, "quant_method", None)
    plain = method is None or type(method).__name__.startswith("Unquantized")
    return not plain and any(True for _ in module.parameters(recurse=False))


def kept_by(module: nn.Module, is_live: Callable[[torch.Tensor], bool]) -> str | None:
    """What a module computes with beside its parameters: its path from the module, or in words."""
    packed = vars(module).get("cpu_linear")
    if isinstance(packed, FunctionType) and packed.__closure__:
        return "a packed copy of the weight"
    for path, tensor in _tensors(module):
        if tensor.is_floating_point() and tensor.numel() > 1 and not is_live(tensor):
            return path
    return None


def _made(module: nn.Module, reached: Callable[[Any], bool]) -> str | None:
    own = module.named_parameters(recurse=False)
    return next((name for name, parameter in own if not reached(parameter)), None)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the module's plain attributes lead to, and by which path."""
    seen: set[int] = set()
    todo = deque((k, v, 0) for k, v in vars(module).items() if k not in _OF_MODULE)
    while todo:
        path, value, depth = todo.popleft()  # the nearest first, so that depth cuts off no other
        if isinstance(value, torch.Tensor):
            if not type(value).__module__.startswith(_ELSEWHERE) or type(value) in _WEIGHTS:
                yield path, value
        elif id(value) not in seen and depth < _DEPTH:
            seen.add(id(value))
            todo.extend((f"{path}.{k}", v, depth + 1) for k, v in _inside(value))


def _inside(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, str | bytes | int | float | type | nn.Module):
        return
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif isinstance(value, partial):
        yield from enumerate(value.args)
        yield from value.keywords.items()
        yield "function", value.func
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif not type(value).__module__.startswith(_ELSEWHERE):
        yield from _attributes(value)


def _attributes(value: object) -> Iterator[tuple[object, object]]:
    """Those that it holds itself; some objects make up any attribute that they are asked for."""
    with suppress(TypeError):
        yield from vars(value).items()
