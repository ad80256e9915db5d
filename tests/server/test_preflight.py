"""What keeps a server from being updated is told before anything is done, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from deltactl.core.errors import Conflict, DeltactlError, Unsupported
from deltactl.server.apply import apply_to_servers
from deltactl.server.doctor import Finding, examine
from tests.server.conftest import QUICK, Start, Steps
from tests.support.vllm_standin import StandIn


def an_old_vllm(server: StandIn) -> None:
    server.vllm.version = "0.31.2"


def without_development_mode(server: StandIn) -> None:
    server.vllm.dev = False


def without_the_plugin(server: StandIn) -> None:
    server.vllm.plugin = False
    server.vllm.extension = None


def without_the_extension(server: StandIn) -> None:
    server.vllm.extension = None


def another_protocol(server: StandIn) -> None:
    server.vllm.workers.protocol = 2


def data_parallel(server: StandIn) -> None:
    server.vllm.replicas = 2


def another_dtype(server: StandIn) -> None:
    server.vllm.workers.dtype = "float16"


def another_backend(server: StandIn) -> None:
    server.vllm.workers.rank_says[0] = {"backend": False}


CASES = [
    (an_old_vllm, Unsupported, "too old"),
    (without_development_mode, Unsupported, "VLLM_SERVER_DEV_MODE=1"),
    (without_the_plugin, Unsupported, "--weight-transfer-config"),
    (without_the_extension, Unsupported, "--worker-extension-cls deltactl.vllm.WorkerExtension"),
    (another_protocol, Unsupported, "same version on both sides"),
    (data_parallel, Unsupported, "one vLLM server for each"),
    (another_dtype, Conflict, "--dtype bfloat16"),
    (another_backend, Unsupported, "plugin"),
]


@pytest.mark.parametrize(("make", "kind", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_told(
    make: Any, kind: type[DeltactlError], words: str, ranks: int, start: Start, steps: Steps
) -> None:
    server = start(ranks=ranks)
    make(server)
    report = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas[0]
    assert isinstance(report.error, kind)
    assert words in f"{report.error} {report.error.hint}"
    assert server.live == steps.states[1]
    assert not {"/pause", "/resume", "rpc:deltactl_stage"} & set(server.requests)
    # Ranks that lack the methods were not asked for them: their replies would be out of step.
    assert not any(server.vllm._queues)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "1.0", "0.0.0+cpu", "dev", "0.100.0rc1"])
def test_versions_that_are_taken(version: str, start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.version = version
    assert apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas[0].error is None


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def test_a_sound_server(start: Start, steps: Steps) -> None:
    server = start()
    findings = examine(server.url)
    assert levels(findings) == {
        "reachable": "ok", "routes": "ok", "exposed": "warn", "plugin": "ok", "weights": "ok",
    }  # fmt: skip
    apply_to_servers(steps.bucket, 3, [server.url], QUICK)
    weights = next(finding for finding in examine(server.url) if finding.check == "weights")
    assert f"step 3, state {steps.states[3]}" in weights.what


def test_it_changes_nothing(start: Start) -> None:
    server = start()
    examine(server.url)
    reads = {
        "/version", "/health", "/is_paused", "/server_info", "rpc:deltactl_state",
    }  # fmt: skip
    assert set(server.requests) == reads


@pytest.mark.parametrize(("make", "kind", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_doctor_says_what_apply_would(
    make: Any, kind: type[DeltactlError], words: str, start: Start
) -> None:
    server = start(ranks=2)
    make(server)
    errors = [finding for finding in examine(server.url) if finding.level == "error"]
    if make is another_dtype:  # which only a chain can tell
        assert errors == []
    else:
        assert words in f"{errors[-1].what} {errors[-1].hint}"
        assert not any(server.vllm._queues)


def test_a_server_that_is_not_there(start: Start) -> None:
    server = start()
    server.kill()
    (finding,) = examine(server.url)
    assert (finding.level, finding.check) == ("error", "reachable")
    assert "vllm serve runs there" in str(finding.hint)


PAGE = b"<!DOCTYPE html>\n<html><head><title>404\n Not Found</title>" + b"<p>x</p>" * 999


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (404, PAGE, "found status 404, a web page, '404 Not Found'"),
        (200, PAGE, "found another answer, a web page, '404 Not Found'"),
        (200, b" <html>", "found another answer, a web page"),
        (200, b"welcome\nto " + b"x" * 999, "found another answer, welcome to xxxx"),
        (200, b"{}", "expected vLLM's version at /version, found another answer"),
        (302, b"", "found status 302"),
        (404, b'{"detail":"Not Found"}', "found status 404, Not Found"),
    ],
)
def test_what_is_no_vllm(status: int, body: bytes, found: str, start: Start, steps: Steps) -> None:
    server = start()
    server.fail("/version", status=status, body=body, times=None)
    (finding,) = examine(server.url)
    assert (finding.level, finding.check) == ("error", "reachable")
    assert finding.what.startswith(f"{server.url}: what answers at this address is no vLLM server")
    assert found in finding.what
    assert "<" not in finding.what
    assert len(finding.what) < 300
    assert "http://HOST:PORT, without /v1" in str(finding.hint)
    report = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas[0]
    assert str(report.error) == finding.what


@pytest.mark.parametrize("route", ["/version", "/is_paused", "/server_info", "rpc:deltactl_state"])
@pytest.mark.parametrize("how", ["error", "drop", "kill"])
def test_the_doctor_never_sends_to_the_doctor(route: str, how: str, start: Start) -> None:
    server = start()
    server.fail(route, how=how, times=None)
    errors = [finding for finding in examine(server.url) if finding.level == "error"]
    assert errors
    assert "deltactl doctor" not in str(errors)


def test_several_replicas_behind_one_address_are_a_finding_of_their_own(start: Start) -> None:
    server = start()
    data_parallel(server)
    finding = examine(server.url)[-1]
    assert (finding.level, finding.check) == ("error", "replicas")
    assert "data-parallel size 2" in finding.what
    assert "rpc:deltactl_state" not in server.requests


def test_a_server_whose_engine_is_dead(start: Start) -> None:
    server = start()
    server.fail("/health", status=503)
    assert levels(examine(server.url))["health"] == "error"


def test_weights_that_nobody_knows(start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.workers.poisoned = DeltactlError("written by half")
    finding = next(finding for finding in examine(server.url) if finding.check == "weights")
    assert finding.level == "error"
    assert "written by half" in finding.what


def test_pauses_and_leftovers(start: Start) -> None:
    server = start()
    server.vllm.paused = True
    paused = next(finding for finding in examine(server.url) if finding.check == "paused")
    assert "somebody else" in paused.what
    assert paused.hint == f"curl -X POST {server.url}/resume"
    server.vllm.workers.update = {
        "id": "x", "phase": "ready", "from_step": 1, "to_step": 2, "error": None, "elements": 0,
    }  # fmt: skip
    found = examine(server.url)
    assert levels(found)["update"] == levels(found)["paused"] == "warn"
    assert "curl" not in str([finding.hint for finding in found])


def test_tensors_that_take_longer_are_named(start: Start) -> None:
    server = start()
    unmapped = {f"tensor{n}": "transposed" for n in range(8)}
    server.vllm.workers.map = {"tensors": 1, "unmapped": unmapped, "ignored": ["head"]}
    finding = next(finding for finding in examine(server.url) if finding.check == "map")
    assert "8 of 10 tensors" in finding.what
    assert "tensor0 (transposed)" in finding.what
    assert finding.what.endswith("and 3 more")
