"""Whether a checkpoint is of the model that a vLLM without deltactl's plugin serves.

Such a server names none of its tensors without hashing them all. But it says which directory it was
started on, and where that is to be seen from here, as that of a reload has to be from there, its
tensors can be compared before anything is fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from deltactl.core.checkpoint import open_checkpoint
from deltactl.core.digest import TensorState
from deltactl.core.errors import Conflict, DeltactlError
from deltactl.core.reading import parse_json

HEAD = "lm_head.weight"
"""The one tensor that may be there or not, where the output layer shares the embedding."""


def check_model(
    configuration: Mapping[str, Any], tensors: Collection[TensorState], url: str
) -> None:
    """Raise Conflict where a step has other tensors, or of other shapes, than the directory that
    vLLM was started on. Nothing is raised where that cannot be seen from here."""
    model = configuration.get("model_config")
    path = Path(str(model.get("model"))) if isinstance(model, dict) else Path()
    served = _shapes(path)
    step = {tensor.name: tensor.shape for tensor in tensors}
    if not served or not step:
        return
    optional = {HEAD} if _is_tied(path) else set()
    for name in sorted((served.keys() | step.keys()) - optional):
        if served.get(name) != step.get(name):
            raise Conflict(
                f"the step is of another model than {path}, which the server was started on",
                file=url,
                tensor=name,
                expected=_told(served.get(name)),
                found=_told(step.get(name)),
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


def _is_tied(path: Path) -> bool:
    """Whether its configuration says so, for a model of text or of more."""
    try:
        config = parse_json((path / "config.json").read_bytes(), path)
    except (DeltactlError, OSError):
        return False
    of_text = config.get("text_config")
    parts = [config, of_text if isinstance(of_text, dict) else {}]
    return any(part.get("tie_word_embeddings") is True for part in parts)


def _told(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"
