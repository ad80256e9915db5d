"""Where a tensor sits in a model, told from its name alone."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|.*?\.)(?:layers?|h|blocks?|resblocks?|stages?)\.\d+(?=\.|$)")
_WRAPPERS = ("base_model", "language_model", "model", "module", "transformer")
_PARAMETERS = ("weight", "bias")


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the layer's number.

    Outside of layers the first component, those that only wrap a model not counted:
    ``model.layers.3.mlp.up_proj.weight`` is in ``model.layers.3``, ``model.norm.weight`` is in
    ``norm``.
    """
    match = _LAYER.match(name)
    return match[0] if match else _unwrapped(name)[0]


def module_of(name: str) -> str:
    """The kind of module: the name below its layer, without numbers (of experts) and parameter.

    ``model.layers.3.mlp.experts.7.up_proj.weight`` is of kind ``mlp.experts.up_proj``.
    """
    match = _LAYER.match(name)
    parts = name[match.end() + 1 :].split(".") if match else _unwrapped(name)
    if len(parts) > 1 and parts[-1] in _PARAMETERS:
        parts = parts[:-1]
    return ".".join(part for part in parts if not part.isdigit()) or name


def _unwrapped(name: str) -> list[str]:
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS and parts[1] not in _PARAMETERS:
        parts = parts[1:]
    return parts


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts ``layers.2`` before ``layers.10``."""
    parts = re.split(r"(\d+)", name)
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)
