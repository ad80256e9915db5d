"""An update of a server, with everything that can go wrong on the way.

Whatever happens, a server ends on the old step or on the new one and serves, or it is paused and
that is told; and the next update carries it to its goal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import requests

from deltactl.core.errors import DeltactlError, Malformed, Transient
from deltactl.server.apply import apply_to_servers
from deltactl.server.report import Replica
from deltactl.server.summing import PATIENCE
from deltactl.server.update import HELD, Options
from tests.server.conftest import QUICK, Start, Steps
from tests.support.killed_client import DIED
from tests.support.vllm_standin import StandIn

IMPATIENT = replace(QUICK, timeout=0.3)


def apply(steps: Steps, step: int, server: StandIn, options: Options = QUICK) -> Replica:
    return apply_to_servers(steps.bucket, step, [server.url], options).replicas[0]


def assert_serves(server: StandIn, steps: Steps, step: int) -> None:
    """The step's bits are live, and nothing is left of the update."""
    vllm = server.vllm
    assert server.live == steps.states[step]
    assert (vllm.paused, vllm.session, vllm.workers.update) == (False, False, None)
    assert vllm.label == str(step)
    assert vllm.workers.step == step


def assert_never_in_doubt(server: StandIn, steps: Steps, replica: Replica, new: int) -> None:
    """What has to hold after whatever failure."""
    known = set(steps.states.values())
    assert {state for state, _ in server.vllm.resumed_on} <= known
    if replica.error is None:
        assert_serves(server, steps, new)
        return
    if server.dead:
        assert isinstance(replica.error, Transient)
        return
    assert server.live in known
    if server.vllm.paused:
        assert replica.paused is not False
    else:
        assert replica.paused is not True


THE_WAY = [
    "/version", "/is_paused", "/get_world_size", "rpc:deltactl_state", "rpc:deltactl_tensors",
    "rpc:deltactl_state", "/is_paused", "/weight_info",
    "rpc:deltactl_identify", "rpc:deltactl_map", "rpc:deltactl_stage", "rpc:deltactl_seal",
    "rpc:deltactl_state", "/is_paused", "/weight_info",
    "/pause", "/start_weight_update", "/update_weights", "rpc:deltactl_state",
    "/finish_weight_update", "/reset_prefix_cache", "/resume", "rpc:deltactl_done",
    "rpc:deltactl_audit", "rpc:deltactl_audit_seal",
    "rpc:deltactl_state", "/is_paused", "/weight_info",
]  # fmt: skip
"""All requests of an update, but for polls after what works in the background."""

SUMMED = ["rpc:deltactl_audit", "rpc:deltactl_audit_seal"]
"""What comes instead of identify and map where those have been before, and after an update."""


def without_polls(requests: list[str]) -> list[str]:
    """Polls come after identify and stage, and at once one after the other."""
    found: list[str] = []
    for route in requests:
        background = ("rpc:deltactl_identify", "rpc:deltactl_stage")
        if route != "rpc:deltactl_state" or not found or found[-1] not in background:
            found.append(route)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_way(start: Start, steps: Steps, ranks: int) -> None:
    server = start(ranks=ranks)
    report = apply(steps, 3, server)
    assert report.error is None
    assert_serves(server, steps, 3)
    way = [route for route in without_polls(server.requests) if route != "/server_info"]
    assert way == THE_WAY
    assert (report.step_before, report.step_after) == (1, 3)
    assert (report.how, report.deltas, report.elements) == ("deltas", 2, 42)
    assert report.state == steps.states[3]
    assert report.seconds_paused is not None
    assert report.paused is False
    assert server.vllm.resumed_on == [(steps.states[3], "3")]


def test_nothing_is_done_a_second_time(start: Start, steps: Steps) -> None:
    server = start()
    apply(steps, 3, server)
    before = len(server.requests)
    report = apply(steps, 3, server)
    assert (report.error, report.how, report.seconds_paused) == (None, None, None)
    again = [route for route in THE_WAY[:8] if route != "rpc:deltactl_tensors"]
    assert server.requests[before:] == [*again, *SUMMED, *THE_WAY[-3:]]


def test_back_to_an_earlier_step_goes_by_the_anchor(start: Start, steps: Steps) -> None:
    server = start(3)
    report = apply(steps, 2, server)
    assert (report.error, report.how, report.step_before) == (None, "full", 3)
    assert_serves(server, steps, 2)


def test_the_tip_is_the_default(start: Start, steps: Steps) -> None:
    server = start()
    done = apply_to_servers(steps.bucket, None, [server.url], QUICK)
    assert done.step == 4
    assert_serves(server, steps, 4)


ROWS = [
    *((None, route) for route in dict.fromkeys(THE_WAY)),
    ("/get_world_size", "rpc:deltactl_state"),
    ("rpc:deltactl_stage", "rpc:deltactl_state"),
    ("rpc:deltactl_seal", "rpc:deltactl_state"),
    ("rpc:deltactl_seal", "/is_paused"),
    ("/update_weights", "rpc:deltactl_state"),
    ("rpc:deltactl_done", "rpc:deltactl_state"),
    ("rpc:deltactl_done", "/is_paused"),
]
"""(when, which): the fault is there from the first request to ``when`` on."""

WAYS = [
    ("before", "error", 1), ("after", "error", 1), ("before", "drop", 1), ("after", "drop", 1),
    ("before", "hang", 1), ("after", "hang", 1), ("before", "kill", 1), ("after", "kill", 1),
    ("after", "garbage", 1), ("before", "error", None), ("after", "error", None),
    ("after", "hang", None),
]  # fmt: skip

PREFLIGHT = {(None, route) for route in THE_WAY[:8]} | {("/get_world_size", "rpc:deltactl_state")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0] or ''}>{row[1]}")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_a_request_fails(row: Any, way: Any, start: Start, steps: Steps) -> None:
    server = start()
    (armed_by, route), (when, how, times) = row, way

    def arm() -> None:
        server.fail(route, when=when, how=how, times=times)

    if armed_by is None:
        arm()
    else:
        server.fail(armed_by, how=None, meanwhile=arm)
    report = apply(steps, 3, server, IMPATIENT if how == "hang" else QUICK)
    assert_never_in_doubt(server, steps, report, 3)
    if times == 1 and how in ("error", "drop") and row not in PREFLIGHT:
        assert report.error is None  # once is no reason to give up
    if times is None and row in PREFLIGHT:
        assert (report.error is None, server.live) == (False, steps.states[1])
    with server.again() if server.dead else nullcontext(server) as alive:
        alive.mend()
        assert apply(steps, 3, alive).error is None
        assert_serves(alive, steps, 3)


@pytest.fixture(scope="module")
def dying() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.killed_client"]
    place = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=place
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


def die(dying: subprocess.Popen[str], steps: Steps, server: StandIn, number: int) -> int:
    assert dying.stdin is not None
    assert dying.stdout is not None
    request = {"bucket": steps.url, "step": 3, "url": server.url, "dies_before": number}
    print(json.dumps(request), file=dying.stdin, flush=True)
    return int(dying.stdout.readline())


def test_the_client_is_killed_before_each_request(
    start: Start, steps: Steps, dying: subprocess.Popen[str]
) -> None:
    found_paused = number = 0
    while True:
        server = start()
        ended = die(dying, steps, server, number)
        assert server.live in (steps.states[1], steps.states[3])
        if ended == 0:
            break
        assert ended == DIED
        number += 1
        found_paused += server.vllm.paused
        report = apply(steps, 3, server)
        assert report.error is None, number
        assert_serves(server, steps, 3)
    assert number >= len(THE_WAY)
    assert found_paused >= 6  # from start to resume


@pytest.mark.parametrize("times", [1, 2])
def test_a_write_that_comes_when_nobody_waits_for_it_any_more(
    start: Start, steps: Steps, times: int
) -> None:
    """It hung in the server while the client went on, or gave up."""
    server = start()
    server.fail("/update_weights", how="late", times=times)
    request = requests.Session.request

    def soon_given_up(session: requests.Session, method: str, url: str, **options: Any) -> Any:
        if url.endswith("/update_weights"):  # no other has to be quick
            options["timeout"] = 0.3
        return request(session, method, url, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.Session, "request", soon_given_up)
        report = apply(steps, 3, server)
    assert_never_in_doubt(server, steps, report, 3)
    before = server.live
    server.release()
    while server.requests.count("/update_weights") < times:
        pass
    assert apply(steps, 3, server).error is None
    assert before in (steps.states[1], steps.states[3])
    assert_serves(server, steps, 3)


def poison(server: StandIn) -> None:
    server.vllm.workers.write_fails = server.vllm.workers.roll_back_fails = True


def test_a_write_that_fails_is_taken_back(start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.workers.write_fails = True
    report = apply(steps, 3, server)
    assert report.error is not None
    assert report.error.what == "the weights could not be written"
    assert (server.live, report.paused, report.step_after) == (steps.states[1], False, 1)
    assert apply(steps, 3, server).error is None


def test_a_poisoned_server_is_repaired_by_the_anchor(start: Start, steps: Steps) -> None:
    server = start()
    poison(server)
    report = apply(steps, 3, server)
    assert (report.error, report.how) == (None, "full")
    assert_serves(server, steps, 3)
    assert server.vllm.resumed_on == [(steps.states[3], "3")]


def test_a_poisoned_server_that_cannot_be_repaired_stays_paused(start: Start, steps: Steps) -> None:
    server = start()
    workers = server.vllm.workers

    def store_is_gone() -> None:
        if workers.poisoned:
            raise Transient("the store is gone")

    workers.before_staged = store_is_gone
    poison(server)
    report = apply(steps, 4, server)
    assert isinstance(report.error, Malformed)
    assert "left paused" in report.error.what
    assert "the store is gone" in str(report.error)
    assert report.error.hint is not None
    assert f"deltactl apply {steps.url}@4 --server {server.url}" in report.error.hint
    assert (server.vllm.paused, report.paused, report.step_after) == (True, True, None)
    assert server.vllm.resumed_on == []
    workers.before_staged = None
    assert apply(steps, 4, server).error is None
    assert_serves(server, steps, 4)


def test_a_model_that_answers_badly_stays_paused_and_the_way_out_is_a_restart(
    start: Start, steps: Steps
) -> None:
    """Another try by the anchor goes the same way: no apply can mend it."""
    server = start()
    hint = "pull the step, and start the server anew on it"
    server.vllm.workers.answers_badly = DeltactlError("it answers noise", hint=hint)
    report = apply(steps, 3, server)
    assert isinstance(report.error, Malformed)
    assert "left paused" in report.error.what
    assert "it answers noise" in str(report.error)
    assert report.error.hint == hint
    assert (server.vllm.paused, report.paused, report.step_after) == (True, True, None)
    assert server.vllm.resumed_on == []


CHANGED_WHEN = [
    "rpc:deltactl_stage", "rpc:deltactl_seal", "/pause", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/resume", "rpc:deltactl_done",
]  # fmt: skip
"""Requests of an update after the sums that it stands on, before each of which the live weights may
change by another hand."""


@pytest.mark.parametrize("tensor", ["model.embed", "model.norm"])
@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("route", CHANGED_WHEN)
def test_weights_that_change_after_they_were_summed_are_written_anew(
    start: Start, steps: Steps, route: str, repair: bool, tensor: str
) -> None:
    """Also elements that the update has not, as no delta touches them, or as they were right when
    it was staged."""
    server = start()
    apply(steps, 2, server)

    def change() -> None:
        server.vllm.workers.tensors[tensor].bits[:] ^= 1

    server.fail(route, how=None, meanwhile=change)
    report = apply(steps, 3, server, replace(QUICK, repair=repair))
    assert report.error is None
    assert (report.paused, report.how, report.step_before) == (False, "full", 2)
    assert_serves(server, steps, 3)


def test_weights_that_somebody_changes_again_and_again_are_not_taken_for_the_step(
    start: Start, steps: Steps
) -> None:
    server = start()
    apply(steps, 2, server)

    def change() -> None:
        server.vllm.workers.tensors["model.embed"].bits[:] ^= 1
        server.fail("/resume", how=None, meanwhile=change)

    server.fail("/resume", how=None, meanwhile=change)
    report = apply(steps, 3, server)
    assert report.error is not None
    assert report.step_after is None


def test_repair_writes_every_tensor_of_the_step_that_it_is_on(start: Start, steps: Steps) -> None:
    server = start(3)
    assert apply(steps, 3, server).how is None
    report = apply(steps, 3, server, replace(QUICK, repair=True))
    assert (report.error, report.how, report.step_before) == (None, "full", 3)
    assert_serves(server, steps, 3)


@pytest.mark.parametrize("work", ["identify", "stage"])
def test_work_in_the_server_that_hangs(
    work: str, start: Start, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltactl.server.drive.PATIENCE", 0.01)
    monkeypatch.setattr("deltactl.server.summing.PATIENCE", 0.01)
    server = start()
    workers, hung = server.vllm.workers, threading.Event()
    if work == "stage":
        workers.before_staged = hung.wait
    else:
        monkeypatch.setattr(workers, "_look", lambda _: hung.wait())
    try:
        report = apply(steps, 3, server)
    finally:
        hung.set()
    assert isinstance(report.error, Transient)
    assert report.error.what == "the server's work hangs"
    assert (report.paused, server.vllm.paused, workers.update) == (False, False, None)
    assert server.live == steps.states[1]


def test_slow_work_that_gets_on_is_waited_for_and_told(
    start: Start, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look finds more, of what is fetched and then of what is made of it; all of them together
    take many times what may pass without."""
    server, clock, through = start(), [0.0], threading.Event()
    workers, told = server.vllm.workers, list[int]()
    monkeypatch.setattr("deltactl.server.drive.monotonic", lambda: clock[0] + monotonic())
    worked = iter(range(1, 7))

    def look() -> None:
        count = next(worked, None)
        if workers.update is None or workers.update["phase"] != "staging" or count is None:
            through.set()
            return
        workers.update |= {"fetched_bytes": min(count, 3), "worked_bytes": count}
        clock[0] += 0.9 * PATIENCE * QUICK.timeout

    def progress(what: str, done: int, total: int) -> None:
        told.append(done)

    def staging_begins() -> None:
        monkeypatch.setattr(workers, "_deltactl_state", look)

    workers.before_staged = through.wait
    server.fail("rpc:deltactl_stage", how=None, meanwhile=staging_begins)
    report = apply_to_servers(steps.bucket, 3, [server.url], QUICK, progress=progress).replicas[0]
    assert report.error is None
    assert told[:6] == [1, 2, 3, 3, 3, 3]
    assert_serves(server, steps, 3)


def test_a_store_that_goes_away_while_the_update_is_staged(start: Start, steps: Steps) -> None:
    server = start()
    workers = server.vllm.workers

    def store_is_gone() -> None:
        raise Transient("the store is gone")

    workers.before_staged = store_is_gone
    report = apply(steps, 3, server)
    assert isinstance(report.error, Transient)
    assert report.error.what == "the store is gone"
    assert (report.paused, report.step_after, workers.update) == (False, 1, None)
    assert "/pause" not in server.requests
    workers.before_staged = None
    assert apply(steps, 3, server).error is None


# Pauses, of this client and of others.


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("keep_cache", [False, True])
def test_caches(mode: Any, keep_cache: bool, start: Start, steps: Steps) -> None:
    """A prompt that was answered before the update is answered from the new weights after it."""
    server = start()
    vllm = server.vllm
    vllm.handle("POST", "/v1/completions", {}, {"prompt": "known"})
    report = apply(steps, 3, server, replace(QUICK, pause=mode, keep_cache=keep_cache))
    assert report.error is None
    vllm.handle("POST", "/v1/completions", {}, {"prompt": "known"})
    after = steps.states[1 if keep_cache else 3]
    assert vllm.served == [steps.states[1], after]
    assert ("/reset_prefix_cache" in server.requests) is not keep_cache


def test_requests_in_flight_wait_for_the_new_weights(start: Start, steps: Steps) -> None:
    server = start()
    asked = threading.Thread(
        target=server.vllm.handle, args=("POST", "/v1/completions", {}, {"prompt": "p"})
    )
    server.fail("/start_weight_update", how=None, meanwhile=asked.start)
    assert apply(steps, 3, server).error is None
    asked.join()
    assert server.vllm.served == [steps.states[3]]


def test_a_pause_of_somebody_else_stays(start: Start, steps: Steps) -> None:
    server = start()
    vllm = server.vllm
    vllm.paused = True
    vllm._prefixes["known"] = steps.states[1]
    report = apply(steps, 3, server)
    assert (report.error, report.paused, report.step_after) == (None, True, 3)
    assert report.notes == ["was paused already, and is left paused"]
    assert (vllm.paused, server.live, vllm.label) == (True, steps.states[3], "3")
    assert "/pause" not in server.requests
    assert vllm._prefixes == {}
    assert "/reset_mm_cache" in server.requests
    assert report.seconds_paused is None


def test_a_pause_of_somebody_else_outlives_a_client_that_dies(
    start: Start, steps: Steps, dying: subprocess.Popen[str]
) -> None:
    number = 0
    while True:
        server = start()
        server.vllm.paused = True
        ended = die(dying, steps, server, number)
        assert server.vllm.paused
        assert apply(steps, 3, server).error is None
        assert (server.vllm.paused, server.live) == (True, steps.states[3])
        if ended == 0:
            break
        number += 1


def test_a_pause_that_comes_while_the_update_is_staged_stays(start: Start, steps: Steps) -> None:
    server = start()

    def operator() -> None:
        server.vllm.paused = True

    server.fail("rpc:deltactl_seal", how=None, meanwhile=operator)
    report = apply(steps, 3, server)
    assert (report.error, report.paused, server.vllm.paused) == (None, True, True)
    assert server.live == steps.states[3]


def leave(server: StandIn, steps: Steps, phase: str, id: str = "dead") -> None:
    """As a client that died leaves a server: with an update to step 2 in this phase, paused."""
    workers = server.vllm.workers
    calls: list[tuple[str, dict[str, Any]]] = [
        ("deltactl_identify", {"bucket_states": {steps.states[1]: 1}}),
        ("deltactl_map", {}),
    ]
    for method, arguments in calls:
        workers.call(method, arguments, False)
        workers.close()
    update = {
        "id": id, "bucket": steps.url, "from_step": 1, "from_state": steps.states[1],
        "to_step": 2, "to_state": steps.states[2], "links": ["deltas/step_000002.safetensors"],
        "full": False,
    }  # fmt: skip
    workers.call("deltactl_stage", {"update": update}, False)
    workers.close()
    if phase in ("ready", "committed"):
        workers.call("deltactl_seal", {"id": id}, False)
    server.vllm.paused = server.vllm.session = True
    if phase == "committed":
        workers.commit(id)
    assert workers.update is not None
    assert workers.update["phase"] == phase


@pytest.mark.parametrize("phase", ["staged", "ready", "committed"])
@pytest.mark.parametrize("target", [1, 2, 3])
def test_what_a_dead_client_left_is_carried_to_an_end(
    phase: str, target: int, start: Start, steps: Steps
) -> None:
    server = start()
    leave(server, steps, phase)
    report = apply(steps, target, server)
    assert report.error is None
    assert report.notes == ["found an update to step 2 that a client had left"]
    assert_serves(server, steps, target)


def test_another_client_at_work_is_left_alone(
    start: Start, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update changes while it is looked at."""
    server, clock = start(), count()
    monkeypatch.setattr("deltactl.server.drive.monotonic", lambda: next(clock))
    leave(server, steps, "ready")
    workers = server.vllm.workers

    def goes_on() -> None:
        assert workers.update is not None
        workers.update["fetched_bytes"] += 1

    server.fail("rpc:deltactl_state", how=None, times=None, meanwhile=goes_on)
    report = apply(steps, 3, server, replace(QUICK, grace=0.01))
    assert isinstance(report.error, Transient)
    assert report.error.what == "another client is updating the server"
    assert workers.update is not None
    assert workers.update["phase"] == "ready"


def test_another_client_that_comes_when_all_is_done(start: Start, steps: Steps) -> None:
    server = start()

    def comes() -> None:
        server.vllm.workers.update = None
        leave(server, steps, "staged", "alive")
        server.vllm.paused = server.vllm.session = False

    def then_comes() -> None:
        server.fail("rpc:deltactl_state", how=None, meanwhile=comes)

    server.fail("rpc:deltactl_done", how=None, meanwhile=then_comes)
    report = apply(steps, 1, server, replace(QUICK, repair=True))
    assert (report.error, report.step_after) == (None, 1)
    assert apply(steps, 2, server, replace(QUICK, grace=0)).error is None


def test_two_clients_at_once(start: Start, steps: Steps) -> None:
    """Each of them ends well or says that the other is at work; the server is sound throughout."""
    server = start()
    reports: dict[int, Replica] = {}

    def one(step: int) -> None:
        reports[step] = apply(steps, step, server, replace(QUICK, grace=0.2))

    threads = [threading.Thread(target=one, args=(step,)) for step in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {state for state, _ in server.vllm.resumed_on} <= {*steps.states.values()}
    assert apply(steps, 4, server).error is None
    assert_serves(server, steps, 4)


@pytest.mark.parametrize("repair", [False, True])
def test_for_a_damaged_link_the_hint_is_to_look_at_the_bucket(
    start: Start, steps: Steps, repair: bool
) -> None:
    """To repair the server would fail for the same reason: nothing is wrong with it."""
    server = start()

    def damaged() -> None:
        raise Malformed("the payload does not have the digest that its header has")

    server.vllm.workers.before_staged = damaged
    report = apply(steps, 3, server, replace(QUICK, repair=repair))
    assert isinstance(report.error, Malformed)
    assert report.error.hint == f"deltactl verify {steps.url}"
    assert (server.live, report.paused) == (steps.states[1], False)


# Ranks.


def test_ranks_that_hold_different_things_are_not_resumed(start: Start, steps: Steps) -> None:
    server = start(ranks=2)

    def torn() -> None:
        behind: dict[str, Any] = {"step": 1, "state": steps.states[1]}
        assert server.vllm.workers.update is not None
        behind["update"] = {"id": server.vllm.workers.update["id"], "phase": "refused"}
        server.vllm.workers.rank_says[1] = behind

    server.fail("/update_weights", how=None, meanwhile=torn)
    report = apply(steps, 3, server)
    assert isinstance(report.error, Malformed)
    assert server.vllm.paused
    assert report.paused is not False
    assert server.vllm.resumed_on == []


def test_replies_that_are_out_of_step_are_seen(start: Start, steps: Steps) -> None:
    """As they are for good after an error in a worker of a server of several ranks."""
    server = start(ranks=2)
    apply(steps, 2, server)
    with pytest.raises(Exception, match="no attribute"):
        server.vllm.rpc("no_such_method", {})
    report = apply(steps, 3, server)
    assert isinstance(report.error, Malformed)
    assert "out of step" in report.error.what
    assert report.error.hint is not None
    assert "restart" in report.error.hint
    assert server.live == steps.states[2]


# Many servers.


def test_one_slow_and_one_dead_server_hold_up_no_other(start: Start, steps: Steps) -> None:
    servers = [start() for _ in range(6)]
    slow, dead = servers[1], servers[4]
    others = [server for server in servers if server not in (slow, dead)]
    dead.kill()
    slow.fail("rpc:deltactl_map", how="late")
    done: list[Any] = []
    urls = [server.url for server in servers]

    def run() -> None:
        done.append(apply_to_servers(steps.bucket, 3, urls, QUICK))

    thread = threading.Thread(target=run)
    thread.start()
    for server in others:
        while server.vllm.label != "3":  # while the slow one still hangs
            assert thread.is_alive()
    slow.release()
    thread.join()
    replicas = done[0].replicas
    assert [replica.url for replica in replicas] == urls
    assert [replica.error is None for replica in replicas] == [s is not dead for s in servers]
    assert isinstance(replicas[4].error, Transient)
    assert replicas[4].notes == [], "no pause was asked for"
    facts = replicas[4].facts()
    nothing = ("deltas", "elements", "bytes_fetched", "seconds_staging")
    assert [facts[key] for key in nothing] == [0, 0, 0, 0]
    for server in (*others, slow):
        assert_serves(server, steps, 3)


def test_ids_of_updates_of_held_servers_say_so(start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.paused = True
    seen: list[str] = []

    def note() -> None:
        assert server.vllm.workers.update is not None
        seen.append(server.vllm.workers.update["id"])

    server.fail("rpc:deltactl_seal", how=None, meanwhile=note)
    apply(steps, 2, server)
    assert seen[0].endswith(HELD)
