"""Which links lead a server to a step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.chain import Chain
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Conflict, Malformed, NotFound, Unproven, UsageError
from deltactl.server.apply import apply_delta_to_servers, apply_to_servers
from deltactl.server.goal import ChainGoal
from tests.server.conftest import QUICK, Start, Steps
from tests.support.chains import first_state, make_chain, make_delta, next_state, states
from tests.support.checkpoints import flip_bit
from tests.support.trl_writer import write_chain


def goal(steps: Steps, step: int) -> ChainGoal:
    return ChainGoal(read_chain(steps.bucket), step)


def test_a_run_of_deltas(steps: Steps) -> None:
    way = goal(steps, 4).way(2, steps.states[2], full=False)
    names = ("deltas/step_000003.safetensors", "deltas/step_000004.safetensors")
    assert (way.links, way.full, way.from_step, way.deltas) == (names, False, 2, 2)


@pytest.mark.parametrize("said", [None, 7, 1])
def test_the_state_counts_and_not_the_number(said: int | None, steps: Steps) -> None:
    way = goal(steps, 3).way(said, steps.states[2], full=False)
    assert (way.from_step, way.deltas, way.full) == (2, 1, False)


@pytest.mark.parametrize("known", [4, None, "of no chain"], ids=str)
def test_everything_where_no_deltas_lead_there(known: int | str | None, steps: Steps) -> None:
    state = steps.states.get(known, "0" * 64) if known is not None else None  # type: ignore[call-overload]
    way = goal(steps, 3).way(known if known == 4 else None, state, full=False)
    assert way.full
    assert way.links[0].startswith("anchors/step_000001/")


def test_the_anchor_where_it_is_less_to_fetch(tmp_path: Path) -> None:
    """Ten deltas are more than an anchor at the end and none."""
    bucket = make_chain(tmp_path, states(12), anchor_every=11)
    chain = read_chain(bucket)
    way = ChainGoal(chain, 11).way(1, chain.state_at(1), full=False)
    assert way.full is (way.nbytes < sum(chain.deltas[n].bytes for n in range(2, 12)))
    assert ChainGoal(chain, 12).way(10, chain.state_at(10), full=False).full is False


def test_a_damaged_tip_takes_no_server_back_unless_the_step_is_named(tmp_path: Path) -> None:
    bucket = make_chain(tmp_path, states(4))
    state = read_chain(bucket).state_at(4)
    flip_bit(Path(bucket.url) / "deltas/step_000004.safetensors", 60)
    chain = read_chain(bucket)
    tip = ChainGoal(chain, None)
    assert (tip.step, tip.newer) == (3, (4,))
    with pytest.raises(Conflict, match="newer step") as caught:
        tip.way(4, state, full=False)
    assert "@3" in str(caught.value.hint)
    assert tip.way(2, chain.state_at(2), full=False).links == ("deltas/step_000003.safetensors",)
    with pytest.raises(Conflict, match="newer step"):
        tip.way(4, state, full=True)  # nor does a repair
    assert tip.way(None, None, full=True).full  # of weights that nobody knows
    named = ChainGoal(chain, 3)
    assert named.newer == ()
    assert named.way(4, state, full=False).full


def test_an_older_view_of_the_chain_takes_no_server_back(steps: Steps, start: Start) -> None:
    """A listing that lags, or a bucket that was copied before the step came; of a state that this
    chain does not know."""
    server = start(4)
    apply_to_servers(steps.bucket, 4, [server.url], QUICK)
    chain = read_chain(steps.bucket)
    older = Chain([link for link in chain.links if link.step <= 3], url=chain.url)
    for full in (False, True):
        with pytest.raises(Conflict) as caught:
            ChainGoal(older, None).way(4, steps.states[4], full=full)
        assert caught.value.hint == (
            f"deltactl log {chain.url}; to go back, name the step: {chain.url}@3"
        )
        assert ChainGoal(older, 3).way(4, steps.states[4], full=full).full
    assert ChainGoal(older, None).way(3, "0" * 64, full=False).full


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("repair", [False, True])
def test_a_copy_that_lags(
    dry_run: bool, repair: bool, steps: Steps, start: Start, tmp_path: Path
) -> None:
    copied = LocalBucket(tmp_path / "copy")
    shutil.copytree(steps.url, copied.url)
    Path(copied.url, "deltas/step_000004.safetensors").unlink()
    server = start()
    apply_to_servers(steps.bucket, 4, [server.url], QUICK)
    options = replace(QUICK, dry_run=dry_run, repair=repair)
    (report,) = apply_to_servers(copied, None, [server.url], options).replicas
    assert isinstance(report.error, Conflict)
    assert (report.step_after, server.live) == (4, steps.states[4])
    assert server.requests.count("/pause") == 1
    (report,) = apply_to_servers(copied, 3, [server.url], options).replicas
    assert report.error is None
    assert (server.live == steps.states[3]) is not dry_run


def test_deltas_alone_where_the_anchor_is_gone(tmp_path: Path) -> None:
    bucket = make_chain(tmp_path, states(4))
    state = read_chain(bucket).state_at(3)
    for name in [item.name for item in bucket.list() if item.name.startswith("anchors/")]:
        bucket.delete(name)
    left = ChainGoal(read_chain(bucket), 4)
    assert left.way(3, state, full=False).links == ("deltas/step_000004.safetensors",)
    with pytest.raises(Malformed):
        left.way(None, None, full=False)


def test_a_step_that_is_not_there(steps: Steps) -> None:
    with pytest.raises(NotFound):
        goal(steps, 9)


def test_a_chain_without_digests_proves_nothing(tmp_path: Path) -> None:
    bucket = LocalBucket(write_chain(tmp_path / "trl", states(2), "raw"))
    with pytest.raises(Unproven) as caught:
        ChainGoal(read_chain(bucket), 2)
    assert "--via reload" in str(caught.value.hint)


def test_states_that_are_several_steps(tmp_path: Path, start: Start) -> None:
    """A step that changed nothing: the server is told its number, and nothing is written."""
    same = first_state()
    bucket = make_chain(tmp_path, [same, same, next_state(same, 1), next_state(same, 1)])
    chain = read_chain(bucket)
    assert chain.state_at(1) == chain.state_at(2)
    assert ChainGoal(chain, 3).states() == {chain.state_at(2): 2, chain.state_at(3): 3}
    assert ChainGoal(chain, 1).states()[str(chain.state_at(1))] == 1


# A delta of its own.


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    one, two, *_ = states(2)
    return make_delta(tmp_path / "mine" / "two.safetensors", one, two)


def test_a_delta_anywhere(delta: Path, start: Start, steps: Steps) -> None:
    server = start()
    report = apply_delta_to_servers(delta, [server.url], QUICK).replicas[0]
    assert (report.error, report.how, report.step_after) == (None, "deltas", 2)
    assert server.live == steps.states[2]
    assert [path.name for path in delta.parent.iterdir()] == [delta.name]
    again = apply_delta_to_servers(delta, [server.url], QUICK).replicas[0]
    assert (again.error, again.how) == (None, None)


def test_a_delta_of_a_bucket(start: Start, steps: Steps) -> None:
    server = start()
    path = Path(steps.url) / "deltas" / "step_000002.safetensors"
    assert apply_delta_to_servers(path, [server.url], QUICK).replicas[0].error is None
    assert server.live == steps.states[2]


def test_a_delta_on_another_state(delta: Path, start: Start, steps: Steps) -> None:
    server = start()
    apply_to_servers(steps.bucket, 3, [server.url], QUICK)
    report = apply_delta_to_servers(delta, [server.url], QUICK).replicas[0]
    assert isinstance(report.error, Conflict)
    assert "BUCKET@2" in str(report.error.hint)
    assert server.live == steps.states[3]


def test_a_delta_cannot_repair(delta: Path, start: Start, steps: Steps) -> None:
    server = start()
    server.vllm.workers.write_fails = server.vllm.workers.roll_back_fails = True
    report = apply_delta_to_servers(delta, [server.url], QUICK).replicas[0]
    assert report.error is not None
    assert "left paused" in report.error.what
    assert "cannot make a server's weights anew" in str(report.error)
    assert server.vllm.paused
    assert apply_to_servers(steps.bucket, 2, [server.url], QUICK).replicas[0].error is None
    assert (server.live, server.vllm.paused) == (steps.states[2], False)


def test_a_delta_without_a_step(tmp_path: Path, start: Start) -> None:
    one, two, *_ = states(2)
    path = make_delta(tmp_path / "x.safetensors", one, two, step=None)
    with pytest.raises(UsageError) as caught:
        apply_delta_to_servers(path, [start().url], QUICK)
    assert "--step" in str(caught.value.hint)


def test_a_delta_that_only_its_base_can_read(tmp_path: Path, start: Start) -> None:
    one, two, *_ = states(2)
    path = make_delta(tmp_path / "x.safetensors", one, two, encoding="ulp_ctx")
    server = start()
    with pytest.raises(UsageError, match="encoding"):
        apply_delta_to_servers(path, [server.url], QUICK)
    assert server.requests == []


@pytest.mark.parametrize("urls", [[], ["http://a", "http://a/"], ["a"]])
def test_servers_that_make_no_sense(urls: list[str], steps: Steps) -> None:
    with pytest.raises(UsageError):
        apply_to_servers(steps.bucket, 3, urls, QUICK)
