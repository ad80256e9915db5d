"""The plugin where its backend is not used: nothing is imported and nothing differs."""

from __future__ import annotations

import subprocess
import sys

from tests.support.vllm_server import ROOT

PROBE = """
import sys
from vllm.plugins import load_general_plugins

before = set(sys.modules)
load_general_plugins()
new = {name for name in set(sys.modules) - before if name.startswith("deltactl")}
ours = ["deltactl", "deltactl.vllm", "deltactl.vllm.layout", "deltactl.vllm.layout.cpu_layout"]
assert new == set(ours), new
from deltactl.vllm import register

register()  # vLLM may call it again
assert not any("fused_moe.experts" in name for name in sys.modules), "the layers were imported"

import torch
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

assert utils.dispatch_cpu_unquantized_gemm.by_deltactl
assert cpu_moe.CPUUnquantizedExperts.process_weights_after_loading.by_deltactl


def processed(config):
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer.requires_grad_(False)
    with set_current_vllm_config(config):
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


for config in (VllmConfig(), VllmConfig(weight_transfer_config=WeightTransferConfig("nccl"))):
    assert processed(config).cpu_linear is not torch.nn.functional.linear
ours = processed(VllmConfig(weight_transfer_config=WeightTransferConfig("deltactl")))
assert ours.cpu_linear is torch.nn.functional.linear
assert ours.weight.shape == (64, 64)
print("as it should be")
"""


def test_nothing_differs_where_the_backend_is_not_configured() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("as it should be\n")
