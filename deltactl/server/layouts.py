"""Which vLLM without deltactl's plugin may reload: kinds of which a test has compared the answers.

vLLM makes what its kernels want out of the weights, keeps some of that where no parameter shows it,
and its reload forgets some. With the plugin each layer can be looked at, and what is forgotten is
made anew; without it there is what the server says of its configuration, and the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deltactl.core.errors import DeltactlError, Unsupported
from deltactl.files.untrusted import parse_json

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How models' configurations call it that there are some."""


def check_layout(configuration: Mapping[str, Any], model: Path, url: str) -> None:
    """Raise Unsupported where a reload was not proven to leave a server as a fresh one would be.

    ``configuration``: vLLM's. ``model``: a checkpoint of what is served, whose ``config.json`` is
    looked at if it can be read from here.
    """
    found = next(_unproven(configuration, config_of(model)), None)
    if found is not None:
        raise Unsupported(
            "vLLM's own reload was not proven to leave such a server with the right answers",
            file=url,
            expected="no quantisation and no experts, and on a CPU an output layer of its own",
            found=found,
            hint="start it with deltactl's plugin, which can look at each layer, and leave out "
            "--via reload; or pull the step, and start the server anew on it",
        )


def _unproven(configuration: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    method = _of(configuration, "model_config", "quantization")
    method = method or _of(config, "quantization_config", "quant_method")
    if method:
        yield f"quantisation {method}"
    moe = _of(configuration, "parallel_config", "is_moe_model") is True
    if moe or any(part.get(key) for part in _parts(config) for key in _EXPERTS):
        yield "a model with experts"
    if _of(configuration, "device_config", "device") == "cpu" and is_tied(config):
        yield "an output layer that shares the embedding, packed for the CPU"


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output layer shares the embedding, of a model of text or of more."""
    return any(part.get("tie_word_embeddings") is True for part in _parts(config))


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    of_text = config.get("text_config")
    return [config, of_text if isinstance(of_text, dict) else {}]


def _of(document: Mapping[str, Any], section: str, key: str) -> Any:
    found = document.get(section)
    return found.get(key) if isinstance(found, dict) else None


def config_of(model: Path) -> dict[str, Any]:
    """A model's ``config.json``; empty where there is none that can be read."""
    path = model / "config.json"
    try:
        return parse_json(path.read_bytes(), path)
    except (DeltactlError, OSError):
        return {}
