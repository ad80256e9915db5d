"""What servers hold, against the chain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotFound, Transient, UsageError
from deltactl.server.apply import apply_to_servers
from deltactl.server.audit import Audited, audit_servers
from deltactl.server.doctor import examine
from deltactl.server.goal import ChainGoal
from tests.server.conftest import QUICK, Start, Steps
from tests.support.vllm_standin import StandIn


def audit(steps: Steps, step: int | None, *servers: StandIn, timeout: float = 10) -> list[Audited]:
    done = audit_servers(steps.bucket, step, [server.url for server in servers], timeout=timeout)
    assert (done.interrupted, done.newer) == (False, ())
    return done.replicas


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_as_it_was_started_and_after_updates(
    ranks: int, start: Start, steps: Steps
) -> None:
    server = start(ranks=ranks)
    (found,) = audit(steps, None, server)
    assert (found.error, found.step, found.state) == (None, 1, steps.states[1])
    assert found.checked == len(server.vllm.workers.tensors)
    for step in (3, 4, 2):
        apply_to_servers(steps.bucket, step, [server.url], QUICK)
        (found,) = audit(steps, step, server)
        assert (found.error, found.step) == (None, step)
    assert "/pause" in server.requests  # of the updates alone
    assert server.requests.count("/pause") == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bit_that_differs(ranks: int, start: Start, steps: Steps) -> None:
    server = start(3, ranks=ranks)
    server.vllm.workers.tensors["model.norm"].bits[-1] ^= 1
    (found,) = audit(steps, 3, server)
    assert isinstance(found.error, Malformed)
    assert found.differing == ("model.norm",)
    assert found.error.hint == f"deltactl apply {steps.url}@3 --server {server.url}"


def test_weights_in_an_unknown_state_are_told_by_what_made_them_so(
    start: Start, steps: Steps
) -> None:
    """Whatever step the server was on: nothing is summed."""
    server = start()
    server.vllm.workers.poisoned = DeltactlError("written by half", hint="apply the step anew")
    (found,) = audit(steps, None, server)
    assert found.error is not None
    assert (found.error.what, found.error.hint) == ("written by half", "apply the step anew")
    assert found.checked == 0


def test_another_step(start: Start, steps: Steps) -> None:
    (found,) = audit(steps, 3, start())
    assert isinstance(found.error, Conflict)
    assert (found.step, found.checked) == (1, 0)


def test_no_step_of_the_chain(start: Start, steps: Steps) -> None:
    server = start()
    apply_to_servers(steps.bucket, 2, [server.url], QUICK)
    server.vllm.workers.state = "0" * 64
    (found,) = audit(steps, None, server)
    assert isinstance(found.error, Conflict)
    assert found.error.expected == "a state of the chain"
    (found,) = audit(steps, 2, server)
    assert found.error is not None
    assert found.error.expected == f"state {steps.states[2]}"


def test_an_older_view_of_the_chain_sends_no_server_back(
    start: Start, steps: Steps, tmp_path: Path
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(steps.url, copied)
    (copied / "deltas/step_000004.safetensors").unlink()
    server = start()
    apply_to_servers(steps.bucket, 4, [server.url], QUICK)
    (found,) = audit_servers(LocalBucket(copied), None, [server.url], timeout=10).replicas
    assert isinstance(found.error, Conflict)
    assert (found.step, found.error.hint) == (4, f"deltactl log {copied}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_doctor_counts_ranks(ranks: int, start: Start) -> None:
    (found,) = [finding for finding in examine(start(ranks=ranks).url) if finding.check == "plugin"]
    assert ("1 rank, " if ranks == 1 else "2 ranks, ") in found.what


def test_doctor_says_from_what_a_step_can_be_loaded(start: Start, steps: Steps) -> None:
    goal = ChainGoal(read_chain(steps.bucket), 3)
    for server, known in ((start(), "step 1: 2 deltas"), (start(dummy=True), "unknown weights: ")):
        found = [f for f in examine(server.url, goal=goal) if f.check == "step" and f.level == "ok"]
        assert found[0].what.startswith(f"step 3 can be loaded from {known}")


def test_parameters_that_were_exchanged_are_looked_at_where_they_are_now(
    start: Start, steps: Steps
) -> None:
    updated, fresh = start(), start()  # of the second nothing was ever summed
    apply_to_servers(steps.bucket, 2, [updated.url], QUICK)
    for server, step in ((updated, 2), (fresh, 1)):
        server.vllm.workers.exchanged = True
        (found,) = audit(steps, None, server)
        every = len(server.vllm.workers.tensors)
        assert (found.error, found.step, found.checked) == (None, step, every)


def test_a_server_that_holds_a_step_needs_no_anchor(
    start: Start, steps: Steps, tmp_path: Path
) -> None:
    """What tensors the step has is not known then, and no reason to take a server for another
    model's; one that holds no step is refused for what is missing."""
    copied = tmp_path / "copy"
    shutil.copytree(steps.url, copied)
    server = start()
    apply_to_servers(LocalBucket(copied), 2, [server.url], QUICK)
    shutil.rmtree(copied / "anchors")
    (report,) = apply_to_servers(LocalBucket(copied), 3, [server.url], QUICK).replicas
    assert (report.error, report.how, report.step_after) == (None, "deltas", 3)
    assert server.live == steps.states[3]
    stranger = start(dummy=True)
    (report,) = apply_to_servers(LocalBucket(copied), 3, [stranger.url], QUICK).replicas
    assert isinstance(report.error, Malformed)
    assert report.error.what.startswith("the chain is broken: ")


def test_tensors_that_cannot_be_looked_at_are_told(start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.workers.unaudited = ["model.norm"]
    (found,) = audit(steps, 1, server)
    assert (found.error, found.unaudited) == (None, {"model.norm": None})
    known = len(server.vllm.workers.tensors)
    assert (found.checked, found.tensors) == (known - 1, known)
    server.vllm.workers.map["unmapped"] = {"model.norm": "transposed"}
    (found,) = audit(steps, 1, server)
    assert found.unaudited == {"model.norm": "transposed"}


def test_tensors_of_which_the_model_keeps_nothing_are_no_doubt(start: Start, steps: Steps) -> None:
    server = start()
    workers = server.vllm.workers
    workers.unaudited = ["model.norm"]
    workers.map = {"tensors": 5, "unmapped": {}, "ignored": ["model.norm"]}
    (found,) = audit(steps, 1, server)
    assert (found.error, found.unaudited, found.checked, found.tensors) == (None, {}, 4, 4)


def test_nothing_that_can_be_looked_at_is_no_pass(start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.workers.unaudited = [*server.vllm.workers.tensors]
    (found,) = audit(steps, 1, server)
    assert found.error is not None


def test_many(start: Start, steps: Steps) -> None:
    servers = [start(), start(), start()]
    servers[1].kill()
    found = audit(steps, None, *servers)
    assert [audited.error is None for audited in found] == [True, False, True]
    assert isinstance(found[1].error, Transient)


def test_an_audit_without_an_end(start: Start, steps: Steps, monkeypatch: Any) -> None:
    monkeypatch.setattr("deltactl.server.summing.PATIENCE", 0.01)
    server = start()
    monkeypatch.setattr(type(server.vllm.workers), "_deltactl_audit_seal", lambda self: None)
    (found,) = audit(steps, None, server)
    assert isinstance(found.error, Transient)
    assert found.error.what == "the server's work hangs"


def test_a_step_that_is_not_there(start: Start, steps: Steps) -> None:
    with pytest.raises(NotFound):
        audit(steps, 9, start())


def test_a_pause_is_told(start: Start, steps: Steps) -> None:
    server = start()
    (found,) = audit(steps, None, server)
    assert (found.error, found.paused) == (None, False)
    server.vllm.paused = True
    (found,) = audit(steps, None, server)
    assert (found.error, found.paused) == (None, True)
    server.kill()
    (found,) = audit(steps, None, server)
    assert found.paused is None


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle3", "medusa", "custom_class"])
def test_a_draft_that_is_not_updated_is_told_everywhere(
    method: str, start: Start, steps: Steps
) -> None:
    server = start()
    server.vllm.workers.draft = {"method": method, "model": "small"}
    (report,) = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas
    assert report.error is None
    (found,) = audit(steps, 3, server)
    (note,) = [finding for finding in examine(server.url) if finding.check == "draft"]
    goal = ChainGoal(read_chain(steps.bucket), 4)
    for refused in ({}, {"model.embed": "laid out by Foo"}):
        server.vllm.workers.map |= {"unmapped": refused, "refused": refused}
        findings = examine(server.url, goal=goal)
        assert any(finding.level == "error" for finding in findings) is bool(refused)
        assert [finding.what for finding in findings].count(note.what) == 1
    assert report.notes == found.notes == [note.what]
    assert note.level == "warn"
    assert f"({method}, small) is not updated" in note.what


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", None])
def test_what_guesses_without_weights_is_no_draft(
    method: str | None, start: Start, steps: Steps
) -> None:
    server = start()
    server.vllm.workers.draft = None if method is None else {"method": method, "model": "None"}
    (report,) = apply_to_servers(steps.bucket, 3, [server.url], QUICK).replicas
    assert (report.error, report.notes) == (None, [])


def test_one_server_under_two_names(start: Start, steps: Steps) -> None:
    server, other = start(), start()
    names = [server.url, server.url.replace("127.0.0.1", "localhost"), other.url]
    applied = apply_to_servers(steps.bucket, 3, names, QUICK).replicas
    audited = audit_servers(steps.bucket, 3, names, timeout=10).replicas
    for found in (applied, audited):
        errors = [row.error for row in found[:2] if row.error is not None]
        assert len(errors) == 1, found
        assert isinstance(errors[0], UsageError)
        assert {str(errors[0].file), str(errors[0].found).removesuffix(" too")} == set(names[:2])
        assert found[2].error is None
    assert server.live == other.live == steps.states[3]
    assert server.requests.count("/pause") == 1
