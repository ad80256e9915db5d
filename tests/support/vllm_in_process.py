"""vLLM's own model classes, loaded in this process as its CPU worker loads them, without an engine.

    with loaded(path) as model: ...                    # as one rank
    with loaded(path, ranks=2, rank=1) as model: ...   # the slices of one rank of two

Ranks are pretended: no second process exists, and such a model cannot compute. How matrices are
packed for the CPU depends on the processor; here they are not, or all are. Needs vllm.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def loaded(
    path: Path,
    *,
    ranks: int = 1,
    rank: int = 0,
    processed: bool = True,
    packed: bool | None = False,
) -> Iterator[Any]:
    """The model of a checkpoint, its weights loaded and, if ``processed``, made ready to compute:
    with every matrix of a linear layer packed away, if ``packed``, as on a processor with AVX-512.
    None: as vLLM, or who patched it, has it.
    """
    os.environ.update(ENVIRONMENT)
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader, utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=str(path),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=2,
        enforce_eager=True,
        tensor_parallel_size=ranks,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        port = _free_port()
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel(1, 1)
            group = parallel_state.get_tp_group()
            group.world_size, group.rank_in_group = ranks, rank
            with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
                model = utils.initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            if processed:
                with nullcontext() if packed is None else _linears(_pack if packed else _leave):
                    device = torch.device("cpu")
                    utils.process_weights_after_loading(model, config.model_config, device)
            yield model
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def _linears(prepare: Callable[[Any, bool], None]) -> Iterator[None]:
    """Have a function of ours prepare linear layers and embeddings for the CPU meanwhile."""
    from vllm.model_executor.layers import utils

    theirs = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = prepare
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = theirs


def _leave(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def _pack(layer: Any, remove_weight: bool) -> None:
    """As vLLM does with oneDNN: the layer computes with a copy, and its weight becomes empty unless
    it is an embedding."""
    import torch

    packed = layer.weight.t().contiguous()
    layer.cpu_linear = lambda x, weight, bias: x @ packed
    if remove_weight:
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
