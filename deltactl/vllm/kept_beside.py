"""What a model computes with beside its parameters.

When loading ends, vLLM's layers may make things of their weights and keep those: packed matrices on
the CPU, products of projections in latent attention. A parameter that is patched in place leaves
them as they were, and the model then computes with the old weights although every parameter reads
as new. Nobody declares them, so they are searched for: tensors that a module holds without having
registered them, and parameters of its own that no checkpoint tensor reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

_DEPTH = 6  # objects from the module to a tensor that it computes with
_OF_MODULE = frozenset({"_parameters", "_buffers", "_modules", "kv_cache"})
_ELSEWHERE = ("torch.distributed", "vllm.distributed", "vllm.config")
"""Packages whose objects hold tensors that are no weights: buffers for communication."""

_FINISH = "process_weights_after_loading"
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
        finishes = callable(getattr(module, _FINISH, None))
        why = _kept_by(module, is_live) or (_made(module, reached) if finishes else None)
        if why is None:
            continue
        where = prefix or "the model"
        for name, _ in module.named_parameters(prefix, recurse=finishes, remove_duplicate=False):
            found.setdefault(name, f"{where} also computes with {why}, made when it was loaded")
    return found


def _kept_by(module: nn.Module, is_live: Callable[[torch.Tensor], bool]) -> str | None:
    packed = vars(module).get("cpu_linear")
    if getattr(packed, "__closure__", None):
        return "a packed copy of the weight"
    for path, tensor in _tensors(module):
        if tensor.is_floating_point() and tensor.numel() > 1 and not is_live(tensor):
            return f"{path}"
    return None


def _made(module: nn.Module, reached: Callable[[Any], bool]) -> str | None:
    own = module.named_parameters(recurse=False)
    return next((name for name, parameter in own if not reached(parameter)), None)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the module's plain attributes lead to, and by which path."""
    seen: set[int] = set()
    todo = [(k, v, 0) for k, v in vars(module).items() if k not in _OF_MODULE]
    while todo:
        path, value, depth = todo.pop()
        if isinstance(value, torch.Tensor):
            yield path, value
        elif id(value) not in seen and depth < _DEPTH:
            seen.add(id(value))
            todo += [(f"{path}.{k}", v, depth + 1) for k, v in _inside(value)]


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
    elif closure := getattr(value, "__closure__", None):
        for name, cell in zip(value.__code__.co_freevars, closure, strict=True):  # type: ignore[attr-defined]
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
    elif not type(value).__module__.startswith(_ELSEWHERE):
        yield from getattr(value, "__dict__", {}).items()
