"""Names of tensors that tell what a model was wrapped in, or that they are an adapter's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ADAPTER_FIX = "merge it first, with PEFT's model.merge_and_unload(), and save the model"
"""What makes a model of a LoRA adapter and its base."""

_ADAPTER = re.compile(r"(?:^|\.)lora_[A-Za-z_]+(?:\.|$)")
_FLAT = re.compile(r"(?:^|[._])flat_param(?:$|[._])")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What put ``mark`` into names, and how to save what is inside. ``everywhere``: not only at the
    front of a name."""

    mark: str
    who: str
    fix: str
    everywhere: bool = True

    def marks(self, name: str) -> bool:
        """Whether a name has the mark where this wrapper puts it."""
        return name.startswith(self.mark) or (self.everywhere and f".{self.mark}" in name)

    @property
    def says(self) -> str:
        """A sentence on what its names are."""
        return f"the names have {self.mark!r} in them, as {self.who} makes them"


_WRAPPERS = (
    Wrapper("_orig_mod.", "torch.compile", "save the model inside, model._orig_mod"),
    Wrapper("_fsdp_wrapped_module.", "FSDP", "save its full state dict"),
    Wrapper("_checkpoint_wrapped_module.", "activation checkpointing", "save the model inside"),
    Wrapper("base_model.model.", "PEFT", ADAPTER_FIX, everywhere=False),
    Wrapper("base_layer.", "PEFT", ADAPTER_FIX),
    Wrapper("module.", "DistributedDataParallel", "save the model inside, model.module", False),
)


def plain_name(name: str) -> str:
    """A name without what wrappers put into it."""
    while True:
        inner = name
        for wrapper in _WRAPPERS:
            inner = inner.removeprefix(wrapper.mark)
            if wrapper.everywhere:
                inner = inner.replace(f".{wrapper.mark}", ".")
        if inner == name:
            return name
        name = inner


def wrapper_of(names: Iterable[str]) -> Wrapper | None:
    """The wrapper that these are names of; None where they are a model's own.

    A mark that a wrapper puts at the front counts where all names have it.
    """
    names = list(names)
    for wrapper in _WRAPPERS:
        enough = any if wrapper.everywhere else all
        if names and enough(wrapper.marks(name) for name in names):
            return wrapper
    if any(_FLAT.search(name) for name in names):
        return Wrapper("flat_param", "FSDP", "save its full state dict")
    return None


def adapter_names(names: Iterable[str]) -> list[str]:
    """Those of the names that are an adapter's."""
    return [name for name in names if _ADAPTER.search(name)]
