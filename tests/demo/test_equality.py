"""The comparison at the end: it holds for equal weights alone, and names what differs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltactl import __version__
from deltactl.bucket import open_bucket
from deltactl.demo.game import policy, tokens
from deltactl.demo.loop.equality import compare, runtime_checksums, state_at
from deltactl.ops.push import push
from deltactl.server.state import PROTOCOL

Tensors = dict[str, torch.Tensor]


class Told(BaseHTTPRequestHandler):
    """Stands for a server: says what ``says`` holds."""

    says: dict[str, Any]

    def do_GET(self) -> None:
        answers = {
            "/version": {"version": "0.32.0"},
            "/is_paused": {"is_paused": False},
            "/get_world_size": {"world_size": 1},
        }
        self._answer(answers[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/weight_checker":
            answer: dict[str, Any] = {"checksums": self.says["checksums"]}
        else:
            state = self.says["state"] | {"call": body["kwargs"]["call"]}
            answer = {"results": [state]}
        self._answer(answer)

    def _answer(self, answer: dict[str, Any]) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    says: dict[str, Any] = {}
    handler = type("Handler", (Told,), {"says": says})
    with HTTPServer(("127.0.0.1", 0), handler) as told:
        thread = threading.Thread(target=told.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{told.server_port}", says
        told.shutdown()
        thread.join()


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """The trainer's last weights in a file, and in ``bucket`` as step 4."""
    model = policy.new_model(0).bfloat16()
    model.save_pretrained(tmp_path / "checkpoint")
    tokens.tokenizer().save_pretrained(tmp_path / "checkpoint")
    push(tmp_path / "checkpoint", open_bucket(str(tmp_path / "bucket")), step=4)
    save_file(dict(model.state_dict()), tmp_path / "final.safetensors")
    return tmp_path / "final.safetensors"


def runtime(tensors: Tensors) -> dict[str, str]:
    """The checksums of a vLLM that holds these, by the fusion that its models make."""
    live: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [
                tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            live[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            parts = [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            live[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            live[name] = tensor
    return {
        f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(
            tensor.contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in live.items()
    }


def telling(final: Path, **other: Any) -> dict[str, Any]:
    audit = {"phase": "done", "checked": 25, "differing": [], "unaudited": []}
    state = {
        "protocol": PROTOCOL,
        "rank": 0,
        "world_size": 1,
        "deltactl": __version__,
        "backend": True,
        "dtype": "bfloat16",
        "identity": "known",
        "map": {"tensors": 25, "unmapped": {}, "ignored": []},
        "step": 4,
        "state": state_at(final),
        "audit": audit,
    }
    return {"checksums": runtime(load_file(final)), "state": state | other}


def test_runtime_checksums_are_those_of_the_fused_tensors(final: Path) -> None:
    tensors = load_file(final)
    raw = {
        name: np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), np.uint8)
        for name, tensor in tensors.items()
    }
    expected = {name.rpartition(":")[2]: found for name, found in runtime(tensors).items()}
    assert runtime_checksums(raw) == expected
    assert len(expected) == 19


def test_equal_weights_are_equal(final: Path, server: tuple[str, dict[str, Any]]) -> None:
    url, says = server
    says.update(telling(final))
    bucket = open_bucket(str(final.parent / "bucket"))
    found = compare(bucket, final, url, final.parent / "pulled")
    assert found.holds
    assert (found.step, found.audit.step, found.parameters) == (4, 4, 19)
    assert found.elements == sum(tensor.numel() for tensor in load_file(final).values())


AUDIT = {"phase": "done", "checked": 25, "differing": [], "unaudited": []}
UNLIKE: dict[str, dict[str, Any]] = {
    "another step": {"step": 3},
    "another state": {"state": "0" * 64},
    "no state": {"state": None},
    "poisoned": {"poisoned": {"what": "half of an update", "kind": "Malformed"}},
    "a tensor that differs": {"audit": AUDIT | {"differing": ["lm_head.weight"]}},
    "a tensor that nobody audited": {"audit": AUDIT | {"unaudited": ["lm_head.weight"]}},
    "an audit of nothing": {"audit": AUDIT | {"checked": 0}},
    "an audit that failed": {"audit": AUDIT | {"phase": "failed"}},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_server_that_says_otherwise_is_not(
    final: Path, server: tuple[str, dict[str, Any]], name: str
) -> None:
    url, says = server
    says.update(telling(final, **UNLIKE[name]))
    bucket = open_bucket(str(final.parent / "bucket"))
    assert not compare(bucket, final, url, final.parent / "pulled").holds


def test_one_bit_in_a_live_parameter_shows(final: Path, server: tuple[str, dict[str, Any]]) -> None:
    url, says = server
    says.update(telling(final))
    tensors = load_file(final)
    bits = tensors["model.layers.1.self_attn.k_proj.weight"].view(torch.int16)
    bits[3, 5] ^= 1
    says["checksums"] = runtime(tensors)
    bucket = open_bucket(str(final.parent / "bucket"))
    found = compare(bucket, final, url, final.parent / "pulled")
    assert not found.holds
    assert found.unlike_served == ("model.layers.1.self_attn.qkv_proj.weight",)


@pytest.mark.parametrize("missing", [True, False])
def test_a_parameter_too_few_or_too_many_shows(
    final: Path, server: tuple[str, dict[str, Any]], missing: bool
) -> None:
    url, says = server
    says.update(telling(final))
    if missing:
        del says["checksums"]["dp0:pp0:pcp0:tp0:model.norm.weight"]
    else:
        says["checksums"]["dp0:pp0:pcp0:tp0:more"] = "0" * 64
    bucket = open_bucket(str(final.parent / "bucket"))
    found = compare(bucket, final, url, final.parent / "pulled")
    assert found.unlike_served == ("model.norm.weight" if missing else "more",)
    assert not found.holds


def test_one_bit_in_the_bucket_shows(final: Path, server: tuple[str, dict[str, Any]]) -> None:
    url, says = server
    tensors = load_file(final)
    tensors["model.norm.weight"].view(torch.int16)[7] ^= 1
    save_file(tensors, final)
    says.update(telling(final))
    bucket = open_bucket(str(final.parent / "bucket"))
    found = compare(bucket, final, url, final.parent / "pulled")
    assert not found.holds
    assert found.unlike_pulled == ("model.norm.weight",)
    assert found.trainer != found.bucket == found.pulled
