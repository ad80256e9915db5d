"""The state machine of one update, on ranks that are threads and weights that are an array."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from deltactl.codec.bits import touch_sum
from deltactl.core.errors import Conflict, DeltactlError, Transient
from deltactl.vllm.update.contract import Identity, Tell, Values
from deltactl.vllm.update.peers import Alone
from deltactl.vllm.update.serving import Serving
from tests.support.ranks import thread_peers, together

SIZE = 60
NAME = "w"


def states(seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, 1 << 16, SIZE).astype(np.uint16)


def whole_sum(bits: Any, first: int = 0) -> int:
    return touch_sum(np.arange(first, first + bits.size), bits)


def hex_of(seed: int) -> str:
    return f"{seed:064x}"


@dataclass
class Toy:
    """The part of one tensor that one rank holds, and what is to go wrong on it.

    ``breaks``: names of what raises or says no: stage, check, write, read back, roll_back, ...
    ``rest``: what the loader makes of the weights beside them; ``moved``: somebody has exchanged
    its parameters; ``loads``: the loader alone places the tensor, ``turned``: and turns it round.
    """

    rank: int
    size: int
    live: Any
    breaks: set[str] = field(default_factory=set)
    hold: threading.Event | None = None  # staging waits for it
    calls: list[str] = field(default_factory=list)
    unmapped: dict[str, str] = field(default_factory=dict)
    rest: int = 5
    moved: bool = False
    loads: bool = False
    turned: bool = False
    proven: bool = False

    @property
    def part(self) -> slice:
        width = SIZE // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def reach(self, name: str) -> None:
        self.calls.append(name)
        if name in self.breaks:
            raise Transient(f"{name} was made to fail")

    def identify(self) -> Identity:
        self.reach("identify")
        return Identity(hex_of(1), {NAME: whole_sum(states(1))})

    def stands(self) -> bool:
        return not self.moved

    def record(self) -> dict[str, Any]:
        self.reach("record")
        self.moved = self.proven = False
        return {"rank": self.rank}

    def agree(self, records: list[dict[str, Any]], rank: int) -> None:
        self.reach("agree")
        assert records == [{"rank": n} for n in range(self.size)]

    def prove(self, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
        self.reach("prove")
        self.proven = self.proven or found[NAME] == expected[NAME]

    def distrust(self) -> None:
        self.reach("distrust")
        self.proven = False

    def leave_unproven(self) -> None:
        self.reach("leave_unproven")
        if not self.proven:
            self.unmapped[NAME] = "changes"

    def describe(self) -> dict[str, Any]:
        return {"tensors": 1 - len(self.unmapped), "unmapped": self.unmapped, "ignored": []}

    def stage(self, request: Mapping[str, Any], tell: Tell) -> ToyStaged:
        for fetched in (3, 7):
            tell(fetched, 2 * fetched)
        if self.hold is not None:
            assert self.hold.wait(30)
        self.reach("stage")
        before, after = (int(request[f"{end}_state"], 16) for end in ("from", "to"))
        return ToyStaged(self, states(before), states(after), bool(request["full"]))

    def took_over(self, staged: Any) -> None:
        self.reach("took_over")
        assert isinstance(staged, ToyStaged)

    def sums(self, names: list[str]) -> Values:
        if self.hold is not None:
            assert self.hold.wait(30)
        self.reach("sums")
        assert names == [NAME]
        rest = self.rest + (whole_sum(self.live, self.part.start) if self.unmapped else 0)
        rows = [whole_sum(self.live, self.part.start), rest % (1 << 64)]
        return np.array(rows, np.uint64).view(np.int64)


class ToyStaged:
    nbytes, fetched_bytes, ignored = 10, 20, ("c",)

    def __init__(self, toy: Toy, old: Any, new: Any, full: bool) -> None:
        self._loaded = False
        by_loader = toy.loads or toy.unmapped or (full and not toy.proven)
        self.reloaded: tuple[str, ...] = ("b", "a") if by_loader else ()
        self._toy, self.seconds = toy, {"fetch": 1.0, "stage": 2.0}
        self._expected = whole_sum(old), whole_sum(new)
        self._full = full
        part = toy.part
        self._old, self._new = toy.live.copy(), new[part]
        row = [whole_sum(toy.live, part.start), whole_sum(self._new, part.start)]
        if "rows" in toy.breaks:
            row *= 2
        self.values = np.array([row], np.uint64).view(np.int64)
        if "sums" in toy.breaks:
            self.values += 1
        self.elements = toy.live.size

    def judge(self, total: Values) -> str:
        old, new = (int(value) for value in total.view(np.uint64)[0])
        if new != self._expected[1] or (old != self._expected[0] and not self._full):
            raise Conflict("the sums do not add up")
        return "already" if old == new and not self._full else "ready"

    def sums_after(self, before: Mapping[str, int], total: Values) -> dict[str, int]:
        old, new = (int(value) for value in total.view(np.uint64)[0])
        assert self._full or before[NAME] == old
        return {NAME: new}

    def replace(self) -> bool:
        if "check" in self._toy.breaks or not np.array_equal(self._toy.live, self._old):
            self._toy.calls.append("refused")
            return False
        self._toy.live[: self._toy.live.size // 2] = self._new[: self._toy.live.size // 2]
        self._toy.reach("write")
        self._toy.live[:] = self._new
        self._toy.reach("read back")
        return True

    def complete(self) -> None:
        self._toy.reach("complete")
        self._loaded = bool(self.reloaded)
        if self.reloaded:
            self._toy.rest = 5
            self._toy.live[:] = self._new[::-1] if self._toy.turned else self._new
            if "loader" in self._toy.breaks:
                self._toy.live[0] ^= 1

    def roll_back(self) -> bool:
        self._toy.calls.append("roll_back")
        if self._loaded:
            return False
        if "roll_back raises" in self._toy.breaks:
            raise MemoryError
        if "roll_back" not in self._toy.breaks:
            self._toy.live[:] = self._old
        return np.array_equal(self._toy.live, self._old)


class Ranks:
    """A server of so many ranks, as a client drives it."""

    def __init__(self, size: int) -> None:
        self.toys = [Toy(rank, size, np.empty(0)) for rank in range(size)]
        for toy in self.toys:
            toy.live = states(1)[toy.part].copy()
        peers = thread_peers(size)
        self.ranks = [Serving(toy, peers[n]) for n, toy in enumerate(self.toys)]

    def each(self, act: Callable[[Serving], None]) -> list[dict[str, Any]]:
        together(self.ranks, act)
        return self.states()

    def states(self) -> list[dict[str, Any]]:
        return [rank.state() for rank in self.ranks]

    def until(self, good: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 30
        while not all(good(state) for state in self.states()):
            assert time.monotonic() < deadline, self.states()
            time.sleep(0.001)
        return self.states()

    def ready(self) -> None:
        self.each(lambda rank: rank.identify({hex_of(1): 1}))
        self.until(lambda state: state["identity"] != "running")
        self.each(lambda rank: rank.record_map())

    def stage(self, id_: str = "u", *, full: bool = False, before: int = 1, after: int = 2) -> Any:
        request = make_request(id_, full=full, before=before, after=after)
        self.each(lambda rank: rank.stage(request))
        return self.until(lambda state: (state["update"] or {}).get("phase") != "staging")

    def seal(self, id_: str = "u") -> list[str]:
        return phases(self.each(lambda rank: rank.seal(id_)))

    def commit(self, id_: str = "u") -> list[str]:
        return phases(self.each(lambda rank: rank.commit(id_)))

    def serves(self) -> int | None:
        """Which state is live, whole; None for a mixture."""
        live = np.concatenate([toy.live for toy in self.toys])
        return next((seed for seed in range(1, 9) if np.array_equal(live, states(seed))), None)


def make_request(
    id_: str = "u", *, full: bool = False, before: int = 1, after: int = 2
) -> dict[str, Any]:
    ends = {"from_state": hex_of(before), "to_state": hex_of(after)}
    steps = {"from_step": before, "to_step": after}
    return {"id": id_, "bucket": "/b", "links": ["deltas/x"], "full": full, **ends, **steps}


def phases(found: list[dict[str, Any]]) -> list[str]:
    return [(state["update"] or {}).get("phase") for state in found]


@pytest.fixture(params=[1, 2, 3])
def server(request: pytest.FixtureRequest) -> Ranks:
    found = Ranks(request.param)
    found.ready()
    return found


@pytest.fixture
def pair() -> Ranks:
    found = Ranks(2)
    found.ready()
    return found


def all_of(server: Ranks, phase: str) -> list[str]:
    return [phase] * len(server.ranks)


def test_an_update_from_stage_to_done(server: Ranks) -> None:
    staged = server.stage()
    assert phases(staged) == all_of(server, "staged")
    assert server.serves() == 1
    assert server.seal() == all_of(server, "ready")
    assert server.commit() == all_of(server, "committed")
    assert server.serves() == 2
    for state in server.states():
        assert (state["step"], state["state"], state["bucket"]) == (2, hex_of(2), "/b")
        update = state["update"]
        assert update["reloaded"] == []
        assert update["seconds"].keys() == {"fetch", "stage", "write", "complete"}
        assert update["error"] is state["error"] is state["poisoned"] is None
    done = server.each(lambda rank: rank.done("u"))
    assert [state["update"] for state in done] == [None] * len(done)
    assert [state["error"] for state in done] == [None] * len(done)


def test_what_has_been_fetched_is_told_as_it_comes() -> None:
    ranks = Ranks(1)
    ranks.ready()
    hold = ranks.toys[0].hold = threading.Event()
    ranks.each(lambda rank: rank.stage(make_request()))
    ranks.until(lambda state: state["update"]["fetched_bytes"] == 7)
    (state,) = ranks.states()
    assert (state["update"]["phase"], state["update"]["worked_bytes"]) == ("staging", 14)
    hold.set()
    ranks.until(lambda state: state["update"]["phase"] == "staged")
    update = ranks.states()[0]["update"]
    assert (update["fetched_bytes"], update["worked_bytes"]) == (20, 14)


def test_a_commit_that_is_repeated_does_nothing(server: Ranks) -> None:
    server.stage()
    server.seal()
    server.commit()
    before = [list(toy.calls) for toy in server.toys]
    assert server.commit() == all_of(server, "committed")
    assert [toy.calls for toy in server.toys] == before
    assert server.states()[0]["error"] is None


def test_updates_follow_each_other_and_the_audit_follows_them(server: Ranks) -> None:
    for before in (1, 2, 3):
        server.stage(f"u{before}", before=before, after=before + 1)
        server.seal(f"u{before}")
        server.commit(f"u{before}")
        server.each(lambda rank, before=before: rank.done(f"u{before}"))  # type: ignore[misc]
    assert server.serves() == 4
    assert audited(server) == {"phase": "done", "checked": 1, "differing": [], "unaudited": []}
    server.toys[-1].live[3] ^= 1
    assert audited(server)["differing"] == [NAME]


def audited(server: Ranks) -> dict[str, Any]:
    server.each(lambda rank: rank.audit())
    deadline = time.monotonic() + 30
    while True:
        found = [state["audit"] for state in server.each(lambda rank: rank.seal_audit())]
        if all(row["phase"] != "running" for row in found):
            assert all(row == found[0] for row in found)
            return dict(found[0])
        assert time.monotonic() < deadline


def test_an_audit_between_two_steps_says_nothing(pair: Ranks) -> None:
    hold = pair.toys[1].hold = threading.Event()
    pair.each(lambda rank: rank.audit())
    pair.toys[1].hold = None
    pair.stage()
    pair.seal()
    pair.commit()
    hold.set()
    deadline = time.monotonic() + 30
    while (found := pair.each(lambda rank: rank.seal_audit()))[0]["audit"]["phase"] == "running":
        assert time.monotonic() < deadline
    assert [state["audit"]["phase"] for state in found] == ["failed", "failed"]
    assert audited(pair)["differing"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_record_its_map(rank: int) -> None:
    server = Ranks(2)
    server.toys[rank].breaks.add("record")
    server.ready()
    for state in server.states():
        assert (state["identity"], state["map"]) == ("failed", None)
        assert "record was made to fail" in str(state["error"])
    server.toys[rank].breaks.clear()
    server.ready()
    assert [state["map"]["tensors"] for state in server.states()] == [1, 1]


def unknown(server: Ranks) -> list[dict[str, Any]]:
    """Assert that no rank claims to know its weights; the ranks' doubts."""
    states = server.states()
    for state in states:
        assert (state["identity"], state["step"], state["state"]) == ("known", None, None)
        assert state["map"] is not None
        assert state["poisoned"] is None
    return [dict(state["doubt"]) for state in states]


def mend(server: Ranks, after: int = 3) -> None:
    """A full update, by which all is known again."""
    assert phases(server.stage("mend", full=True, after=after)) == all_of(server, "staged")
    assert server.seal("mend") == all_of(server, "ready")
    assert server.commit("mend") == all_of(server, "committed")
    server.each(lambda rank: rank.done("mend"))
    for state in server.states():
        assert (state["step"], state["doubt"], state["poisoned"]) == (after, None, None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_that_are_not_the_directory_s_are_unknown_until_all_were_loaded(size: int) -> None:
    """Nothing is called a layer that changes its weights, as the loader has not shown it."""
    server = Ranks(size)
    server.toys[-1].live[0] ^= 1
    server.ready()
    for doubt in unknown(server):
        assert (doubt["kind"], doubt["tensor"]) == ("Malformed", NAME)
        assert "step 1" in doubt["what"]
    assert [state["map"]["unmapped"] for state in server.states()] == [{}] * size
    assert server.stage()[0]["error"]["what"] == unknown(server)[0]["what"]
    mend(server)
    assert server.serves() == 3
    assert all("distrust" in toy.calls for toy in server.toys)
    assert [state["map"]["unmapped"] for state in server.states()] == [{}] * size
    assert audited(server)["checked"] == 1


@pytest.mark.parametrize("size", [1, 2])
def test_what_differs_even_after_it_was_loaded_is_a_layer_that_changes_it(size: int) -> None:
    server = Ranks(size)
    for toy in server.toys:
        toy.turned, toy.live = True, toy.live[::-1].copy()
    server.ready()
    unknown(server)
    mend(server)
    assert [state["map"]["unmapped"] for state in server.states()] == [{NAME: "changes"}] * size
    row = {"phase": "done", "checked": 0, "differing": [], "unaudited": [NAME]}
    assert audited(server) == row
    assert server.states()[0]["step"] == 3
    server.toys[-1].live[1] ^= 1  # nothing to compare it with, but it is not as it was loaded
    assert audited(server) == row
    assert {doubt["kind"] for doubt in unknown(server)} == {"Unproven"}
    mend(server)


def test_what_only_the_loader_can_place_is_unknown_until_it_has() -> None:
    server = Ranks(2)
    for toy in server.toys:
        toy.unmapped[NAME] = "changes"
    server.ready()
    for doubt in unknown(server):
        assert doubt["kind"] == "Unproven"
        assert "1 tensors" in doubt["what"]
    mend(server)
    audited(server)
    assert server.states()[0]["step"] == 3


@pytest.mark.parametrize("at", [0, -1])
def test_weights_that_somebody_has_changed(server: Ranks, at: int) -> None:
    """They are found by their sums, and are written through the map, which is proven."""
    server.toys[at].live[:] = 0
    assert audited(server)["differing"] == [NAME]
    unknown(server)
    before = [toy.calls.count("distrust") for toy in server.toys]
    mend(server)
    assert server.serves() == 3
    assert [toy.calls.count("distrust") for toy in server.toys] == before


def test_what_a_layer_made_of_its_weights_is_lost_too(server: Ranks) -> None:
    """As in a sleep of level 2: then the loader makes it anew."""
    server.toys[-1].rest = 99
    assert audited(server)["differing"] == []
    assert {doubt["kind"] for doubt in unknown(server)} == {"Unproven"}
    mend(server, 1)
    assert server.toys[-1].rest == 5
    assert audited(server)["differing"] == []
    assert server.states()[0]["step"] == 1


def test_weights_that_were_loaded_from_the_directory_again(server: Ranks) -> None:
    server.stage()
    server.seal()
    server.commit()
    server.each(lambda rank: rank.done("u"))
    for toy in server.toys:
        toy.live[:] = states(1)[toy.part]
    assert audited(server)["differing"] == [NAME], "they are not what they were taken for"
    for state in server.states():
        assert (state["step"], state["state"], state["doubt"]) == (1, hex_of(1), None)
    assert phases(server.stage("next")) == all_of(server, "staged")
    assert server.seal("next") == all_of(server, "ready")


def test_parameters_that_somebody_has_exchanged(pair: Ranks) -> None:
    """One rank's: the map is recorded anew by all, as they have to agree."""
    pair.toys[1].moved = True
    pair.each(lambda rank: rank.audit())
    for state in pair.states():
        assert (state["identity"], state["map"], state["state"]) == ("unknown", None, None)
    pair.ready()
    assert [toy.calls.count("record") for toy in pair.toys] == [2, 2]
    assert [(s["step"], s["doubt"]) for s in pair.states()] == [(1, None)] * 2


def test_a_loader_that_does_not_load_what_it_should(pair: Ranks) -> None:
    """On one rank, of what was proven."""
    for toy in pair.toys:
        toy.loads = True
    pair.toys[1].breaks.add("loader")
    pair.stage()
    assert pair.seal() == ["ready", "ready"]
    assert pair.commit() == ["failed", "failed"]
    for state in pair.states():
        assert "did not load" in state["poisoned"]["found"]
        assert (state["step"], state["state"]) == (None, None)


def test_sums_that_fail_on_one_rank_after_the_loader(pair: Ranks) -> None:
    for toy in pair.toys:
        toy.loads = True
    pair.stage()
    pair.seal()
    pair.toys[0].breaks.add("sums")
    assert pair.commit() == ["failed", "failed"]
    assert all(state["poisoned"] for state in pair.states())


@pytest.mark.parametrize("tags", [("weights", "kv_cache"), ("weights",)])
def test_nothing_of_weights_that_sleep_is_read(pair: Ranks, tags: tuple[str, ...]) -> None:
    pair.stage()
    pair.seal()
    for rank in pair.ranks:
        rank.asleep = lambda: tags
    before = [list(toy.calls) for toy in pair.toys]
    acts: list[Callable[[Serving], None]] = [
        lambda rank: rank.audit(),
        lambda rank: rank.identify({}),
        lambda rank: rank.stage(make_request("v")),
        lambda rank: rank.commit("u"),
    ]
    for act in acts:
        for state in pair.each(act):
            assert (state["error"]["kind"], state["asleep"]) == ("Transient", list(tags))
    assert [toy.calls for toy in pair.toys] == before
    assert phases(pair.states()) == ["refused", "refused"]
    for rank in pair.ranks:
        rank.asleep = lambda: ("kv_cache",)
    pair.each(lambda rank: rank.discard("u"))
    assert phases(pair.stage("w")) == ["staged", "staged"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_stage(pair: Ranks, rank: int) -> None:
    pair.toys[rank].breaks.add("stage")
    pair.stage()
    assert pair.seal() == ["failed", "failed"]
    assert pair.commit() == ["failed", "failed"]
    assert pair.serves() == 1
    for state in pair.states():
        assert "stage was made to fail" in str(state["update"]["error"])


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_that_do_not_add_up(pair: Ranks, rank: int) -> None:
    pair.toys[rank].breaks.add("sums")
    pair.stage()
    assert pair.seal() == ["refused", "refused"]
    assert pair.commit() == ["refused", "refused"]
    assert pair.serves() == 1


def test_ranks_that_staged_different_tensors(pair: Ranks) -> None:
    pair.toys[1].breaks.add("rows")
    pair.stage()
    assert pair.seal() == ["refused", "refused"]


@pytest.mark.parametrize("rank", [0, 1])
def test_live_weights_that_changed_since_they_were_staged(pair: Ranks, rank: int) -> None:
    pair.stage()
    pair.seal()
    pair.toys[rank].live[5] ^= 1
    before = [toy.live.copy() for toy in pair.toys]
    assert pair.commit() == ["refused", "refused"]
    assert all(np.array_equal(toy.live, bits) for toy, bits in zip(pair.toys, before, strict=True))
    assert "roll_back" not in pair.toys[rank].calls, "it would write over what it does not know"
    assert all("complete" not in toy.calls for toy in pair.toys), "it cannot be taken back"
    errors = [state["update"]["error"] for state in pair.states()]
    assert "not those that the update stands on" in errors[rank]["what"]
    assert errors[1 - rank]["what"] == "another rank refused the update"
    assert [(state["step"], state["poisoned"]) for state in pair.states()] == [(1, None)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_refuses_and_another_fails(pair: Ranks, rank: int) -> None:
    pair.stage()
    pair.seal()
    pair.toys[rank].breaks.add("check")
    pair.toys[1 - rank].breaks.add("write")
    assert pair.commit() == ["rolled_back", "rolled_back"]
    assert pair.serves() == 1
    assert "roll_back" not in pair.toys[rank].calls


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["write", "read back", "complete"])
def test_a_failure_half_way_is_rolled_back_on_all_ranks(pair: Ranks, point: str, rank: int) -> None:
    pair.stage()
    pair.seal()
    pair.toys[rank].breaks.add(point)
    assert pair.commit() == ["rolled_back", "rolled_back"]
    assert pair.serves() == 1
    for state in pair.states():
        assert (state["step"], state["poisoned"]) == (1, None)
        assert state["update"]["error"] is not None
    pair.toys[rank].breaks.clear()  # and it can be tried again
    pair.each(lambda rank: rank.discard("u"))
    pair.stage("again")
    assert pair.seal("again") == ["ready", "ready"]
    assert pair.commit("again") == ["committed", "committed"]
    assert pair.serves() == 2


@pytest.mark.parametrize("how", ["roll_back", "roll_back raises"])
def test_what_cannot_be_rolled_back_is_poisoned_until_a_full_update(pair: Ranks, how: str) -> None:
    pair.stage()
    pair.seal()
    pair.toys[1].breaks |= {"write", how}
    assert pair.commit() == ["failed", "failed"]
    for state in pair.states():
        assert state["poisoned"]["hint"] == "deltactl apply BUCKET@STEP --server URL --repair"
        assert state["step"] is state["state"] is None
    pair.toys[1].breaks.clear()
    found = pair.stage("next")
    assert "unknown state" in found[0]["error"]["what"]
    assert phases(found) == ["failed", "failed"]  # of "u", still to be acknowledged
    pair.stage("mend", full=True, after=3)
    assert pair.seal("mend") == ["ready", "ready"]
    assert pair.commit("mend") == ["committed", "committed"]
    assert pair.serves() == 3
    assert [state["poisoned"] for state in pair.states()] == [None, None]
    assert [state["step"] for state in pair.states()] == [3, 3]
    assert audited(pair)["differing"] == []


def test_a_rank_that_is_gone_in_the_middle_of_a_commit(
    pair: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective fails on those that are left; what each of them then holds is not known."""
    pair.stage()
    pair.seal()
    for rank, toy in zip(pair.ranks, pair.toys, strict=True):
        peers, least = rank._peers, rank._peers.least

        def fail(mine: int, toy: Toy = toy, least: Callable[[int], int] = least) -> int:
            if "write" in toy.calls:
                raise RuntimeError("the connection was closed by the peer")
            return least(mine)

        monkeypatch.setattr(peers, "least", fail)
    assert pair.commit() == ["failed", "failed"]
    for state in pair.states():
        assert "closed by the peer" in state["poisoned"]["found"]
        assert state["step"] is state["state"] is None


def test_an_update_that_is_live_already(server: Ranks) -> None:
    assert phases(server.stage(after=1, before=5)) == all_of(server, "already")
    assert server.commit() == all_of(server, "already")
    assert all("stage" not in toy.calls for toy in server.toys)


def test_another_base_is_refused_before_anything_is_fetched(server: Ranks) -> None:
    found = server.stage(before=7, after=8)
    for state in found:
        assert state["update"] is None
        assert state["error"]["kind"] == "Conflict"
        assert (state["error"]["expected"], state["error"]["found"]) == (hex_of(7), hex_of(1))
    assert all("stage" not in toy.calls for toy in server.toys)


def test_only_one_update_at_a_time(server: Ranks) -> None:
    server.stage()
    for id_ in ("u", "v"):
        assert [state["error"]["kind"] for state in server.stage(id_)] == all_of(server, "Conflict")
        assert [state["update"]["id"] for state in server.states()] == all_of(server, "u")
    server.each(lambda rank: rank.discard("u"))
    assert phases(server.stage("v")) == all_of(server, "staged")


def test_the_result_of_a_discarded_staging_is_dropped(pair: Ranks) -> None:
    holds = []
    for toy in pair.toys:
        toy.hold = threading.Event()
        holds.append(toy.hold)
    pair.each(lambda rank: rank.stage(make_request("gone")))
    assert pair.seal("gone") == ["staging", "staging"]
    assert "not all ranks" in pair.states()[0]["error"]["what"]
    pair.each(lambda rank: rank.discard("gone"))
    for toy in pair.toys:
        toy.hold = None
    pair.stage("next")
    for hold in holds:
        hold.set()
    deadline = time.monotonic() + 30
    while any(toy.calls.count("stage") < 2 for toy in pair.toys):
        assert time.monotonic() < deadline
    assert [state["update"]["id"] for state in pair.states()] == ["next", "next"]
    assert pair.seal("next") == ["ready", "ready"]


def test_a_rank_that_is_behind(pair: Ranks) -> None:
    hold = pair.toys[1].hold = threading.Event()
    pair.each(lambda rank: rank.stage(make_request()))
    pair.each(lambda rank: rank.seal("u"))
    assert pair.commit()[1] == "staging"
    assert pair.serves() == 1
    hold.set()
    pair.until(lambda state: state["update"]["phase"] == "staged")
    assert pair.seal() == ["ready", "ready"]


@pytest.mark.parametrize("act", ["seal", "commit", "discard", "done"])
def test_an_unknown_id(server: Ranks, act: str) -> None:
    server.stage()
    found = server.each(lambda rank: getattr(rank, act)("x"))
    assert [state["error"]["kind"] for state in found] == all_of(server, "NotFound")
    assert phases(found) == all_of(server, "staged")


def test_what_is_under_way_is_not_done_and_what_is_committed_not_discarded(pair: Ranks) -> None:
    pair.stage()
    assert pair.each(lambda rank: rank.done("u"))[0]["error"]["kind"] == "Conflict"
    pair.seal()
    pair.commit()
    assert pair.each(lambda rank: rank.discard("u"))[0]["error"]["kind"] == "Conflict"
    assert phases(pair.states()) == ["committed", "committed"]


def test_an_update_that_is_lost_on_one_rank(pair: Ranks) -> None:
    pair.stage()
    pair.seal()
    pair.ranks[1].discard("u")
    assert pair.commit() == ["refused", None]
    assert pair.serves() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": 3},
        {"bucket": None},
        {"to_state": None},
        {"from_state": None},
        {"to_step": "2"},
        {"to_step": True},
        {"links": [1]},
        {"links": "deltas/x"},
        {"unheard": 1},
    ],
)
def test_requests_that_make_no_sense(pair: Ranks, change: dict[str, Any]) -> None:
    found = pair.each(lambda rank: rank.stage({**make_request(), **change}))
    assert [state["error"]["kind"] for state in found] == ["UsageError", "UsageError"]
    assert phases(found) == [None, None]


def test_no_request_at_all(pair: Ranks) -> None:
    for nothing in (None, "x", [], 3):
        found = pair.each(lambda rank, nothing=nothing: rank.stage(nothing))  # type: ignore[misc]
        assert found[0]["error"]["kind"] == "UsageError"


def test_nothing_is_staged_before_the_map_is_proven() -> None:
    server = Ranks(2)
    assert "not been recorded" in server.stage()[0]["error"]["what"]
    server.each(lambda rank: rank.record_map())
    assert server.states()[0]["error"]["found"] == "rank 0: unknown, rank 1: unknown"
    server.toys[1].breaks.add("identify")
    server.ready()
    found = server.states()
    assert [state["identity"] for state in found] == ["known", "failed"]
    assert [state["map"] for state in found] == [None, None]
    server.each(lambda rank: rank.audit())
    assert [state["audit"] for state in server.states()] == [None, None]
    assert server.stage("x", full=True)[0]["update"] is None
    server.toys[1].breaks.clear()
    server.ready()
    assert phases(server.stage()) == ["staged", "staged"]


def test_why_the_identification_failed_is_told_until_it_succeeds() -> None:
    server = Ranks(1)
    server.toys[0].breaks.add("identify")
    server.ready()
    server.each(lambda rank: rank.audit())
    server.each(lambda rank: rank.seal_audit())
    assert "identify was made to fail" in server.states()[0]["error"]["what"]
    server.toys[0].breaks.clear()
    server.ready()
    assert server.states()[0]["error"] is None


def test_the_step_of_a_known_state_may_be_learned_later() -> None:
    server = Ranks(1)
    server.each(lambda rank: rank.identify(None))
    server.until(lambda state: state["identity"] == "known")
    assert server.each(lambda rank: rank.record_map())[0]["step"] is None
    assert server.each(lambda rank: rank.identify({hex_of(1): 41}))[0]["step"] == 41
    assert server.toys[0].calls.count("identify") == 1


def test_a_server_that_takes_no_updates() -> None:
    why = DeltactlError("data parallelism")
    serving = Serving(Toy(0, 1, states(1)), Alone(), why)
    serving.identify({})
    serving.stage(make_request())
    assert serving.state()["error"]["what"] == "data parallelism"
    assert serving.state()["update"] is None
