"""Quantised models: each brought to a step and compared with a fresh one on it, or refused by name.

Layer by layer in this process for every kind; and int8, where vLLM's own reload leaves noise, on
real servers too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltactl.bucket import open_bucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.ops.push import push
from deltactl.server.apply import apply_to_servers
from deltactl.server.report import Replica
from deltactl.server.update import Options
from deltactl.vllm.layout import cpu_layout
from deltactl.vllm.layout.proven import RESTART, unproven
from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import record
from deltactl.vllm.update.reload import reload_tensors
from tests.support.checkpoints import read_tensors
from tests.support.vllm_chain import write_like
from tests.support.vllm_client import PROMPTS
from tests.support.vllm_fixtures import Recorded
from tests.support.vllm_in_process import loaded
from tests.support.vllm_quantized import write_quantized
from tests.support.vllm_server import VllmServer, run_vllm_server

PROVEN = ("int8", "w4a16", "gptq", "awq")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for kind in (*PROVEN, "int8-static"):
        for seed in (0, 1):
            write_quantized(place / f"{kind}-{seed}", kind, seed=seed)
    return place


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server with this backend."""
    monkeypatch.setattr(cpu_layout, "_ours", lambda: True)
    cpu_layout.install()


def outputs(model: Any) -> dict[str, bytes]:
    """What each matrix makes of the same input, and every parameter, as bits."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    found = dict(model.named_parameters())
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            given = torch.randn(3, module.input_size, dtype=torch.bfloat16)
            found[f"{name}()"] = module.quant_method.apply(module, given)
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in found.items()
    }


def differing(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if a[name] != b[name]}


def nothing_is_mapped(parameter: Any) -> bool:
    return False


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("kind", PROVEN)
def test_a_reloaded_model_computes_as_a_fresh_one(kind: str, models: Path) -> None:
    from vllm.config import get_current_vllm_config

    with loaded(models / f"{kind}-1", packed=None) as fresh:
        expected = outputs(fresh)
    with (
        loaded(models / f"{kind}-0", packed=None) as model,
        open_checkpoint(models / f"{kind}-0") as first,
        open_checkpoint(models / f"{kind}-1") as second,
    ):
        assert unproven(model, nothing_is_mapped) is None
        specs = [TensorSpec(t.name, t.dtype, t.shape) for t in first.tensors.values()]
        found = record(model, specs)
        assert found.ignored == ()  # or their changes would be passed over
        assert {name for name in first.tensors if "_proj." in name} <= found.unmapped.keys()
        before = outputs(model)
        assert {name for name in before if name.endswith("()")} <= differing(before, expected)
        config = get_current_vllm_config().model_config
        for checkpoint, wanted in ((second, expected), (first, before), (second, expected)):
            reload_tensors(model, config, list(checkpoint.tensors), checkpoint)
            assert differing(outputs(model), wanted) == set()


@pytest.mark.parametrize(("kind", "mine", "found"), [
    ("int8", False, "CPUInt8ScaledMMLinearKernel by oneDNN"),
    ("int8-static", True,
     "CPUInt8ScaledMMLinearKernel by oneDNN, scales kept, scales of inputs"),
])  # fmt: skip
def test_what_was_not_proven_is_named(
    kind: str, mine: bool, found: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layout, "_ours", lambda: mine)
    cpu_layout.install()
    with loaded(models / f"{kind}-0", packed=None) as model:
        where = "model.layers.0.self_attn.qkv_proj is laid out by CompressedTensorsW8A8Int8"
        assert unproven(model, nothing_is_mapped) == f"{where} with {found}"


class Served:
    """A real server of the int8 model. Steps: 1, 2 with all weights new, 3 with other scales."""

    def __init__(self, server: VllmServer, bucket: str) -> None:
        self.server, self.bucket = server, bucket

    def apply(self, step: int, **options: Any) -> Replica:
        bucket = open_bucket(self.bucket)
        done = apply_to_servers(bucket, step, [self.server.url], Options(grace=0.2, **options))
        return done.replicas[0]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deltactl", *arguments, "--server", self.server.url]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def recorded(self) -> Recorded:
        self.server.post("/reset_prefix_cache")
        sums = self.server.rpc("test_checksums")
        return Recorded(self.server.generate(PROMPTS, 12), sums)


@pytest.fixture(scope="module")
def steps(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints; of the third only scales differ from the second's."""
    place = tmp_path_factory.mktemp("int8")
    tensors = read_tensors(models / "int8-1")
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith("_proj.weight_scale"):
            half = np.frombuffer(data, "<f4") * np.float32(0.5)
            tensors[name] = dtype, shape, half.tobytes()
    third = write_like(place / "step_3", models / "int8-1", tensors)
    return {1: models / "int8-0", 2: models / "int8-1", 3: third}


@pytest.fixture(scope="module")
def bucket(steps: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("int8") / "bucket")
    for step, checkpoint in steps.items():
        push(checkpoint, open_bucket(url), step=step, anchor_every=0)
    return url


@pytest.fixture(scope="module")
def fresh(steps: dict[int, Path], bucket: str, vllm_scratch: Path) -> Recorded:
    """A server that was started on the last step, and is gone."""
    with run_vllm_server(steps[3], vllm_scratch) as server:
        return Served(server, bucket).recorded()


@pytest.fixture(scope="module")
def served(
    steps: dict[int, Path], bucket: str, fresh: Recorded, vllm_scratch: Path
) -> Iterator[Served]:
    with run_vllm_server(steps[1], vllm_scratch) as server:
        yield Served(server, bucket)


def test_int8_on_a_real_server_forth_and_back(served: Served, fresh: Recorded) -> None:
    first = served.recorded()
    assert first.outputs != fresh.outputs
    for step, repair in ((2, False), (3, False), (3, True), (1, False), (3, False)):
        report = served.apply(step, repair=repair)
        assert (report.error, report.step_after) == (None, step)
        assert report.how == "full" or not repair
        assert "model.layers.0.mlp.gate_proj.weight_scale" in report.reloaded
        if step != 2:
            assert served.recorded() == (fresh if step == 3 else first)


def test_a_bad_answer_leaves_the_server_paused_and_the_command_says_so(served: Served) -> None:
    """Last of this server: no update can mend it."""
    served.server.rpc("test_spoil_reloads")
    done = served.command("apply", f"{served.bucket}@2", "--json")
    assert done.returncode == 3, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["replicas"]
    assert (row["ok"], row["paused"], row["step_after"]) == (False, True, None)
    assert "does not answer as it should" in row["error"]["found"]
    assert row["error"]["hint"] == RESTART
    assert served.server.get("/is_paused") == {"is_paused": True}
    assert served.server.alive()
