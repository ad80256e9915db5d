"""What the worker extension tells, on a worker that is not vLLM's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deltactl
from deltactl.core.errors import Unsupported
from deltactl.vllm import WorkerExtension
from deltactl.vllm.update.model_weights import ModelWork
from deltactl.vllm.update.peers import Alone
from deltactl.vllm.update.serving import Serving

KEYS = {
    "deltactl", "protocol", "rank", "world_size", "dtype", "model", "backend", "session", "call",
    "doubt", "asleep",
    "identity", "step", "state", "bucket", "poisoned", "error", "update", "map", "audit",
    "server", "draft",
}  # fmt: skip


class Worker(WorkerExtension):
    """As vLLM mixes it in: the extension comes last and is never made by itself."""

    def __init__(self, engine: Any) -> None:
        self.rank = 1
        model = SimpleNamespace(dtype=torch.bfloat16, model="/models/m")
        self.vllm_config = SimpleNamespace(
            model_config=model, parallel_config=SimpleNamespace(world_size=2)
        )
        self.weight_transfer_engine = engine


def serving(refusal: Unsupported | None = None) -> Serving:
    work = ModelWork(nn.Linear(2, 2), lambda: Path("/nowhere"), 1)
    return Serving(work, Alone(), refusal)


@pytest.mark.parametrize("engine", [None, object(), SimpleNamespace(serving=object())])
def test_without_our_engine_only_what_vllm_knows_is_told(engine: Any) -> None:
    worker = Worker(engine)
    for state in (
        worker.deltactl_state("x"),
        worker.deltactl_map("x"),
        worker.deltactl_done("u", "x"),
    ):
        assert state.keys() == KEYS
        assert (state["backend"], state["identity"], state["session"]) == (False, "unknown", False)
        assert (state["rank"], state["world_size"], state["call"]) == (1, 2, "x")
        assert (state["dtype"], state["model"]) == ("bfloat16", "/models/m")
        assert state["deltactl"] == deltactl.__version__
        assert state["error"] is state["update"] is None


def test_every_method_tells_the_state_and_none_raises() -> None:
    worker = Worker(SimpleNamespace(serving=serving()))
    told = [
        worker.deltactl_state("1"),
        worker.deltactl_identify({"00": 1}, "2"),
        worker.deltactl_map("3"),
        worker.deltactl_stage({}, "4"),
        worker.deltactl_seal("u", "5"),
        worker.deltactl_discard("u", "6"),
        worker.deltactl_done("u", "7"),
        worker.deltactl_audit("8"),
        worker.deltactl_audit_seal("9"),
    ]
    assert [state["call"] for state in told] == [*"123456789"]
    for state in told:
        assert state.keys() == KEYS
        assert state["backend"] is True
        assert (state["rank"], state["world_size"]) == (1, 2)
    assert told[1]["identity"] == "failed"
    assert told[1]["error"]["kind"] == "NotFound"


def test_a_session_of_vllm_s_is_told() -> None:
    worker = Worker(SimpleNamespace(serving=serving()))
    worker._weight_update_active = True  # type: ignore[attr-defined]
    assert worker.deltactl_state()["session"] is True


def test_why_a_server_takes_no_updates() -> None:
    worker = Worker(SimpleNamespace(serving=serving(Unsupported("data parallelism"))))
    for state in (worker.deltactl_state(), worker.deltactl_stage({}), worker.deltactl_map()):
        assert state["error"]["what"] == "data parallelism"


def test_a_draft_is_told() -> None:
    worker = Worker(SimpleNamespace(serving=serving()))
    assert worker.deltactl_state()["draft"] is None
    worker.vllm_config.speculative_config = SimpleNamespace(method="mtp", model="/models/m")
    assert worker.deltactl_state()["draft"] == {"method": "mtp", "model": "/models/m"}


def test_each_server_has_a_name_of_its_own() -> None:
    one, other = (Worker(SimpleNamespace(serving=serving())) for _ in range(2))
    assert one.deltactl_state()["server"] == one.deltactl_state()["server"]
    assert one.deltactl_state()["server"] != other.deltactl_state()["server"]


def test_names_that_vllm_s_worker_gets_are_ours_alone() -> None:
    """It refuses an extension of which any name is its own already."""
    added = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert added
    assert all(name.startswith("deltactl_") for name in added)
