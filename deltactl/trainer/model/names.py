"""A model's tensors under the names that its checkpoint has, each storage once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from deltactl.core.errors import UsageError, listed
from deltactl.trainer.model.publishable import check_model, loaded_class
from deltactl.trainer.report import log

Names = Callable[[str], str | None] | Mapping[str, str | None]
"""From a name of the model's ``state_dict`` to the checkpoint's; None leaves the tensor out. Names
that a mapping lacks stay as they are."""

_MARKS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What wrappers of parts of a model (torch.compile, activation checkpointing) put into names."""

Tensors = dict[str, torch.Tensor]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside torch.compile and what ``_holds_module`` knows."""
    while True:
        inner = model.module if _holds_module(model) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def _holds_module(model: torch.nn.Module) -> bool:
    """Whether it is a wrapper whose ``module`` is the model: DistributedDataParallel, DataParallel,
    an AveragedModel, DeepSpeed's engine."""
    engine = loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine")
    known = isinstance(model, DistributedDataParallel | DataParallel | AveragedModel)
    return known or (engine is not None and isinstance(model, engine))


class Naming:
    """Gives the tensors of a model at every step, so that late ones are found when they appear."""

    def __init__(self, model: torch.nn.Module, names: Names | None) -> None:
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            what = "names= takes a dict of names, or a function from a name to a name"
            raise UsageError(what, found=type(names).__name__)
        self._model, self._names = unwrapped(model), names
        self._looked = False  # whether the model has what names= speaks of
        self._unconverted: frozenset[str] | None = None

    def tensors(self) -> Tensors:
        """The live tensors by checkpoint name: parameters and saved buffers.

        Of tied ones the name that ``save_pretrained`` keeps, else the first. Without ``names`` a
        Hugging Face model's are those that its ``save_pretrained`` writes. Raises UsageError where
        two get one name, and at first where ``names`` has one that is no tensor's (later it may
        have gone); and as ``check_model``.
        """
        check_model(self._model)
        found = _once(_state(self._model), self._tied())
        if self._names is None:
            return self._as_saved(found)
        if not self._looked:
            _check_known(self._model, self._names)
            _tell_twins(self._model, self._names, found)
            self._looked = True
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
    kind = loaded_class("transformers.modeling_utils", "PreTrainedModel")
    return kind is not None and isinstance(model, kind)


def _state(model: torch.nn.Module) -> Tensors:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {
        plain: value
        for name, plain, value in _all(model)
        if not is_lazy(value) and name not in ignored
    }


def _all(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each tensor of the state dict, after its name there and its name without wrappers."""
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    wrapped = [_plain(f"{n}.module.") for n, part in model.named_modules() if _holds_module(part)]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield name, _inside(_plain(name), wrapped), value


def _check_known(model: torch.nn.Module, names: Names) -> None:
    """Raise UsageError for names that no tensor of the model has."""
    known = [plain for _, plain, _ in _all(model)]
    unknown = sorted(map(str, names.keys() - set(known))) if isinstance(names, Mapping) else []
    if unknown:
        raise UsageError(
            "names= has what is no tensor of the model",
            expected=f"names of its state_dict: {listed(known)}",
            found=listed(unknown),
            hint="leave it out of names=, or write it as model.state_dict() has it, without what "
            "wrappers add",
        )


def _tell_twins(model: torch.nn.Module, names: Names, kept: Tensors) -> None:
    """Log which names of a mapping have no effect, as their tensor is saved under its twin's."""
    if not isinstance(names, Mapping):
        return
    others = {plain for _, plain, _ in _all(model)} - kept.keys()
    lost = sorted(name for name in others & names.keys() if names[name] not in (None, name))
    if lost:
        log.warning(
            "names= has no effect for %s: tied to, and saved under the name of, another tensor",
            listed(lost),
        )


def _plain(name: str) -> str:
    for mark in _MARKS:
        name = name.replace(mark, "")
    return name


def _inside(name: str, wrapped: Sequence[str]) -> str:
    """The name without the wrappers of parts of the model; ``wrapped``: what the names of their
    tensors begin with, the outer ones first."""
    for prefix in reversed(wrapped):
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name[len(prefix) :]
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
        if not isinstance(new, str):
            what = "names= gives a tensor what is no name"
            raise UsageError(what, tensor=name, expected="a str, or None", found=repr(new))
        if new in found:
            what = "two tensors of the model get one name"
            raise UsageError(what, tensor=new, hint="names= has to give each its own")
        found[new] = tensor
    return found
