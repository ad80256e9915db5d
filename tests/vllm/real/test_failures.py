"""What can go wrong with an update of a real server: it ends on the old step or on the new one, or
it says what happened and refuses more, and never serves wrong weights in silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.format.link_names import delta_name
from deltactl.ops.push import push
from tests.support.checkpoints import flip_bit, read_tensors
from tests.support.fault_proxy import FaultProxy, refuse, status
from tests.support.vllm_chain import (
    EMBEDDING,
    HEAD,
    TIP,
    ModelChain,
    copy_bucket,
    next_step,
    write_like,
)
from tests.support.vllm_client import Client, State, phases
from tests.support.vllm_fixtures import Recorded, Setup


def assert_untouched(client: Client, first: Recorded) -> None:
    """Still on step 1, bit for bit, and still to be updated."""
    client.serves(1)
    assert client.checksums() == first.checksums
    assert client.outputs() == first.outputs
    client.update(2)
    assert client.audit() == []


def ready(client: Client, to: int = TIP) -> str:
    """An update that only waits for the pause."""
    id_ = client.stage(to)
    assert set(phases(client.seal(id_))) == {"ready"}
    return id_


def each_error(states: list[State]) -> list[Any]:
    return [state["update"]["error"] for state in states]


# Before anything is written.


def _flip_header(path: Path) -> None:
    flip_bit(path, 60)


def _flip_payload(path: Path) -> None:
    flip_bit(path, path.stat().st_size - 20)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _exchange(path: Path) -> None:
    shutil.copy(path.with_name(Path(delta_name(4)).name), path)


DAMAGES: list[Callable[[Path], None]] = [
    _flip_header,
    _flip_payload,
    _truncate,
    _garbage,
    _exchange,
    Path.unlink,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda act: act.__name__)
def test_a_bad_link_is_found_before_the_pause(
    vllm_client: Client,
    vllm_first: Recorded,
    vllm_chain: ModelChain,
    damage: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    bucket = copy_bucket(vllm_chain, tmp_path / "bucket")
    damage(bucket / delta_name(3))
    id_ = vllm_client.stage(TIP, bucket=str(bucket))
    assert set(phases(vllm_client.seal(id_))) == {"failed"}
    for error in each_error(vllm_client.states()):
        assert error["kind"] in ("Malformed", "NotFound", "Conflict", "DeltactlError")
    vllm_client.commit(id_)
    assert set(phases(vllm_client.states())) == {"failed"}
    vllm_client.ask("discard", id=id_)
    assert_untouched(vllm_client, vllm_first)


def test_links_that_do_not_lead_there(vllm_client: Client, vllm_first: Recorded) -> None:
    good = vllm_client.chain.links(1, 4)
    for links in (good[:-1], good[1:], good[::-1], [], [*good, good[-1]], ["../config.json"]):
        id_ = vllm_client.stage(4, links=links)
        assert set(phases(vllm_client.states())) == {"failed"}, links
        vllm_client.ask("discard", id=id_)
    assert_untouched(vllm_client, vllm_first)


def test_another_base(vllm_client: Client, vllm_first: Recorded, vllm_chain: ModelChain) -> None:
    wrong = {"from_step": 3, "from_state": vllm_chain.states[3], "links": [delta_name(4)]}
    vllm_client.stage(4, **wrong)
    for state in vllm_client.states():
        assert state["update"] is None
        assert state["error"]["kind"] == "Conflict"
        assert state["error"]["expected"] == vllm_chain.states[3]
        assert state["error"]["found"] == vllm_chain.states[1]
    assert_untouched(vllm_client, vllm_first)


@pytest.mark.parametrize("moved", [HEAD, EMBEDDING])
@pytest.mark.parametrize("full", [False, True])
def test_a_step_in_which_shared_weights_differ(
    vllm_client: Client,
    vllm_first: Recorded,
    vllm_setup: Setup,
    vllm_chain: ModelChain,
    tmp_path: Path,
    moved: str,
    full: bool,
) -> None:
    """A server that is started on it would keep two tensors; this one has one for both."""
    if not vllm_setup.kind.endswith("-tied"):
        pytest.skip("the model ties nothing")
    tensors = read_tensors(vllm_chain.checkpoints[1])
    tensors[moved] = next_step({moved: tensors[moved]}, 2)[moved]
    untied = write_like(tmp_path / "untied", vllm_chain.checkpoints[1], tensors)
    bucket = LocalBucket(tmp_path / "bucket")
    push(vllm_chain.checkpoints[1], bucket, step=1)
    push(untied, bucket, step=2)
    id_ = vllm_client.stage(
        2, bucket=bucket.url, full=full, to_state=read_chain(bucket).state_at(2)
    )
    for state in vllm_client.states():
        assert state["update"]["phase"] == "failed"
        assert state["update"]["error"]["kind"] == "Unsupported"
        assert state["update"]["error"]["tensor"] == HEAD
    vllm_client.ask("discard", id=id_)
    assert_untouched(vllm_client, vllm_first)


def test_one_rank_that_cannot_stage(
    vllm_client: Client, vllm_first: Recorded, vllm_setup: Setup
) -> None:
    for rank in range(vllm_setup.ranks):
        vllm_client.server.rpc("test_break_staging", rank=rank)
        id_ = vllm_client.stage(4)
        sealed = vllm_client.seal(id_)
        assert set(phases(sealed)) == {"failed"}
        assert all("made to fail" in error["what"] for error in each_error(sealed))
        vllm_client.ask("discard", id=id_)
    assert_untouched(vllm_client, vllm_first)


def test_live_weights_that_changed_after_they_were_compared(
    vllm_client: Client, vllm_setup: Setup
) -> None:
    """Not by us; a single bit is enough."""
    rank = vllm_setup.ranks - 1
    id_ = ready(vllm_client)
    vllm_client.server.rpc("test_flip", rank=rank, staged=True)
    flipped = vllm_client.checksums()
    written = vllm_client.write(id_)
    assert set(phases(written)) == {"refused"}
    assert vllm_client.checksums() == flipped
    vllm_client.ask("discard", id=id_)
    vllm_client.serves(1)
    assert len(vllm_client.audit()) == 1
    chain = vllm_client.chain
    base = {"from_step": 1, "from_state": chain.states[1], "links": chain.links(1, TIP)}
    vllm_client.stage(TIP, **base)  # nor is it staged again
    for state in vllm_client.states():
        assert state["update"] is state["state"] is None
        assert "the live weights are not what step 1 has" in state["error"]["what"]


def test_an_audit_finds_a_single_bit_that_no_update_touched(
    vllm_client: Client, vllm_setup: Setup
) -> None:
    id_ = ready(vllm_client)
    vllm_client.server.rpc("test_flip", rank=vllm_setup.ranks - 1, staged=False)
    vllm_client.write(id_)
    vllm_client.ask("done", id=id_)
    assert len(vllm_client.audit()) == 1
    vllm_client.reset(3)
    assert vllm_client.audit() == []


# Half-way.


@pytest.mark.parametrize("point", ["write", "read back"])
def test_a_failure_half_way_on_one_rank_is_taken_back_on_all(
    vllm_client: Client, vllm_first: Recorded, vllm_setup: Setup, point: str
) -> None:
    for rank in range(vllm_setup.ranks):
        id_ = ready(vllm_client)
        vllm_client.server.rpc("test_break", points=[point], rank=rank)
        written = vllm_client.write(id_)
        assert set(phases(written)) == {"rolled_back"}
        assert all(error is not None for error in each_error(written))
        assert vllm_client.checksums() == vllm_first.checksums
        vllm_client.ask("discard", id=id_)
    assert_untouched(vllm_client, vllm_first)


def test_what_cannot_be_taken_back_is_told_and_repaired(
    vllm_client: Client, vllm_setup: Setup, vllm_fresh: Recorded
) -> None:
    id_ = ready(vllm_client)
    broken = {"points": ["write", "roll_back"], "rank": vllm_setup.ranks - 1}
    vllm_client.server.rpc("test_break", **broken)
    vllm_client.server.post("/pause", mode="keep")
    vllm_client.commit(id_)
    for state in vllm_client.states():
        assert state["update"]["phase"] == "failed"
        assert state["poisoned"]["hint"].endswith("--repair")
        assert state["step"] is state["state"] is None
    assert vllm_client.server.get("/is_paused") == {"is_paused": True}
    vllm_client.ask("discard", id=id_)
    vllm_client.stage(TIP, from_step=1, from_state=vllm_client.chain.states[1], links=[])
    for state in vllm_client.states():
        assert "unknown state" in state["error"]["what"]
    vllm_client.update(TIP, full=True)
    assert vllm_client.checksums() == vllm_fresh.checksums
    assert vllm_client.audit() == []


# Routes in another order than they should be.


def test_an_update_while_not_paused(vllm_client: Client, vllm_fresh: Recorded) -> None:
    """It is whole all the same: no step of the model runs while it is written. What the caches
    hold is of the old weights until they are cleared."""
    id_ = ready(vllm_client)
    vllm_client.commit(id_)
    assert set(phases(vllm_client.states())) == {"committed"}
    vllm_client.ask("done", id=id_)
    vllm_client.serves(TIP)
    assert vllm_client.checksums() == vllm_fresh.checksums
    assert vllm_client.outputs() == vllm_fresh.outputs


def test_start_and_finish_with_nothing_between(vllm_client: Client, vllm_first: Recorded) -> None:
    """vLLM takes the version for true; the server's own step is another."""
    vllm_client.server.post("/start_weight_update")
    assert all(state["session"] for state in vllm_client.states())
    vllm_client.server.post("/finish_weight_update", {"weight_version": "99"})
    assert vllm_client.server.get("/weight_info") == {"weight_version": "99"}
    assert_untouched(vllm_client, vllm_first)


@pytest.mark.parametrize(
    "info", [{"update": "unheard-of"}, {}, {"update": None}, {"path": "/etc/passwd"}, {"update": 3}]
)
def test_updates_that_nobody_staged(
    vllm_client: Client, vllm_first: Recorded, info: dict[str, Any]
) -> None:
    """No rank raises, so that the replies of all of them stay in step."""
    vllm_client.server.post("/init_weight_transfer_engine", {"init_info": {"unheard": "of"}})
    vllm_client.server.post("/pause", mode="keep")
    vllm_client.server.post("/start_weight_update")
    vllm_client.server.post("/update_weights", {"update_info": info})
    found = vllm_client.states()
    assert {state["error"]["kind"] for state in found} == {"NotFound"}
    assert all(state["session"] for state in found)
    vllm_client.server.post("/finish_weight_update", {})
    vllm_client.server.post("/resume")
    assert_untouched(vllm_client, vllm_first)


def test_an_update_that_was_not_sealed(vllm_client: Client, vllm_first: Recorded) -> None:
    id_ = vllm_client.stage(TIP)
    vllm_client.commit(id_)
    for state in vllm_client.states():
        assert state["update"]["phase"] == "staged"
        assert state["error"]["kind"] == "Conflict"
    assert vllm_client.checksums() == vllm_first.checksums
    vllm_client.ask("discard", id=id_)
    assert_untouched(vllm_client, vllm_first)


def test_a_commit_that_is_repeated(vllm_client: Client, vllm_fresh: Recorded) -> None:
    """As by a client that got no answer the first time."""
    id_ = ready(vllm_client)
    vllm_client.commit(id_)
    vllm_client.commit(id_)
    assert set(phases(vllm_client.states())) == {"committed"}
    assert vllm_client.checksums() == vllm_fresh.checksums


def test_a_client_that_died_leaves_what_another_finds(
    vllm_client: Client, vllm_fresh: Recorded
) -> None:
    id_ = ready(vllm_client)
    vllm_client.server.post("/pause", mode="keep")
    vllm_client.server.post("/start_weight_update")
    found = vllm_client.states()
    assert {(s["update"]["id"], s["update"]["phase"], s["session"]) for s in found} == {
        (id_, "ready", True)
    }
    vllm_client.server.post("/update_weights", {"update_info": {"update": id_}})
    vllm_client.server.post("/finish_weight_update", {})
    vllm_client.server.post("/reset_prefix_cache", reset_running_requests="true")
    vllm_client.server.post("/resume")
    assert set(phases(vllm_client.states())) == {"committed"}
    assert vllm_client.outputs() == vllm_fresh.outputs


# The caches.


def test_prompts_that_were_cached_are_computed_anew(vllm_client: Client) -> None:
    """Only where the client has them cleared, which it does unless it is told not to."""
    prompt = [[9, 8, 7, 10] * 50]  # longer than a block of the cache
    vllm_client.server.generate(prompt, 8)
    vllm_client.write(ready(vllm_client), caches=False)
    stale = vllm_client.server.generate(prompt, 8)
    vllm_client.server.post("/reset_prefix_cache")
    right = vllm_client.server.generate(prompt, 8)
    assert stale != right
    vllm_client.reset(1)
    vllm_client.server.generate(prompt, 8)
    vllm_client.update(TIP)
    assert vllm_client.server.generate(prompt, 8) == right


# The store.


def test_a_store_that_is_gone_while_links_are_fetched(
    vllm_client: Client, vllm_first: Recorded, vllm_chain_in_s3: str, vllm_s3: FaultProxy
) -> None:
    """The server goes on serving; the update can be given up at any time, and be tried again."""
    vllm_s3.inject(refuse(), path="deltas/")
    try:
        state = vllm_client.states()[0]
        request = {
            "id": "gone",
            "bucket": vllm_chain_in_s3,
            "from_step": 1,
            "from_state": state["state"],
            "to_step": 3,
            "to_state": vllm_client.chain.states[3],
            "links": vllm_client.chain.links(1, 3),
            "full": False,
        }
        vllm_client.ask("stage", update=request)
        assert vllm_client.outputs() == vllm_first.outputs
        assert set(phases(vllm_client.states())) == {"staging"}
        vllm_client.ask("discard", id="gone")
        vllm_client.serves(1)
    finally:
        vllm_s3.clear()
    vllm_client.update(3, bucket=vllm_chain_in_s3)
    assert vllm_client.audit() == []


def test_a_store_that_says_no_half_way(
    vllm_client: Client, vllm_first: Recorded, vllm_chain_in_s3: str, vllm_s3: FaultProxy
) -> None:
    vllm_s3.inject(status(403), path="deltas/step_000004", method="GET")
    try:
        id_ = vllm_client.stage(5, bucket=vllm_chain_in_s3)
        assert "failed" in phases(vllm_client.states())
        assert set(phases(vllm_client.seal(id_))) == {"failed"}
        vllm_client.ask("discard", id=id_)
    finally:
        vllm_s3.clear()
    assert_untouched(vllm_client, vllm_first)
