"""Whether a step is of the model that a server serves, by the names, types and shapes of tensors.

Of a step headers tell them; of a server its plugin does, for the checkpoint that it was started on.
One without the plugin says where that is, and where it is to be seen from here, as the directory of
a reload has to be from there, it is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltactl.chain.chain import Chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.dtypes import DTYPES, FLOATS, elements_of
from deltactl.core.errors import Conflict, DeltactlError
from deltactl.format.delta_header import DeltaHeader
from deltactl.server.layouts import config_of, is_tied

Spec = tuple[str, tuple[int, ...]]
"""Type, in the words of safetensors, and shape."""

Specs = Mapping[str, Spec | None]
"""By name. None: there is no such tensor."""

HEAD = "lm_head.weight"
"""The one tensor that may be there or not, where the output layer shares the embedding."""

_FLOATS = {code: str(DTYPES[code].torch) for code in FLOATS if DTYPES[code].bits >= 16}


def specs_at(chain: Chain, step: int | None) -> dict[str, Spec]:
    """Of a step's tensors. Empty where no anchor leads to it, and what they are is not known."""
    try:
        anchor, deltas = chain.path(-1 if step is None else step)
    except DeltactlError:
        return {}
    assert not isinstance(anchor.header, DeltaHeader)
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in anchor.header.tensors}
    for delta in deltas:
        assert isinstance(delta.header, DeltaHeader)
        for name, spec in specs_of(delta.header).items():
            if spec is None:
                found.pop(name, None)
            else:
                found[name] = spec
    return found


def specs_of(delta: DeltaHeader) -> dict[str, Spec | None]:
    """Of the tensors that a delta leads to, as far as it tells; None for those it removes."""
    found: dict[str, Spec | None] = {}
    for name, record in delta.records.items():
        if record.kind == "removed":
            found[name] = None
        elif record.dtype is not None and record.shape is not None:
            found[name] = record.dtype, record.shape
    return found


def float_of(specs: Specs) -> str | None:
    """The floating type that most elements have, in torch's words; None where none has any."""
    elements: Counter[str] = Counter()
    for spec in specs.values():
        if spec is not None and spec[0] in _FLOATS:
            elements[_FLOATS[spec[0]]] += elements_of(*spec)
    return max(elements, key=lambda dtype: elements[dtype], default=None)


def check_same(served: Specs, step: Specs, url: str, *, whole: bool) -> None:
    """Raise Conflict where a running server cannot become what one would be that is started on the
    step. ``whole``: whether ``step`` names all of the step's tensors."""
    names = step.keys() | served.keys() if whole else step.keys()
    differ = sorted(name for name in names if served.get(name) != step.get(name))
    if not differ:
        return
    name, more = differ[0], len(differ) - 1
    raise Conflict(
        "the step is of another model than the one that is served"
        + (f": {len(differ)} of {len(names)} tensors are not alike" if more else ""),
        file=url,
        tensor=name,
        expected=_told(served.get(name)),
        found=_told(step.get(name)),
        hint="see that this is the chain of the server's model; if the model has changed, pull the "
        "step, and start vLLM on it",
    )


def check_model(configuration: Mapping[str, Any], step: Specs, url: str) -> None:
    """Raise Conflict where a step has other tensors, or of other shapes, than the directory that
    vLLM was started on. Nothing is raised where that cannot be seen from here."""
    model = configuration.get("model_config")
    path = Path(str(model.get("model"))) if isinstance(model, dict) else Path()
    served = _shapes(path)
    shapes = {name: spec[1] for name, spec in step.items() if spec is not None}
    if not served or not shapes:
        return
    optional = {HEAD} if is_tied(config_of(path)) else set()
    for name in sorted((served.keys() | shapes.keys()) - optional):
        if served.get(name) != shapes.get(name):
            raise Conflict(
                f"the step is of another model than {path}, which the server was started on",
                file=url,
                tensor=name,
                expected=_told_shape(served.get(name)),
                found=_told_shape(shapes.get(name)),
                hint="pull the step, and start vLLM on it",
            )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a directory, by name; empty where there is none that can be read."""
    try:
        if path == Path() or not any(path.glob("*.safetensors")):
            return {}
        with open_checkpoint(path) as found:
            return {tensor.name: tensor.shape for tensor in found.tensors.values()}
    except (DeltactlError, OSError):
        return {}


def _told(spec: Spec | None) -> str:
    return "no such tensor" if spec is None else f"{spec[0]} {list(spec[1])}"


def _told_shape(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"
