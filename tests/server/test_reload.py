"""A step by vLLM's own reload, for servers without the plugin."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltactl.core.errors import (
    Conflict,
    DeltactlError,
    Malformed,
    NotAllowed,
    Unsupported,
    UsageError,
)
from deltactl.server.layouts import check_layout
from deltactl.server.model import HEAD, Spec, check_model
from deltactl.server.reload import MARK, reload_servers
from deltactl.server.report import Replica
from tests.server.conftest import QUICK, Start, Steps
from tests.support.chains import make_chain
from tests.support.checkpoints import random_tensor, write_hf_directory
from tests.support.vllm_standin import StandIn


def reload(steps: Steps, step: int, server: StandIn, place: Path, **options: Any) -> Replica:
    done = reload_servers(
        steps.bucket, step, [server.url], place, replace(QUICK, **options) if options else QUICK
    )
    return done.replicas[0]


def assert_serves(server: StandIn, steps: Steps, step: int) -> None:
    assert server.live == steps.states[step]
    assert (server.vllm.paused, server.vllm.label) == (False, str(step))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "served"


def test_a_reload(start: Start, steps: Steps, place: Path) -> None:
    server = start(plugin=False)
    server.vllm.handle("POST", "/v1/completions", {}, {"prompt": "known"})
    report = reload(steps, 3, server, place)
    assert (report.error, report.how, report.step_before, report.step_after) == (
        None, "reload", None, 3,
    )  # fmt: skip
    assert report.state == steps.states[3]
    assert_serves(server, steps, 3)
    server.vllm.handle("POST", "/v1/completions", {}, {"prompt": "known"})
    assert server.vllm.served[-1] == steps.states[3]
    assert reload(steps, 4, server, place).step_before == 3
    assert_serves(server, steps, 4)


def test_nobody_is_taken_back_but_to_a_step_that_is_named(
    start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    server.vllm.label = "5"
    (report,) = reload_servers(steps.bucket, None, [server.url], place, QUICK).replicas
    assert isinstance(report.error, Conflict)
    assert not place.exists()
    assert server.vllm.label == "5"
    assert reload(steps, 4, server, place).step_before == 5
    assert_serves(server, steps, 4)


def test_one_server_under_two_names_and_a_draft(start: Start, steps: Steps, place: Path) -> None:
    server = start(plugin=False)
    server.vllm.workers.draft = {"method": "eagle3", "model": "small"}
    names = [server.url, server.url.replace("127.0.0.1", "localhost")]
    reports = reload_servers(steps.bucket, 3, names, place, QUICK).replicas
    (error,) = [report.error for report in reports if report.error is not None]
    assert (type(error), error.what) == (UsageError, "this is the same server")
    (sound,) = [report for report in reports if report.error is None]
    assert "(eagle3, small) is not updated" in sound.notes[0]
    assert_serves(server, steps, 3)
    assert server.requests.count("/pause") == 1


def test_a_server_with_the_plugin_is_left_alone(start: Start, steps: Steps, place: Path) -> None:
    server = start()
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, UsageError)
    assert server.live == steps.states[1]


ROUTES = [
    "/version", "/is_paused", "/server_info", "/weight_info", "/update_weight_version", "/pause",
    "rpc:reload_weights", "/reset_prefix_cache", "/resume", "/v1/models", "/v1/completions",
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("how", "times"), [("error", 1), ("drop", 1), ("error", None)])
def test_a_request_fails(
    route: str, when: str, how: str, times: int | None, start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    server.fail(route, when=when, how=how, times=times)
    report = reload(steps, 3, server, place)
    assert server.live in (steps.states[1], steps.states[3])
    assert {state for state, _ in server.vllm.resumed_on} <= {steps.states[1], steps.states[3]}
    if report.error is None:
        assert_serves(server, steps, 3)
    elif server.vllm.paused:
        assert report.paused is not False
    server.mend()
    assert reload(steps, 3, server, place).error is None
    assert_serves(server, steps, 3)


def test_a_reload_that_fails_leaves_the_server_paused(
    start: Start, steps: Steps, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether anything was written nobody knows, and the next generation may end the engine."""
    server = start(plugin=False)
    monkeypatch.setattr(server.vllm, "_reload", lambda _: 1 / 0)
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, Malformed)
    assert "left paused" in report.error.what
    assert "--via reload" in str(report.error.hint)
    assert (server.vllm.paused, report.paused, server.vllm.resumed_on) == (True, True, [])
    assert server.vllm.label == f"{MARK}3"
    monkeypatch.undo()
    assert reload(steps, 3, server, place).error is None
    assert_serves(server, steps, 3)


NOISE = [[math.nan] * 5, [-6.2] * 5, [-math.inf] * 5]


@pytest.mark.parametrize("noise", NOISE)
def test_a_server_that_answers_noise_after_the_reload_is_paused_again(
    noise: list[float], start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    server.vllm.of_a_reload = noise
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, Malformed)
    assert "paused again" in report.error.what
    assert "answered with noise" in str(report.error.found)
    assert report.error.hint == "pull the step, and start the server anew on it"
    assert (server.vllm.paused, report.paused, report.step_after) == (True, True, None)
    assert server.vllm.label == f"{MARK}3"
    server.vllm.of_a_reload = [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert reload(steps, 3, server, place).error is None  # the pause is known for its own
    assert_serves(server, steps, 3)


@pytest.mark.parametrize("noise", NOISE)
def test_a_server_that_answered_noise_before_may_be_mended(
    noise: list[float], start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    server.vllm.logprobs, server.vllm.of_a_reload = noise, server.vllm.logprobs
    assert reload(steps, 3, server, place).error is None
    assert_serves(server, steps, 3)


def test_a_server_that_cannot_be_asked_afterwards_is_paused_again(
    start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    server.fail("/v1/completions", times=None, after_calls=1)
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, Malformed)
    assert (server.vllm.paused, report.paused) == (True, True)


@pytest.mark.parametrize("route", ["/pause", "/resume"])
def test_where_the_second_pause_fails_nothing_is_said_of_it(
    route: str, start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    server.vllm.of_a_reload = NOISE[0]
    server.fail(route, times=None, after_calls=1 if route == "/pause" else 0)
    report = reload(steps, 3, server, place)
    assert report.error is not None
    assert (report.paused, report.step_after) == (None if route == "/pause" else True, None)


def test_a_server_that_wants_a_key_for_requests_is_not_reloaded_without(
    start: Start, steps: Steps, place: Path
) -> None:
    """Afterwards it could not be asked."""
    server = start(plugin=False)
    server.vllm.key = "secret"
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, NotAllowed)
    assert "VLLM_API_KEY" in str(report.error.hint)
    assert not place.exists()
    assert "/pause" not in server.requests


def quantised(server: StandIn) -> None:
    server.vllm.quantization = "compressed-tensors"


def of_experts(server: StandIn) -> None:
    server.vllm.moe = True


@pytest.mark.parametrize(("harm", "found"), [
    (quantised, "quantisation compressed-tensors"),
    (of_experts, "a model with experts"),
])  # fmt: skip
def test_a_kind_of_server_that_no_reload_was_proven_for_is_refused_by_name(
    harm: Any, found: str, start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    harm(server)
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, Unsupported)
    assert report.error.found == found
    assert "start the server anew on it" in str(report.error.hint)
    assert not place.exists()
    assert not {"/pause", "rpc:reload_weights"} & set(server.requests)


@pytest.mark.parametrize(("device", "config", "found"), [
    ("cpu", {}, None),
    ("cuda", {"tie_word_embeddings": True}, None),
    ("cpu", {"tie_word_embeddings": True}, "an output layer that shares the embedding"),
    ("cpu", {"text_config": {"tie_word_embeddings": True}}, "an output layer that shares"),
    ("cuda", {"quantization_config": {"quant_method": "fp8"}}, "quantisation fp8"),
    ("cuda", {"num_experts": 8}, "a model with experts"),
    ("cuda", {"text_config": {"num_local_experts": 8}}, "a model with experts"),
    ("cuda", {"num_experts": 0, "text_config": 3, "quantization_config": None}, None),
])  # fmt: skip
def test_the_model_s_configuration_counts_too(
    device: str, config: dict[str, Any], found: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    configuration = {"device_config": {"device": device}, "model_config": {"quantization": None}}
    if found is None:
        check_layout(configuration, tmp_path, "http://a")
    else:
        with pytest.raises(Unsupported) as caught:
            check_layout(configuration, tmp_path, "http://a")
        assert found in str(caught.value.found)
        check_layout(configuration, tmp_path / "none", "http://a")
        check_layout({}, tmp_path.parent, "http://a")


def test_where_the_server_s_directory_cannot_be_seen_the_step_s_configuration_tells(
    start: Start, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was pulled: still before the pause."""
    monkeypatch.setattr("tests.support.chains.AUX", {"config.json": b'{"num_experts": 4}'})
    bucket = make_chain(tmp_path, [{"a": random_tensor("BF16", (8, 4), n)} for n in (1, 2)])
    server = start(plugin=False)
    server.vllm.workers.model = Path("/none")
    (report,) = reload_servers(bucket, 2, [server.url], place, QUICK).replicas
    assert isinstance(report.error, Unsupported)
    assert not {"/pause", "rpc:reload_weights"} & set(server.requests)


def test_a_pause_of_somebody_else_stays(start: Start, steps: Steps, place: Path) -> None:
    server = start(plugin=False)
    server.vllm.paused = True
    report = reload(steps, 3, server, place)
    assert (report.error, report.paused, report.seconds_paused) == (None, True, None)
    assert server.vllm.paused
    assert "left paused" in report.notes[0]


def no_development_mode(server: StandIn) -> None:
    server.vllm.dev = False


def an_old_vllm(server: StandIn) -> None:
    server.vllm.version = "0.31.2"


def dead(server: StandIn) -> None:
    server.kill()


@pytest.mark.parametrize("harm", [no_development_mode, an_old_vllm, dead])
def test_no_weights_are_fetched_for_servers_that_cannot_load_them(
    harm: Any, start: Start, steps: Steps, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, server = start(plugin=False), start(plugin=False)
    harm(bad)
    done = reload_servers(steps.bucket, None, [bad.url, start().url], place, QUICK)
    assert (done.step, done.state, done.interrupted) == (4, steps.states[4], False)
    assert all(report.error is not None for report in done.replicas)
    assert not place.exists()
    done = reload_servers(steps.bucket, None, [bad.url, server.url], place, QUICK)
    assert [report.error is None for report in done.replicas] == [False, True]
    assert_serves(server, steps, 4)
    assert not {"/pause", "rpc:reload_weights", "/update_weight_version"} & set(bad.requests)


def test_an_interrupt_while_servers_are_looked_at(
    start: Start, steps: Steps, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(work: Any, urls: Any, *_: Any) -> Any:
        return [work(url) for url in urls], True

    monkeypatch.setattr("deltactl.server.reload.side_by_side", interrupted)
    server = start(plugin=False)
    done = reload_servers(steps.bucket, 3, [server.url], place, QUICK)
    (report,) = done.replicas
    assert done.interrupted
    assert "interrupted before the weights were written" in str(report.error)
    assert not place.exists()
    assert server.live == steps.states[1]


EMBEDDING, NORM = ("model.embed_tokens.weight", (8, 4)), ("model.norm.weight", (4,))


def named(*rows: tuple[str, tuple[int, ...]]) -> dict[str, Spec]:
    return {name: ("BF16", shape) for name, shape in rows}


@pytest.mark.parametrize(
    ("tied", "rows", "other"),
    [
        (False, [EMBEDDING, NORM], None),
        (False, [], None),
        (False, [EMBEDDING], "model.norm.weight"),
        (False, [EMBEDDING, NORM, ("a", (1,))], "a"),
        (False, [EMBEDDING, ("model.norm.weight", (5,))], "model.norm.weight"),
        (False, [EMBEDDING, NORM, (HEAD, (8, 4))], HEAD),
        (True, [EMBEDDING, NORM, (HEAD, (8, 4))], None),
    ],
)
def test_which_models_are_others(
    tied: bool, rows: list[Any], other: str | None, tmp_path: Path
) -> None:
    tensors = {name: random_tensor("BF16", shape, 1) for name, shape in (EMBEDDING, NORM)}
    config = json.dumps({"text_config": {"tie_word_embeddings": tied}})
    write_hf_directory(tmp_path / "model", tensors, shards=2, aux={"config.json": config})
    configuration = {"model_config": {"model": str(tmp_path / "model")}}
    if other is None:
        check_model(configuration, named(*rows), "http://a")
    else:
        with pytest.raises(Conflict, match="another model") as caught:
            check_model(configuration, named(*rows), "http://a")
        assert caught.value.tensor == other


def test_another_model_is_seen_by_a_relative_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server that was started where this is run."""
    tensors = {EMBEDDING[0]: random_tensor("BF16", EMBEDDING[1], 1)}
    write_hf_directory(tmp_path / "model", tensors)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Conflict, match="another model"):
        check_model({"model_config": {"model": "model"}}, named(NORM), "http://a")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "/none", ".", "/proc/1", None, 3])
def test_a_model_that_cannot_be_seen_from_here_is_not_judged(model: Any) -> None:
    check_model({"model_config": {"model": model}}, named(EMBEDDING), "http://a")
    check_model({"model_config": model}, named(EMBEDDING), "http://a")


def test_another_model_is_told_before_anything_is_fetched(
    start: Start, place: Path, tmp_path: Path
) -> None:
    bucket = make_chain(
        tmp_path, [{"model.embed_tokens.weight": random_tensor("BF16", (8, 4), n)} for n in (1, 2)]
    )
    server = start(plugin=False)
    (report,) = reload_servers(bucket, 2, [server.url], place, QUICK).replicas
    assert isinstance(report.error, Conflict)
    assert str(server.model) in str(report.error)
    assert not place.exists()
    assert not {"/pause", "rpc:reload_weights"} & set(server.requests)


def test_tensors_that_a_delta_adds_are_no_other_model(
    start: Start, place: Path, tmp_path: Path
) -> None:
    before = {"a": random_tensor("BF16", (8, 4), 1)}
    bucket = make_chain(tmp_path, [before, {**before, "b": random_tensor("BF16", (4,), 2)}])
    (tmp_path / "server").mkdir()
    with StandIn(tmp_path / "step_2", tmp_path / "server", plugin=False) as server:
        (report,) = reload_servers(bucket, 2, [server.url], place, QUICK).replicas
    assert report.error is None


def test_what_cannot_be_pulled_is_told_before_any_server_is_asked(
    start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    with pytest.raises(DeltactlError):
        reload(steps, 9, server, place)
    assert server.requests == []
