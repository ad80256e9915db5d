"""A step by vLLM's own reload, for servers without the plugin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltactl.core.errors import Conflict, DeltactlError, Malformed, UsageError
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


def test_a_server_with_the_plugin_is_left_alone(start: Start, steps: Steps, place: Path) -> None:
    server = start()
    report = reload(steps, 3, server, place)
    assert isinstance(report.error, UsageError)
    assert server.live == steps.states[1]


ROUTES = [
    "/version", "/is_paused", "/server_info", "/weight_info", "/update_weight_version", "/pause",
    "rpc:reload_weights", "/reset_prefix_cache", "/resume",
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
