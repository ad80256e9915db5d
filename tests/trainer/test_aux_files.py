"""What the config says that travels with anchors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from deltactl.trainer.upload.aux_files import collect


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def config_of(model: Any, place: Path) -> Any:
    return json.loads(collect(model, None, None, place)["config.json"].read_text())


@pytest.mark.usefixtures("group")
def test_a_sharded_model_is_of_the_class_that_servers_know(tmp_path: Path) -> None:
    """``fully_shard`` makes a class of its own of a model's."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=16,
        )
    )  # fmt: skip
    plain = config_of(model, tmp_path / "plain")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert type(model).__name__ == "FSDPLlamaForCausalLM"
    assert config_of(model, tmp_path / "sharded") == plain
    assert plain["architectures"] == ["LlamaForCausalLM"]
