"""A model's tensors under the names that its checkpoint has, each storage once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from deltactl.core.errors import UsageError

Names = Callable[[str], str | None] | Mapping[str, str | None]
"""From a name of the model's ``state_dict`` to the checkpoint's; None leaves the tensor out. Names
that a mapping lacks stay as they are."""

_MARKS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What wrappers of parts of a model (torch.compile, activation checkpointing) put into names."""

Tensors = dict[str, torch.Tensor]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel | DataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


class Naming:
    """Gives the tensors of a model at every step, so that late ones are found when they appear."""

    def __init__(self, model: torch.nn.Module, names: Names | None) -> None:
        self._model, self._names = unwrapped(model), names
        self._unconverted: frozenset[str] | None = None

    def tensors(self) -> Tensors:
        """The live tensors by checkpoint name: parameters and saved buffers.

        Of tied ones the name that ``save_pretrained`` keeps, else the first. Without ``names`` a
        Hugging Face model's are those that its ``save_pretrained`` writes. Raises UsageError where
        two get one name.
        """
        found = _once(_state(self._model), self._tied())
        if self._names is None:
            return self._as_saved(found)
        return _renamed(found, self._names)

    def _tied(self) -> list[str]:
        """Patterns of names that a Hugging Face model drops where they are tied."""
        found: list[str] = []
        for prefix, module in self._model.named_modules():
            tied = getattr(module, "_tied_weights_keys", None) or ()
            found += [f"{re.escape(prefix)}\\.{name}" if prefix else name for name in tied]
        return found

    def _as_saved(self, tensors: Tensors) -> Tensors:
        """What ``save_pretrained`` makes of a state dict: some tensors are named or cut otherwise
        in memory than in the checkpoint. Where it changes nothing it is not asked again.

        Tensors that it cuts, such as a mixture's experts, may be copies, for as long as a capture
        takes."""
        names = frozenset(tensors)
        if names == self._unconverted or not _is_pretrained(self._model):
            return tensors
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # before transformers 5 models are in memory as they are saved
            return tensors
        model: Any = self._model
        saved: Tensors = revert_weight_conversion(model, dict(tensors))
        if all(saved.get(name) is tensor for name, tensor in tensors.items()):
            self._unconverted = names
        return saved


def _is_pretrained(model: torch.nn.Module) -> bool:
    loaded = sys.modules.get("transformers")  # a model of its has imported it
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def _state(model: torch.nn.Module) -> Tensors:
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {
        _plain(name): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_lazy(value) and name not in ignored
    }


def _plain(name: str) -> str:
    for mark in _MARKS:
        name = name.replace(mark, "")
    return name


def _once(tensors: Tensors, tied: Iterable[str]) -> Tensors:
    """One name for each storage: none that matches a pattern of ``tied`` if there is another."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_place(tensor) if tensor.numel() else name, []).append(name)
    pattern = re.compile("|".join(f"(?:{p})" for p in tied) or r"(?!)")
    kept = set()
    for names in groups.values():
        kept.add(next((n for n in names if not pattern.search(n)), names[0]))
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor's elements lie: the same for two that share all of them.

    Of a distributed one this rank may hold none; two that are tied are one object.
    """
    if isinstance(tensor, DTensor):
        return (id(tensor),)
    return (
        tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
    )  # fmt: skip


def _renamed(tensors: Tensors, names: Names) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        new = names.get(name, name) if isinstance(names, Mapping) else names(name)
        if new is None:
            continue
        if new in found:
            what = "two tensors of the model get one name"
            raise UsageError(what, tensor=new, hint="names= has to give each its own")
        found[new] = tensor
    return found


def check_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Raise UsageError where the optimizer steps none of the tensors, by their storage."""
    stepped = {
        _start(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.numel()
    }
    if stepped and not stepped & {_start(tensor) for tensor in tensors.values()}:
        raise UsageError(
            "the optimizer steps none of the model's tensors",
            expected="an optimizer of model.parameters()",
            hint="where weights are copied back after the step: leave optimizer= out, and call "
            "publisher.publish(step) once they are",
        )


def _start(tensor: torch.Tensor) -> int:
    return id(tensor) if isinstance(tensor, DTensor) else tensor.data_ptr()


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside wrappers such as Accelerate's, which steps when gradients are whole."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer
