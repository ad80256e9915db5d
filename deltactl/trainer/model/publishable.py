"""Models whose weights are not in their tensors, or not under a checkpoint's names, are refused.

Each is told by what it has done to the model itself, wherever in it that is, and without any call
that would wait for other ranks: so every rank finds the same by itself, and none is left waiting.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from deltactl.core.errors import Unsupported, UsageError


def loaded_class(module: str, name: str) -> type | None:
    """A class of a module, if that has been imported: else nothing can be of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def check_model(model: torch.nn.Module) -> None:
    """Raise Unsupported for DeepSpeed's ZeRO stage 3, for FSDP1 and for adapters of PEFT, in any
    part of the model, and UsageError for what is no model. To be asked before anything else is
    asked of the model."""
    if not isinstance(model, torch.nn.Module):
        what = "model= takes the model that trains, a torch.nn.Module"
        raise UsageError(what, found=type(model).__name__)
    fsdp1, peft = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel"), _peft()
    for name, module in model.named_modules():
        where = f"{type(module).__name__}{f' at {name!r}' if name else ''}"
        if fsdp1 and isinstance(module, fsdp1):
            raise _fsdp1(where)
        if isinstance(module, peft):
            raise Unsupported(
                "a model with adapters of PEFT cannot be published: no server knows its names",
                found=where,
                hint="publish the merged weights: Publisher(model.merge_and_unload(), …), or "
                "save that with save_pretrained, and: deltactl push DIRECTORY BUCKET",
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise _zero3(name, parameter)
        if getattr(parameter, "_fsdp_flattened", False):  # its wrapper holds the model
            raise _fsdp1(f"parameter {name!r}")


def _zero3(name: str, parameter: Any) -> Unsupported:
    return Unsupported(
        "DeepSpeed's ZeRO stage 3 leaves no rank a whole parameter, and what it leaves cannot be "
        "published",
        tensor=name,
        expected=list(getattr(parameter, "ds_shape", ())) or None,
        found=list(parameter.shape),
        hint="train with ZeRO stage 2, or with fully_shard (FSDP2) and "
        "deltactl.trainer.RanksPublisher; or gather the weights with engine.save_16bit_model, and: "
        "deltactl push DIRECTORY BUCKET",
    )


def _fsdp1(found: str) -> Unsupported:
    return Unsupported(
        "a model that FullyShardedDataParallel (FSDP1) has wrapped cannot be published",
        found=found,
        hint="fully_shard (FSDP2) and deltactl.trainer.Publisher on every rank; with "
        "transformers' Trainer: fsdp_config={'version': 2}",
    )


def _peft() -> tuple[type, ...]:
    homes = {"peft": "PeftModel", "peft.tuners.tuners_utils": "BaseTunerLayer"}
    found = [loaded_class(module, name) for module, name in homes.items()]
    return tuple(kind for kind in found if kind is not None)
