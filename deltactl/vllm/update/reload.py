"""Tensors that the map cannot express, loaded anew by vLLM's own layerwise reload.

For layers that hold something else than what the loader wrote: packed for a processor, quantised,
cast. All tensors of a layer are loaded from the step's checkpoint, laid out as at the start, and
copied over the live ones in place, so that what was captured of their addresses stays good.

Limits. It takes the time to load and lay out those layers, in the pause. What is live then cannot
be compared with the checkpoint's bits, before or after, and nothing of it can be taken back: a
failure in the middle leaves weights that nobody knows. Two things that vLLM packs for a CPU its
reload forgets, a tied output layer's copy and unquantised experts; they are packed again here.
That parameters read right afterwards proves nothing of what a layer computes with beside them: only
layers for which a test has compared answers are loaded so (``layouts``), and the model is asked
before anybody else asks it (``canary``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor
from deltactl.checkpoint.torch_dtypes import torch_dtypes
from deltactl.core.errors import Conflict

_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


def reload_tensors(
    model: Any, model_config: Any, names: Iterable[str], checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Load these tensors of a step, and all others of the layers that they belong to.

    ``model_config``: vLLM's. Returns the names of all that were fed to the loader. On the thread
    that owns the model, which must not compute meanwhile. Raises Conflict for a tensor that the
    checkpoint does not have, and then nothing was done; whatever vLLM raises, and then the weights
    are in an unknown state.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    wanted = list(names)
    for name in wanted:
        _need(checkpoint, name)
    groups = dict.fromkeys(map(_group, wanted))
    fed = [name for name in checkpoint.tensors if _group(name) in groups]
    with set_default_torch_dtype(model_config.dtype):  # as vLLM does when it loads
        initialize_layerwise_reload(model)
        try:
            model.load_weights(_weights(checkpoint, fed))
            if _has_incomplete(model):  # a layer of tensors with other names: all of them, then
                rest = [name for name in checkpoint.tensors if _group(name) not in groups]
                model.load_weights(_weights(checkpoint, rest))
                fed += rest
        finally:
            touched = _touched(model)
            with _without_warnings():
                finalize_layerwise_reload(model, model_config)
        _pack_for_cpu(model, touched)
    return tuple(fed)


def _need(checkpoint: Checkpoint, name: str) -> None:
    tensor = checkpoint.tensors.get(name)
    if tensor is None or tensor.dtype not in torch_dtypes():
        raise Conflict(
            "the step's checkpoint has no such tensor that could be loaded",
            file=checkpoint.path,
            tensor=name,
            found=None if tensor is None else tensor.dtype,
        )


def _group(name: str) -> str:
    """What a tensor's name begins with as all others of its layer do: up to the first number, as
    in ``model.layers.0.``, as fused layers and experts lie below such; else its module's name."""
    parts = name.split(".")
    at = next((n for n, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: at + 1]) + "."


def _weights(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        tensor = checkpoint.tensors[name]
        if tensor.dtype in torch_dtypes():
            yield name, _loaded(tensor)


def _loaded(tensor: Tensor) -> torch.Tensor:
    """A tensor's content in memory of its own: loaders may write to what they are given."""
    data = torch.from_numpy(np.array(tensor.data))
    return data.view(torch_dtypes()[tensor.dtype]).view(tensor.shape)


def _has_incomplete(model: Any) -> bool:
    """Whether a layer has been given some of its elements and waits for the others."""
    infos = [_info(layer) for layer in model.modules()]
    return any(info.can_load() and 0 < info.load_numel < info.load_numel_total for info in infos)


def _touched(model: Any) -> list[Any]:
    """The layers that something was loaded into: those that are through wait no longer."""
    infos = [(layer, _info(layer)) for layer in model.modules()]
    return [layer for layer, info in infos if not info.can_load() or info.load_numel]


def _info(layer: Any) -> Any:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """vLLM warns of every layer that nothing was loaded into; here that is as it should be."""

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    logger = logging.getLogger(_LOGGER)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _pack_for_cpu(model: Any, touched: Iterable[Any]) -> None:
    """Pack what the reload has left as it was loaded: an output layer, from weights that it may
    share with the embedding; of experts those that were loaded, as they are packed in place."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    for module in touched:
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)
