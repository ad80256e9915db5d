"""Weights that somebody else has changed, or that were never loaded: they are summed before a word
of the server's is believed, so that an update brings all of them to the step, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deltactl.core.errors import Conflict, Malformed, Transient
from deltactl.server.apply import apply_delta_to_servers, apply_to_servers
from deltactl.server.audit import Audited, audit_servers
from deltactl.server.doctor import examine
from deltactl.server.report import Replica
from tests.server.conftest import QUICK, Start, Steps
from tests.support.vllm_standin import StandIn


def apply(steps: Steps, step: int, server: StandIn, *, dry: bool = False) -> Replica:
    options = replace(QUICK, dry_run=dry)
    return apply_to_servers(steps.bucket, step, [server.url], options).replicas[0]


def audit(steps: Steps, step: int | None, server: StandIn) -> Audited:
    return audit_servers(steps.bucket, step, [server.url], timeout=10).replicas[0]


def reset(server: StandIn) -> None:
    server.vllm.handle("POST", "/weight_checker", {}, {"action": "reset"})


def one_tensor(server: StandIn) -> None:
    server.vllm.workers.tensors["model.norm"].bits[:] ^= 1


def lost_in_sleep(server: StandIn) -> None:
    server.vllm.handle("POST", "/sleep", {"level": "2"}, {})
    server.vllm.handle("POST", "/wake_up", {}, {})


CHANGES = [reset, one_tensor, lost_in_sleep]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_tensor_is_brought_to_the_step(
    change: Callable[[StandIn], None], ranks: int, known: bool, step: int, start: Start,
    steps: Steps,
) -> None:  # fmt: skip
    """Also to the step that it was on, and where the server was never looked at before."""
    server = start(ranks=ranks)
    if known:
        apply(steps, 2, server)
    change(server)
    assert server.live not in steps.states.values()
    report = apply(steps, step, server)
    assert (report.error, report.how, server.live) == (None, "full", steps.states[step])
    assert any(note.startswith("held weights that nobody knew: ") for note in report.notes)
    assert server.vllm.resumed_on[-1] == (steps.states[step], str(step))
    assert apply(steps, 4, server).how == "deltas"
    assert server.live == steps.states[4]


def test_a_start_on_weights_that_were_never_loaded(start: Start, steps: Steps) -> None:
    server = start(dummy=True)
    found = audit(steps, None, server)
    assert isinstance(found.error, Malformed)
    assert found.error.hint == f"deltactl apply {steps.url}@4 --server {server.url}"
    assert (found.step, found.checked) == (None, len(server.vllm.workers.tensors))
    assert len(found.differing) == found.checked - 1  # one has no elements
    report = apply(steps, 1, server)
    assert (report.error, report.how, report.step_before) == (None, "full", None)
    assert server.live == steps.states[1]
    assert audit(steps, 1, server).error is None


def test_weights_that_were_loaded_from_the_directory_again_are_known(
    start: Start, steps: Steps
) -> None:
    """They are its step, whatever was loaded after it, and the deltas lead on from there."""
    server = start()
    apply(steps, 3, server)
    server.vllm.rpc("reload_weights", {})
    assert server.live == steps.states[1]
    report = apply(steps, 3, server)
    assert (report.error, report.how, report.deltas) == (None, "deltas", 2)
    assert (report.step_before, report.step_after) == (1, 3)
    assert server.live == steps.states[3]


def put_back(server: StandIn, steps: Steps) -> None:
    """Reset, seen to be, and loaded from the directory again by another hand."""
    reset(server)
    assert audit(steps, None, server).error is not None
    server.vllm.rpc("reload_weights", {})


def loaded_again(server: StandIn, steps: Steps) -> None:
    apply(steps, 3, server)
    server.vllm.rpc("reload_weights", {})


@pytest.mark.parametrize("by_another", [put_back, loaded_again])
def test_caches_hold_nothing_of_the_weights_that_were_live_meanwhile(
    by_another: Callable[[StandIn, Steps], None], start: Start, steps: Steps
) -> None:
    """Also where the step is live again before it is applied."""
    server = start()
    apply(steps, 1, server)
    by_another(server, steps)
    before = len(server.requests)
    report = apply(steps, 1, server)
    assert (report.error, report.how, server.live) == (None, None, steps.states[1])
    assert "/reset_prefix_cache" in server.requests[before:]
    before = len(server.requests)
    apply(steps, 1, server)
    assert "/reset_prefix_cache" not in server.requests[before:], "nobody has touched them since"


def test_a_check_names_the_step_that_was_loaded_by_another_hand(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 3, server)
    server.vllm.rpc("reload_weights", {})
    found = audit(steps, None, server)
    assert isinstance(found.error, Malformed)
    assert (found.step, found.state) == (1, steps.states[1])
    assert found.error.found == f"step 1, state {steps.states[1]}"
    assert found.error.hint == f"deltactl apply {steps.url}@3 --server {server.url}"


def test_weights_that_were_loaded_from_elsewhere(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 2, server)
    server.vllm.rpc("reload_weights", {"weights_path": str(steps.paths[4])})
    report = apply(steps, 3, server)
    assert (report.error, report.how) == (None, "full")
    assert server.live == steps.states[3]


@pytest.mark.parametrize("change", CHANGES)
def test_a_dry_run_says_what_would_be_done(
    change: Callable[[StandIn], None], start: Start, steps: Steps
) -> None:
    server = start()
    apply(steps, 3, server)
    change(server)
    before = server.live
    report = apply(steps, 3, server, dry=True)
    assert (report.error, report.how, server.live) == (None, "full", before)


def test_a_delta_alone_is_refused(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 2, server)
    reset(server)
    before = server.live
    (delta,) = Path(steps.url).glob("deltas/step_000003*")
    report = apply_delta_to_servers(delta, [server.url], QUICK).replicas[0]
    assert isinstance(report.error, Conflict)
    assert "held weights that nobody knew" in report.notes[0]
    assert (server.live, server.vllm.paused) == (before, False)


@pytest.mark.parametrize("route", ["rpc:deltactl_audit", "rpc:deltactl_audit_seal"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["error", "drop"])
@pytest.mark.parametrize("times", [1, None])
def test_a_request_to_sum_fails(
    route: str, when: str, how: str, times: int | None, start: Start, steps: Steps
) -> None:
    """Once is no reason to give up; nothing is said to be there already without sums."""
    server = start()
    apply(steps, 3, server)
    server.fail(route, when=when, how=how, times=times)
    report = apply(steps, 3, server)
    assert (report.error is None) is (times == 1)
    assert (server.live, server.vllm.paused) == (steps.states[3], False)
    server.mend()
    assert apply(steps, 4, server).error is None


def test_what_cannot_be_summed_is_told(
    start: Start, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    apply(steps, 3, server)

    workers = server.vllm.workers

    def fails() -> None:
        workers.audit = {"phase": "failed", "checked": 0, "differing": [], "unaudited": []}
        raise Malformed("no memory to sum")

    monkeypatch.setattr(workers, "_deltactl_audit_seal", fails)
    for found in (apply(steps, 3, server), audit(steps, 3, server)):
        assert found.error is not None
        assert found.error.what == "no memory to sum"


# Sleep.


def of_weights(server: StandIn) -> tuple[str, str, str | None]:
    (found,) = [row for row in examine(server.url) if row.check == "weights"]
    return found.level, found.what, found.hint


def test_the_doctor_tells(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 2, server)
    reset(server)
    audit(steps, 2, server)
    level, what, hint = of_weights(server)
    assert (level, hint) == ("warn", "deltactl apply BUCKET@STEP --server URL")
    assert what.startswith("nobody knows the weights: ")
    apply(steps, 2, server)
    assert of_weights(server)[:2] == (
        "ok",
        f"step 2, state {steps.states[2]}, when they were last summed",
    )
    server.vllm.handle("POST", "/sleep", {"level": "1"}, {})
    level, what, _ = of_weights(server)
    assert (level, "sleeps" in what) == ("warn", True)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_server_is_not_updated(level: int, start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 2, server)
    before = len(server.requests)
    server.vllm.handle("POST", "/sleep", {"level": str(level)}, {})
    for found in (apply(steps, 3, server), apply(steps, 3, server, dry=True)):
        assert isinstance(found.error, Transient)
        assert "sleeps" in found.error.what
        assert f"{server.url}/wake_up?tags=weights" in str(found.error.hint)
    assert isinstance(audit(steps, 2, server).error, Transient)
    allowed = {"rpc:deltactl_state"}
    assert {route for route in server.requests[before:] if route.startswith("rpc:")} == allowed


def test_one_that_sleeps_only_is_updated_where_it_was_left(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 2, server)
    server.vllm.handle("POST", "/sleep", {"level": "1"}, {})
    server.vllm.handle("POST", "/wake_up", {}, {})
    report = apply(steps, 3, server)
    assert (report.error, report.how, server.live) == (None, "deltas", steps.states[3])


@pytest.mark.parametrize(("level", "how"), [(1, "deltas"), (2, "full")])
def test_weights_are_woken_and_loaded_before_the_cache(
    level: int, how: str, start: Start, steps: Steps
) -> None:
    """As a trainer on the same device does, which has no room for both at once."""
    server = start()
    apply(steps, 2, server)
    server.vllm.handle("POST", "/sleep", {"level": str(level)}, {})
    server.vllm.handle("POST", "/wake_up", {"tags": "weights"}, {})
    report = apply(steps, 3, server)
    assert (report.error, report.how, report.paused) == (None, how, True)
    assert (server.live, server.vllm.workers.asleep) == (steps.states[3], ["kv_cache"])
    server.vllm.handle("POST", "/wake_up", {"tags": "kv_cache"}, {})
    assert server.vllm.resumed_on[-1] == (steps.states[3], "3")


def test_one_that_falls_asleep_before_it_is_staged(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 2, server)
    before = server.live
    server.fail("rpc:deltactl_stage", how=None, meanwhile=lambda: server.vllm.workers.sleep(1))
    report = apply(steps, 3, server)
    assert isinstance(report.error, Transient)
    assert (server.live, server.vllm.workers.update) == (before, None)
