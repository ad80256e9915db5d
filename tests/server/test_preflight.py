"""What keeps a server from being updated is told before anything is done, with the remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltactl.chain.reading import read_chain
from deltactl.core.errors import Conflict, DeltactlError, Unsupported
from deltactl.server.apply import apply_delta_to_servers, apply_to_servers
from deltactl.server.audit import audit_servers
from deltactl.server.doctor import Finding, examine
from deltactl.server.fleet import Met
from deltactl.server.goal import ChainGoal
from deltactl.server.model import float_of, specs_at
from tests.server.conftest import QUICK, Start, Steps
from tests.support.chains import first_state, make_chain, make_delta, states
from tests.support.checkpoints import random_tensor
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
    server.vllm.workers.protocol = 3


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
        "rpc:deltactl_tensors",
    }  # fmt: skip
    assert set(server.requests) == reads


@pytest.mark.parametrize(("make", "kind", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_doctor_says_what_apply_would(
    make: Any, kind: type[DeltactlError], words: str, start: Start
) -> None:
    server = start(ranks=2)
    make(server)
    errors = [finding for finding in examine(server.url) if finding.level == "error"]
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


def test_layers_that_no_reload_was_proven_for_are_named(start: Start, steps: Steps) -> None:
    server = start()
    with_a_layer_that_cannot_be_loaded(server)
    (found,) = [finding for finding in examine(server.url) if finding.check == "map"]
    assert found.level == "warn"
    assert "1 of 5 tensors" in found.what
    assert "only of Bar, Baz: model.embed (model.embed is laid out by Foo)" in found.what
    assert found.hint == "pull the step, and start the server anew on it"
    (report,) = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas
    assert isinstance(report.error, Unsupported)
    assert report.error.expected == "one of Bar, Baz"
    assert "/pause" not in server.requests


def test_tensors_that_take_longer_are_named(start: Start) -> None:
    server = start()
    unmapped = {f"tensor{n}": "transposed" for n in range(8)}
    server.vllm.workers.map = {"tensors": 1, "unmapped": unmapped, "ignored": ["head"]}
    finding = next(finding for finding in examine(server.url) if finding.check == "map")
    assert "8 of 10 tensors" in finding.what
    assert "tensor0 (transposed)" in finding.what
    assert finding.what.endswith("and 3 more")
    refused = dict(list(unmapped.items())[:6])
    server.vllm.workers.map["refused"] = refused
    first, second = (finding for finding in examine(server.url) if finding.check == "map")
    assert first.what.startswith("6 of 10 tensors cannot be loaded")
    assert second.what.startswith("2 of 10 tensors are not written")


# What a step has, and the server has not: apply, apply -n and the doctor say the same.


def of_another_model(server: StandIn) -> None:
    tensors = server.vllm.workers.tensors
    server.vllm.workers.tensors = {f"module.{name}": live for name, live in tensors.items()}


def of_another_shape(server: StandIn) -> None:
    server.vllm.workers.tensors["model.embed"].shape = (20, 40)


def of_another_type(server: StandIn) -> None:
    server.vllm.workers.tensors["model.embed"].dtype = "F16"


def with_one_more(server: StandIn) -> None:
    tensors = server.vllm.workers.tensors
    tensors["model.visual"] = tensors["model.norm"]


def with_one_less(server: StandIn) -> None:
    del server.vllm.workers.tensors["model.embed"]


def with_a_layer_that_cannot_be_loaded(server: StandIn) -> None:
    why = {"model.embed": "model.embed is laid out by Foo"}
    server.vllm.workers.map = {
        "tensors": 4, "unmapped": why, "ignored": [], "refused": why, "proven": ["Bar", "Baz"]
    }  # fmt: skip


def is_elsewhere(server: StandIn) -> None:
    """On a later step, of which its bits are, than this client can see."""
    workers = server.vllm.workers
    for method, arguments in (("identify", {"bucket_states": {}}), ("map", {})):
        workers.call(f"deltactl_{method}", arguments, False)
        workers.close()
    workers.state, workers.step = "0" * 64, 9


UNFIT = [
    (another_dtype, Conflict, "expected bfloat16, found float16"),
    (of_another_model, Conflict, "10 of 10 tensors are not alike"),
    (of_another_shape, Conflict, "tensor 'model.embed': the step is of another model"),
    (of_another_type, Conflict, "expected F16 [40, 20], found BF16 [40, 20]"),
    (with_one_more, Conflict, "tensor 'model.visual'"),
    (with_one_less, Conflict, "expected no such tensor, found BF16 [40, 20]"),
    (with_a_layer_that_cannot_be_loaded, Unsupported, "1 of 5 tensors"),
    (is_elsewhere, Conflict, "newer step than the chain can give"),
]


@pytest.mark.parametrize(("make", "kind", "words"), UNFIT, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rule_for_all_who_ask(
    make: Any, kind: type[DeltactlError], words: str, ranks: int, start: Start, steps: Steps
) -> None:
    server, told = start(ranks=ranks), []
    make(server)
    before = server.live
    goal = ChainGoal(read_chain(steps.bucket), None)
    (error,) = [row for row in examine(server.url, goal=goal) if row.level == "error"]
    told.append((error.what, error.hint))
    for dry_run in (True, False):
        options = replace(QUICK, dry_run=dry_run)
        found = apply_to_servers(steps.bucket, None, [server.url], options).replicas[0].error
        assert type(found) is kind
        told.append((str(found), found.hint))
    assert words in told[0][0]
    if make is another_dtype:  # the doctor has asked the server already, of its own checkpoint
        assert "expected bfloat16, found float16" in told[0][0]
    assert told[0] == told[1] == told[2]
    assert server.live == before
    assert "/pause" not in server.requests


@pytest.mark.parametrize(
    "make", [of_another_model, of_another_shape, of_another_type, with_one_less]
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_delta_of_another_model(
    make: Any, dry_run: bool, start: Start, steps: Steps, tmp_path: Path
) -> None:
    delta = make_delta(tmp_path / "two.safetensors", *states(2), encoding="raw")
    server = start()
    make(server)
    server.vllm.workers.identity, server.vllm.workers.state = "known", steps.states[1]
    options = replace(QUICK, dry_run=dry_run)
    (report,) = apply_delta_to_servers(delta, [server.url], options).replicas
    assert isinstance(report.error, Conflict)
    assert "another model" in report.error.what


def test_a_server_of_the_chain_is_not_asked_for_its_tensors(start: Start, steps: Steps) -> None:
    server = start()
    apply_to_servers(steps.bucket, 2, [server.url], QUICK)
    asked = server.requests.count("rpc:deltactl_tensors")
    assert apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas[0].error is None
    assert server.requests.count("rpc:deltactl_tensors") == asked == 1


def test_tensors_that_come_and_go_on_the_way(start: Start, tmp_path: Path) -> None:
    """The server is asked again, as a state of the chain is not one of the step's model."""
    first, more = first_state(), random_tensor("BF16", (4,), 2)
    bucket = make_chain(tmp_path, [first, {**first, "more": more}, first])
    chain = read_chain(bucket)
    assert [sorted(specs_at(chain, step).keys() - first.keys()) for step in (1, 2, 3)] == [
        [], ["more"], [],
    ]  # fmt: skip
    (tmp_path / "server").mkdir()
    with StandIn(tmp_path / "step_1", tmp_path / "server") as server:
        workers = server.vllm.workers
        workers.identity, workers.state, workers.step = "known", str(chain.state_at(1)), 1
        for dry_run in (True, False):
            options = replace(QUICK, dry_run=dry_run)
            (report,) = apply_to_servers(bucket, 2, [server.url], options).replicas
            assert isinstance(report.error, Conflict)
            assert report.error.tensor == "more"
        (report,) = apply_to_servers(bucket, 3, [server.url], QUICK).replicas
        assert report.error is None


def test_the_doctor_and_a_step_that_can_be_loaded(start: Start, steps: Steps) -> None:
    server = start()
    goal = ChainGoal(read_chain(steps.bucket), 3)
    rows = {row.check: row for row in examine(server.url, goal=goal)}
    assert rows["step"].what == "step 3 can be loaded from step 1: 2 deltas"
    assert rows["weights"].what.startswith("step 1, state ")
    assert server.live == steps.states[1]
    apply_to_servers(steps.bucket, 3, [server.url], QUICK)
    rows = {row.check: row for row in examine(server.url, goal=goal)}
    assert rows["step"].what == "step 3 is served"


def test_the_doctor_and_one_server_under_two_names(start: Start) -> None:
    server, met = start(), Met()
    examine(server.url, met=met)
    finding = examine(server.url.replace("127.0.0.1", "localhost"), met=met)[-1]
    assert (finding.level, finding.check) == ("error", "twice")
    assert server.url in finding.what


def test_an_audit_names_the_type_once(start: Start, steps: Steps) -> None:
    server = start()
    another_dtype(server)
    (found,) = audit_servers(steps.bucket, None, [server.url], timeout=10).replicas
    assert isinstance(found.error, Conflict)
    assert (found.error.expected, found.error.found) == ("bfloat16", "float16")
    assert found.error.hint == "start vLLM with --dtype bfloat16"
    assert found.unaudited == {}


def test_the_type_is_that_of_most_elements() -> None:
    specs = {"a": ("BF16", (8, 4)), "b": ("F32", (31,)), "c": ("I8", (999,)), "gone": None}
    assert float_of(specs) == "bfloat16"
    assert float_of({"c": ("I8", (9,))}) is float_of({}) is None
