"""A step by vLLM's own reload, for servers without the plugin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltactl.core.errors import DeltactlError, Malformed, UsageError
from deltactl.server.reload import MARK, reload_servers
from deltactl.server.report import Replica
from tests.server.conftest import QUICK, Start, Steps
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


def test_what_cannot_be_pulled_is_told_before_any_server_is_asked(
    start: Start, steps: Steps, place: Path
) -> None:
    server = start(plugin=False)
    with pytest.raises(DeltactlError):
        reload(steps, 9, server, place)
    assert server.requests == []
