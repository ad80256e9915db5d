"""An engine that dies behind a port that still answers, or that is closed while a request is open.

vLLM answers no such request, ever. Each test would end with another error after the timeout.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deltactl.cli.interface.exits import FAILED, code_of
from deltactl.server.apply import apply_to_servers
from deltactl.server.audit import audit_servers
from deltactl.server.doctor import examine
from deltactl.server.http import pulse
from deltactl.server.http.wire import Busy, ConnectionLost, Dead, Unreachable, Wire
from deltactl.server.reload import reload_servers
from tests.server.conftest import QUICK, Start, Steps
from tests.server.test_update import THE_WAY
from tests.support.vllm_standin import StandIn

PATIENT = replace(QUICK, timeout=60)
"""For as long as a request that is open would be waited for."""

NEED_THE_ENGINE = [
    route for route in dict.fromkeys(THE_WAY) if route not in ("/version", "/get_world_size")
]


@pytest.fixture(autouse=True)
def quick_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY", 0.01)


def close_port(server: StandIn) -> None:
    """Some time after its engine has died, as vLLM does."""

    def close() -> None:
        server.stopped.wait(30)
        server.stop_listening()

    threading.Thread(target=close, daemon=True).start()


@pytest.mark.parametrize("closed", [False, True], ids=["listens", "closed"])
@pytest.mark.parametrize("route", NEED_THE_ENGINE)
def test_under_an_update(route: str, closed: bool, start: Start, steps: Steps) -> None:
    server = start()
    server.fail(route, how="die")
    if closed:
        close_port(server)
    report = apply_to_servers(steps.bucket, 3, [server.url], PATIENT).replicas[0]
    error = report.error
    assert isinstance(error, Dead)
    assert code_of(error) == FAILED
    assert error.what == "the server's engine has died"
    again = f"deltactl apply {steps.url}@3 --server {server.url}"
    assert error.hint == f"see its log, and restart the server, then {again}"
    assert (report.step_after, report.state, report.paused, report.notes) == (None,) * 3 + ([],)


@pytest.mark.parametrize("route", ["rpc:deltactl_identify", "rpc:deltactl_stage", "/pause"])
def test_between_two_requests(route: str, start: Start, steps: Steps) -> None:
    """Nothing hangs: the next request is answered with status 500, and so is a look at it."""
    server = start()

    def die() -> None:
        server.vllm.engine_dead = True

    server.fail(route, how=None, meanwhile=die)
    report = apply_to_servers(steps.bucket, 3, [server.url], PATIENT).replicas[0]
    assert isinstance(report.error, Dead)
    assert server.requests[-1] == "/health"


@pytest.mark.parametrize("route", ["rpc:deltactl_identify", "rpc:deltactl_audit_seal"])
def test_under_an_audit(route: str, start: Start, steps: Steps) -> None:
    server = start()
    server.fail(route, how="die")
    found = audit_servers(steps.bucket, None, [server.url], timeout=60).replicas[0]
    assert isinstance(found.error, Dead)
    assert found.error.hint == "see its log, and restart the server"


def test_under_a_reload(start: Start, steps: Steps, tmp_path: Path) -> None:
    server = start(plugin=False)
    server.fail("rpc:reload_weights", how="die")
    place = tmp_path / "served"
    report = reload_servers(steps.bucket, 3, [server.url], place, PATIENT).replicas[0]
    assert isinstance(report.error, Dead)


def test_before_anything_the_doctor_says_so(start: Start) -> None:
    server = start()
    server.vllm.engine_dead = True
    finding = examine(server.url)[-1]
    assert (finding.level, finding.check) == ("error", "health")
    assert "engine has died" in finding.what
    assert "restart the server" in str(finding.hint)


def test_what_is_found_dead_is_asked_nothing_more(start: Start) -> None:
    server = start()
    server.fail("/is_paused", how="die")
    wire = Wire(server.url, 60)
    for _ in range(3):
        with pytest.raises(Dead):
            wire.get("/is_paused")
    assert server.requests.count("/is_paused") == 1


@pytest.mark.parametrize("status", [200, 404, 500, 502])
def test_a_slow_answer_is_no_death(status: int, start: Start) -> None:
    """Nor is a proxy that passes no /health, or that errs."""
    server, looks = start(), threading.Event()
    told = iter(range(6))

    def looked() -> None:
        if next(told) == 5:
            looks.set()

    server.fail("/health", status=status, times=None, meanwhile=looked)
    server.fail("/is_paused", how=None, meanwhile=lambda: looks.wait(30))
    assert Wire(server.url, 60).get("/is_paused") == {"is_paused": False}
    assert looks.is_set()


def test_one_bad_look_is_no_death(start: Start) -> None:
    server, looks = start(), threading.Event()
    for _ in range(3):
        server.fail("/health", status=503)
        server.fail("/health", how=None)
    server.fail("/health", how=None, meanwhile=looks.set)
    server.fail("/is_paused", how=None, meanwhile=lambda: looks.wait(30))
    assert Wire(server.url, 60).get("/is_paused") == {"is_paused": False}
    assert looks.is_set()


def test_a_fault_in_an_engine_that_lives(start: Start, steps: Steps) -> None:
    server = start()
    server.fail("/is_paused", times=None)
    error = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas[0].error
    assert error is not None
    assert not isinstance(error, Dead)


def test_a_server_that_is_not_up_yet_and_one_that_is_gone(start: Start) -> None:
    server = start()
    wire = Wire(server.url, 10)
    assert wire.get("/version")
    server.kill()
    wire.close()
    with pytest.raises(ConnectionLost) as lost:
        wire.get("/version")
    assert "restart the server" in str(lost.value.hint)
    with pytest.raises(Unreachable) as never:
        Wire(server.url, 10).get("/version")
    assert not isinstance(never.value, ConnectionLost)
    assert never.value.found == "connection refused"
    assert str(never.value.hint).endswith("if it is still starting, wait for it")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_what_stands_before_a_server_that_is_starting(
    status: int, start: Start, steps: Steps
) -> None:
    """A proxy answers for it, and for its /health."""
    server = start()
    for route in ("/version", "/health"):
        server.fail(route, status=status, body=b"no healthy upstream", times=None)
    error = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas[0].error
    assert isinstance(error, Busy)
    assert error.found == "no healthy upstream"
    assert "may be starting" in str(error.hint)
    (finding,) = examine(server.url)
    assert finding.hint == error.hint
