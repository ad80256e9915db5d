"""An update staged against live weights: exact, checked before anything is written, taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.checkpoint.state import state_of
from deltactl.codec import ENCODINGS
from deltactl.core import native
from deltactl.core.errors import Conflict, DeltactlError, Malformed, Unsupported
from deltactl.format.delta import Delta, open_delta
from deltactl.vllm.staging import dense_regions, live_weights, totals
from deltactl.vllm.staging.staging import Staged, needs_base, stage, stage_full
from tests.support import lies
from tests.support.adversarial import small_blocks, special_bits, unsigned
from tests.support.chains import make_delta
from tests.support.checkpoints import Spec, changed, flip_bit, random_tensor, write_safetensors
from tests.support.live_ranks import Rank, make_ranks
from tests.support.tools import need_kernel

Tensors = dict[str, Spec]

ALL = sorted(ENCODINGS)
KINDS = ("rows", "columns", "turned", "twice", "norm")


def tensors_of(dtype: str, seed: int = 0) -> Tensors:
    """One of every kind that ranks hold, with special bits among them."""
    found = {}
    special = special_bits(dtype)
    random = np.random.default_rng(seed)
    for n, kind in enumerate(KINDS):
        shape = (48,) if kind == "norm" else (12, 8)
        _, _, data = random_tensor(dtype, shape, seed * 100 + n)
        bits = np.frombuffer(data, unsigned(dtype)).copy()
        at = random.random(bits.size) < 0.4
        bits[at] = random.choice(special, int(at.sum()))
        found[f"{kind}.weight"] = (dtype, shape, bits.tobytes())
    return found


def following(before: Tensors, share: float, seed: int) -> Tensors:
    """Other bits, by a unit or by any number of them, in a share of the elements."""
    random = np.random.default_rng(seed)
    after = {}
    for name, (dtype, shape, data) in before.items():
        bits = np.frombuffer(data, unsigned(dtype)).copy()
        at = random.random(bits.size) < share
        other = np.frombuffer(random.bytes(bits.nbytes), bits.dtype)
        near = random.random(bits.size) < (0.7 if share < 1 else 0)
        bits[at] = np.where(near, bits + bits.dtype.type(1), other)[at]
        after[name] = (dtype, shape, bits.tobytes())
    return after


def links(place: Path, states: Sequence[Tensors], encoding: str = "ulp") -> list[Delta]:
    """The deltas between states that follow each other; steps are 1, 2, ..."""
    found = []
    for step, (a, b) in enumerate(pairwise(states), 2):
        found.append(open_delta(make_delta(place / f"{step}", a, b, encoding=encoding, step=step)))
    return found


def staged(
    rank: Rank, deltas: Sequence[Delta], base: Checkpoint | None = None, **other: Any
) -> Staged:
    arguments = {
        "update_id": "u",
        "from_step": 1,
        "from_state": deltas[0].header.base_state,
        "to_step": 1 + len(deltas),
        "to_state": deltas[-1].header.result_state,
        **other,
    }
    return stage(rank.map, deltas, base=base, **arguments)


def written(found: Staged) -> bool:
    """Write all of it, where live bits are what they should be."""
    if not found.replace():
        return False
    found.complete()
    return True


def judged(found: Sequence[Staged]) -> str:
    """What the sums of all ranks say, added up as the ranks do it."""
    total = np.zeros_like(found[0].sums.values)
    for one in found:
        total = total + one.sums.values
    verdicts = {one.sums.judge(total) for one in found}
    assert len(verdicts) == 1
    return verdicts.pop()


def hold(ranks: Sequence[Rank], tensors: Mapping[str, Spec]) -> bool:
    return all(rank.holds(tensors) for rank in ranks)


# There and back.


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("encoding", ALL)
@given(data=st.data())
@settings(max_examples=12)
def test_what_links_lead_to_is_live_exactly_and_taken_back_exactly(
    encoding: str, world: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("staging")
    dtype = data.draw(st.sampled_from(["BF16", "F8_E4M3", "F32", "I64", "F16"]))
    seed = data.draw(st.integers(0, 1 << 20))
    states = [tensors_of(dtype, seed)]
    for n in range(data.draw(st.integers(1, 3))):
        share = data.draw(st.sampled_from([0.02, 0.1, 0.5, 1.0]))
        states.append(following(states[-1], share, seed + n))
    base = write_safetensors(place / "base.safetensors", states[0])
    ranks = make_ranks(states[0], world)
    with small_blocks(data.draw(st.sampled_from([16, 100]))), open_checkpoint(base) as opened:
        deltas = links(place, states, encoding)
        found = [staged(rank, deltas, opened if needs_base(deltas) else None) for rank in ranks]
    assert hold(ranks, states[0])
    assert judged(found) == "ready"
    for one in found:
        assert written(one)
    assert hold(ranks, states[-1])
    for one in found:
        assert one.roll_back()
    assert hold(ranks, states[0])
    for path in place.iterdir():
        path.unlink()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("encoding", ["raw", "gap_delta", "ulp"])
def test_a_link_that_has_been_applied(encoding: str, world: int, tmp_path: Path) -> None:
    before = tensors_of("BF16")
    after = following(before, 0.1, 1)
    deltas = links(tmp_path, [before, after], encoding)
    assert judged([staged(rank, deltas) for rank in make_ranks(after, world)]) == "already"


def test_tensors_carried_whole_between_sparse_ones(tmp_path: Path) -> None:
    shares = [0.05, 1.0, 0.05, 0.05, 1.0, 0.05]
    states = [tensors_of("BF16")]
    for n, share in enumerate(shares):
        states.append(following(states[-1], share, n))
    deltas = links(tmp_path, states)
    kinds = [{record.kind for record in delta.records.values()} for delta in deltas]
    assert kinds == [{"sparse"}, {"dense"}, {"sparse"}, {"sparse"}, {"dense"}, {"sparse"}]
    for first in range(len(deltas)):
        for last in range(first + 1, len(deltas) + 1):
            ranks = make_ranks(states[first], 2)
            found = [staged(rank, deltas[first:last]) for rank in ranks]
            assert judged(found) == "ready"
            for one in found:
                assert written(one)
            assert hold(ranks, states[last])
            assert all(one.roll_back() for one in found)
            assert hold(ranks, states[first])


def test_of_a_tensor_carried_whole_the_sums_are_over_all_of_it(tmp_path: Path) -> None:
    states = [tensors_of("BF16")]
    for n, share in enumerate([0.05, 1.0, 0.05]):
        states.append(following(states[-1], share, n))
    deltas = links(tmp_path, states)
    ranks = make_ranks(states[0], 2)
    found = [staged(rank, deltas) for rank in ranks]
    total = sum(one.sums.values for one in found)
    for name in states[0]:
        then = sum(totals.owned_sums(rank.map)[name] for rank in ranks)
        for row, values in zip(found[0].sums.rows, total, strict=True):
            if row.record.name == name:
                then += int(values[1]) - int(values[0])
        for rank in ranks:
            rank.load(states[-1])
        now = sum(totals.owned_sums(rank.map)[name] for rank in ranks)
        for rank in ranks:
            rank.load(states[0])
        assert (now - then) % (1 << 64) == 0


def test_no_links_and_links_without_changes(tmp_path: Path) -> None:
    before = tensors_of("BF16")
    (empty,) = links(tmp_path, [before, before])
    (rank,) = make_ranks(before)
    state = empty.header.base_state
    for deltas in ([], [empty]):
        found = staged(rank, deltas or [empty]) if deltas else stage(
            rank.map, [], update_id="u", from_step=1, from_state=str(state), to_step=1,
            to_state=str(state),
        )  # fmt: skip
        assert (found.elements, found.nbytes) == (0, 0)
        assert judged([found]) == "ready"
        assert written(found)
        assert found.roll_back()
        assert rank.holds(before)


def test_memory_is_that_of_what_changes(tmp_path: Path) -> None:
    before = {"norm.weight": random_tensor("BF16", (100_000,), 1)}
    after = {"norm.weight": changed(before["norm.weight"], 0.01)}
    (rank,) = make_ranks(before)
    found = staged(rank, links(tmp_path, [before, after]))
    assert found.elements == 1000
    assert found.nbytes == 1000 * (4 + 2 + 2)  # position, old and new


# Another base.


def test_a_single_wrong_bit_is_told_with_its_tensor_and_step(tmp_path: Path) -> None:
    states = [tensors_of("BF16")]
    for n in range(3):
        states.append(following(states[-1], 0.2, n))
    deltas = links(tmp_path, states)
    for kind in KINDS:
        for world in (1, 2):
            ranks = make_ranks(states[0], world)
            found = staged(ranks[-1], deltas)
            patch = changed_in(found, ranks[-1], f"{kind}.weight")
            for copy in patch:
                copy[0][copy[1]] ^= 1
            with pytest.raises(Conflict) as error:
                judged([staged(rank, deltas) for rank in ranks])
            assert error.value.tensor == f"{kind}.weight"
            assert error.value.hint is not None
            assert not written(found)


def changed_in(found: Staged, rank: Rank, name: str) -> list[tuple[Any, int]]:
    """The memory of a tensor's copies on this rank, and the place of an element that changes."""
    places = []
    for one in rank.map.tensors[name].regions:
        patch = next(
            p for p in found.patches._patches if p.storage is rank.map.storages[one.storage]
        )
        places.append((rank.memory[one.storage], int(patch.positions[0])))
    return places


def test_two_copies_on_one_rank_that_differ(tmp_path: Path) -> None:
    before = tensors_of("BF16")
    deltas = links(tmp_path, [before, following(before, 0.2, 1)])
    (rank,) = make_ranks(before)
    memory, at = changed_in(staged(rank, deltas), rank, "twice.weight")[1]
    memory[at] ^= 4
    with pytest.raises(Conflict, match="two copies") as error:
        staged(rank, deltas)
    assert error.value.tensor == "twice.weight"


def test_a_rank_that_is_a_step_ahead_of_another(tmp_path: Path) -> None:
    """As half of the ranks of a server would be that died in a commit: nobody owns its copies."""
    before = {name: spec for name, spec in tensors_of("BF16").items() if name[:4] in "norm turned"}
    after = following(before, 0.2, 1)
    deltas = links(tmp_path, [before, after])
    for ahead in (0, 1):
        ranks = make_ranks(before, 2)
        ranks[ahead].load(after)
        with pytest.raises(Conflict):
            judged([staged(rank, deltas) for rank in ranks])


def test_the_wrong_link_of_several_is_found(tmp_path: Path) -> None:
    """A link that says that it follows on the one before, and was made from another state."""
    states = [tensors_of("BF16")]
    for n in range(3):
        states.append(following(states[-1], 0.2, n))
    stranger = following(states[1], 0.1, 99)
    path = make_delta(tmp_path / "middle", stranger, states[2], step=3)
    one, two, three = links(tmp_path, states)

    def forge(header: lies.Header, payload: bytearray) -> None:
        header["__metadata__"]["deltactl.base_state"] = two.header.base_state

    lies.rewrite(path, forge)
    (rank,) = make_ranks(states[0])
    with pytest.raises(Conflict) as error:
        judged([staged(rank, [one, open_delta(path), three])])
    assert error.value.step == 3


def test_a_link_that_lies_about_what_it_leads_to(tmp_path: Path) -> None:
    before = tensors_of("BF16")
    path = make_delta(tmp_path / "delta", before, following(before, 0.2, 1))

    def forge(header: lies.Header, payload: bytearray) -> None:
        table = lies.rows(header)
        table[2]["new"] = f"{int(table[2]['new'], 16) ^ 1:016x}"
        lies.set_rows(header, table)

    lies.rewrite(path, forge)
    (rank,) = make_ranks(before)
    with pytest.raises(Malformed) as error:
        judged([staged(rank, [open_delta(path)])])
    assert error.value.tensor == sorted(before)[2]


def test_a_base_of_another_state_for_what_needs_one(tmp_path: Path) -> None:
    """Positions that only the base tells: of another they are others, if there are any."""
    random = np.random.default_rng(1)
    floats = random.normal(size=100_000).astype("<f4")
    bits = (floats.view("<u4") >> 16).astype("<u2")
    new = bits.copy()
    new[(np.abs(floats) < 0.1) & (random.random(bits.size) < 0.3)] += 1
    before = {"norm.weight": ("BF16", bits.shape, bits.tobytes())}
    after = {"norm.weight": ("BF16", bits.shape, new.tobytes())}
    deltas = links(tmp_path, [before, after], "ulp_ctx")
    (rank,) = make_ranks(before)
    good = write_safetensors(tmp_path / "good.safetensors", before)
    with open_checkpoint(good) as opened:
        assert judged([staged(rank, deltas, opened)]) == "ready"
    moved = ("BF16", bits.shape, random.permutation(bits).tobytes())
    other = write_safetensors(tmp_path / "other.safetensors", {"norm.weight": moved})
    with open_checkpoint(other) as opened, pytest.raises((Conflict, Malformed)):
        judged([staged(rank, deltas, opened)])
    stranger = write_safetensors(tmp_path / "stranger.safetensors", tensors_of("BF16"))
    with open_checkpoint(stranger) as opened, pytest.raises(Conflict, match="another model"):
        staged(rank, deltas, opened)
    with pytest.raises(ValueError, match="base"):
        staged(rank, deltas)


# Before anything is written.


def test_links_that_do_not_lead_from_here_to_there(tmp_path: Path) -> None:
    states = [tensors_of("BF16", n) for n in range(4)]
    one, two, three = links(tmp_path, states)
    (rank,) = make_ranks(states[0])
    for deltas, other in (
        ([one, three], {}),
        ([two, one], {}),
        ([one], {"from_state": two.header.base_state}),
        ([one], {"to_state": two.header.result_state}),
        ([one, one], {}),
    ):
        with pytest.raises(Conflict, match="do not lead"):
            staged(rank, deltas, **other)
    with pytest.raises(Conflict, match="do not lead"):
        stage(
            rank.map, [], update_id="u", from_step=1, from_state="0" * 64, to_step=2,
            to_state="1" * 64,
        )  # fmt: skip


Edit = Callable[[Tensors], None]


def add(after: Tensors) -> None:
    after["new"] = random_tensor("BF16", (3,), 1)


def drop(after: Tensors) -> None:
    del after["norm.weight"]


def recast(after: Tensors) -> None:
    after["norm.weight"] = random_tensor("F32", (48,), 1)


def reshape(after: Tensors) -> None:
    after["norm.weight"] = random_tensor("BF16", (4, 12), 1)


@pytest.mark.parametrize("edit", [add, drop, recast, reshape])
@pytest.mark.parametrize("unmapped", [False, True])
def test_a_change_of_structure_is_refused(edit: Edit, unmapped: bool, tmp_path: Path) -> None:
    before = tensors_of("BF16")
    after = dict(before)
    edit(after)
    (rank,) = make_ranks(before)
    if unmapped:
        rank.map.unmap("norm.weight", "a test")
    with pytest.raises(Unsupported) as error:
        staged(rank, links(tmp_path, [before, after]))
    assert error.value.tensor in ("new", "norm.weight")
    assert error.value.step == 2


def test_a_model_with_another_form_of_the_tensor(tmp_path: Path) -> None:
    before = tensors_of("BF16")
    deltas = links(tmp_path, [before, following(before, 0.1, 1)])
    other = {**before, "norm.weight": random_tensor("BF16", (49,), 1)}
    (rank,) = make_ranks(other)
    with pytest.raises(Conflict, match="another form"):
        staged(rank, deltas)


def test_a_tensor_that_no_rank_has(tmp_path: Path) -> None:
    before = tensors_of("BF16")
    deltas = links(tmp_path, [before, following(before, 0.1, 1)])
    ranks = make_ranks({name: before[name] for name in before if name != "rows.weight"}, 2)
    with pytest.raises(Conflict, match="no such tensor") as error:
        judged([staged(rank, deltas) for rank in ranks])
    assert error.value.tensor == "rows.weight"


def test_a_tensor_that_only_one_rank_has_is_as_good(tmp_path: Path) -> None:
    """As with layers on ranks of their own."""
    before = tensors_of("BF16")
    after = following(before, 0.1, 1)
    deltas = links(tmp_path, [before, after])
    names = list(before)
    parts = [{n: before[n] for n in names[:2]}, {n: before[n] for n in names[2:]}]
    ranks = [make_ranks(part)[0] for part in parts]
    found = [staged(rank, deltas) for rank in ranks]
    assert judged(found) == "ready"
    for one in found:
        assert written(one)
    for rank, part in zip(ranks, parts, strict=True):
        assert rank.holds({name: after[name] for name in part})


def test_tensors_out_of_the_map_are_listed_if_they_change(tmp_path: Path) -> None:
    before = tensors_of("BF16")
    after = {**following(before, 0.1, 1), "rows.weight": before["rows.weight"]}
    (rank,) = make_ranks(before)
    for name in ("rows.weight", "norm.weight", "turned.weight"):
        rank.map.unmap(name, "a test")
    rank.map.unmapped.pop("turned.weight")
    rank.map.ignored = ("turned.weight",)
    found = staged(rank, links(tmp_path, [before, after]))
    assert (found.reload, found.ignored) == (("norm.weight",), ("turned.weight",))
    assert {row.record.name for row in found.sums.rows} == {"columns.weight", "twice.weight"}
    assert judged([found]) == "ready"
    assert written(found)
    kept = {name: after[name] for name in ("columns.weight", "twice.weight")}
    assert rank.holds({**before, **kept})


def test_tensors_that_share_elements_may_not_become_different(tmp_path: Path) -> None:
    """As an embedding and an output layer in one parameter: both are mapped to it."""
    before = tensors_of("BF16")
    before["norm.twin"] = before["norm.weight"]
    (rank,) = make_ranks(before)
    (shared,) = rank.map.tensors["norm.weight"].regions
    twin = replace(rank.map.tensors["norm.twin"], regions=(shared,))
    rank.map.tensors["norm.twin"] = twin

    def next_to(name: str, norm: Spec, twin: Spec) -> Staged:
        after = {**before, "norm.weight": norm, "norm.twin": twin}
        found = staged(rank, links(tmp_path / name, [before, after]))
        assert judged([found]) == "ready"
        return found

    def flipped(start: int, bit: int) -> Spec:
        raw = bytearray(before["norm.weight"][2])
        for element in range(start, start + 3):
            raw[2 * element] ^= bit
        return "BF16", (48,), bytes(raw)

    sparse, other = flipped(10, 1), flipped(12, 2)
    whole = random_tensor("BF16", (48,), 3)
    for number, alike in enumerate((sparse, whole)):
        found = next_to(f"alike {number}", alike, alike)
        assert written(found)
        assert found.roll_back()
    with pytest.raises(Unsupported, match="share their elements"):
        next_to("apart", sparse, other)
    found = next_to("apart as a whole", sparse, whole)
    with pytest.raises(DeltactlError, match="did not read back"):
        written(found)
    assert found.roll_back()
    assert rank.holds(before)


# In the pause.


def test_live_bits_that_change_after_staging_are_seen(tmp_path: Path) -> None:
    states = [tensors_of("BF16")]
    for n, share in enumerate([0.1, 1.0]):
        states.append(following(states[-1], share, n))
    for deltas in (links(tmp_path, states[:2]), links(tmp_path, states)):
        (rank,) = make_ranks(states[0])
        found = staged(rank, deltas)
        for memory, at in places_of(found, rank):
            memory[at] ^= 1
            before = [bits.copy() for bits in rank.memory]
            assert not written(found)
            assert all(map(np.array_equal, rank.memory, before)), "as it was, the other bit too"
            memory[at] ^= 1
        assert written(found)
        for memory, at in places_of(found, rank):
            memory[at] ^= 1
            assert not found.verify()
            memory[at] ^= 1
            assert found.verify()


def places_of(found: Staged, rank: Rank) -> list[tuple[Any, int]]:
    """Of every storage that is written an element that is."""
    numbers = {id(storage): n for n, storage in enumerate(rank.map.storages)}
    places = [
        (rank.memory[numbers[id(p.storage)]], int(p.positions[-1])) for p in found.patches._patches
    ]
    return places + [
        (rank.memory[numbers[id(s.storage)]], s.region.offset) for s in found.stretches
    ]


class Died(Exception):
    pass


def dying_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the writes to storages, each in one piece, so many succeed; of the next one half does."""
    need_kernel()  # of whose writes one is cut short
    left = [writes]

    def count(write: Callable[[], None], half: Callable[[], None]) -> None:
        left[0] -= 1
        if left[0] >= 0:
            write()
            return
        half()
        raise Died

    real_replace, real_region = native.Kernel.replace, live_weights.write_region

    def replaced(kernel: native.Kernel, before: Any, after: Any) -> int:
        for row, other in zip(before, after, strict=True):
            half = row.copy()
            half[3] = -(-half[3] // 2)
            count(
                partial(real_replace, kernel, row[None], other[None]),
                partial(real_replace, kernel, half[None], other[None]),
            )
        return int(before[:, 3].sum())

    def region(storage: Any, region: Any, source: Any) -> None:
        (part, *_) = dense_regions.pieces(region, max(1, region.count // 2))
        count(
            lambda: real_region(storage, region, source), lambda: real_region(storage, part, source)
        )

    monkeypatch.setattr(native.Kernel, "replace", replaced)
    monkeypatch.setattr(live_weights, "write_region", region)


def test_a_fault_at_every_write_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [tensors_of("BF16")]
    states.append(following(states[0], 0.1, 1))
    after = following(states[1], 1.0, 2)
    states.append({name: (after if name < "o" else states[1])[name] for name in after})
    deltas = links(tmp_path, states)
    (rank,) = make_ranks(states[0])
    found = staged(rank, deltas)
    writes = len(found.patches._patches) + len(found.stretches)
    assert len(found.patches._patches) > 2
    assert len(found.stretches) > 1
    for done in range(writes):
        with monkeypatch.context() as patch:
            dying_after(done, patch)
            with pytest.raises(Died):
                written(found)
        assert not rank.holds(states[-1])
        assert not found.verify()
        assert found.roll_back()
        assert rank.holds(states[0])
    assert written(found)
    assert rank.holds(states[-1])


# A whole checkpoint, whatever is live.


def full(rank: Rank, checkpoint: Checkpoint) -> Staged:
    state = state_of(checkpoint)
    return stage_full(rank.map, checkpoint, update_id="u", to_step=9, to_state=state)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("live_share", [0.0, 0.01, 0.03, 0.5, 1.0])
def test_a_repair_trusts_nothing(live_share: float, world: int, tmp_path: Path) -> None:
    wanted = {
        **tensors_of("BF16"),
        "norm.large": random_tensor("BF16", (5000,), 1),
        "columns.large": random_tensor("F32", (64, 64), 2),
        "turned.large": random_tensor("I8", (60, 70), 3),
    }
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    broken = {
        name: following({name: spec}, live_share, n)[name]
        for n, (name, spec) in enumerate(wanted.items())
    }
    ranks = make_ranks(broken, world)
    with open_checkpoint(path) as checkpoint:
        for rank in ranks:
            found = full(rank, checkpoint)
            assert found.full
            assert written(found)
            assert rank.holds(wanted)
            again = full(rank, checkpoint)
            assert (again.elements, again.nbytes) == (0, 0)
    assert hold(ranks, wanted)


def test_a_repair_holds_in_memory_what_differs_if_that_is_little(tmp_path: Path) -> None:
    wanted = {"norm.few": random_tensor("BF16", (6000,), 1)}
    wanted["rows.many"] = random_tensor("BF16", (60, 50), 2)
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    broken = {"norm.few": changed(wanted["norm.few"], 0.01)}
    broken["rows.many"] = random_tensor("BF16", (60, 50), 5)
    (rank,) = make_ranks(broken)
    with open_checkpoint(path) as checkpoint:
        found = full(rank, checkpoint)
        assert found.patches.elements == 60
        assert found.nbytes == 60 * 8
        assert [stretch.elements for stretch in found.stretches] == [3000]
        assert written(found)
        assert rank.holds(wanted)
        assert not found.roll_back()  # of the stretch nothing was kept


def test_a_repair_of_little_can_be_taken_back(tmp_path: Path) -> None:
    wanted = {"norm.few": random_tensor("BF16", (6000,), 1)}
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    broken = {"norm.few": changed(wanted["norm.few"], 0.01)}
    (rank,) = make_ranks(broken)
    with open_checkpoint(path) as checkpoint:
        found = full(rank, checkpoint)
        assert written(found)
        assert found.roll_back()
        assert rank.holds(broken)


def test_what_does_not_take_its_old_bits_is_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever rolls back has to read what is live then."""
    before = tensors_of("BF16")
    after = {**before, "norm.weight": changed(before["norm.weight"], 0.5)}
    (rank,) = make_ranks(before)
    found = staged(rank, links(tmp_path, [before, after]))
    assert judged([found]) == "ready"
    assert written(found)
    monkeypatch.setattr(type(found.patches), "write_old", lambda patches: None)
    assert not found.roll_back()


def test_a_repair_after_a_fault_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tensors_of("BF16")
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    (rank,) = make_ranks(following(wanted, 1.0, 3))
    with open_checkpoint(path) as checkpoint:
        found = full(rank, checkpoint)
        with monkeypatch.context() as patch:
            dying_after(2, patch)
            with pytest.raises(Died):
                written(found)
        assert not found.verify()
        again = full(rank, checkpoint)
        assert written(again)
    assert rank.holds(wanted)


def test_a_repair_from_files_that_are_written_to_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pause nothing is written any more; in it, what was written is not believed."""
    wanted = tensors_of("BF16")
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    broken = following(wanted, 1.0, 3)
    (rank,) = make_ranks(broken)
    with open_checkpoint(path) as checkpoint:
        found, write = full(rank, checkpoint), live_weights.write_region

        def write_as_the_file_changes(*arguments: Any) -> None:
            write(*arguments)
            flip_bit(path, path.stat().st_size - 1)

        with monkeypatch.context() as patch:
            patch.setattr(live_weights, "write_region", write_as_the_file_changes)
            with pytest.raises(DeltactlError, match="did not read back"):
                written(found)
        rank.load(broken)
        assert not written(found)
        assert rank.holds(broken)
        path.rename(tmp_path / "aside")
        path.write_bytes(b"another")  # what is mapped has lost its name, and nobody writes to it
        assert written(found)


def test_a_file_that_changes_before_it_is_copied_is_not_believed(tmp_path: Path) -> None:
    """Live weights and file are equal then, and neither is the step."""
    wanted = tensors_of("BF16")
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    (rank,) = make_ranks(following(wanted, 1.0, 3))
    with open_checkpoint(path) as checkpoint:
        found = full(rank, checkpoint)
        assert found.replace()
        flip_bit(path, path.stat().st_size - 1)
        with pytest.raises(DeltactlError, match="did not read back"):
            found.complete()
        assert all(stretch.is_new() for stretch in found.stretches)
        assert not found.verify()
    assert not rank.holds(wanted)


def test_a_repair_with_another_models_step(tmp_path: Path) -> None:
    wanted = tensors_of("BF16")
    (rank,) = make_ranks(wanted)
    for edit in (drop, recast, reshape):
        other = dict(wanted)
        edit(other)
        path = write_safetensors(tmp_path / "other.safetensors", other)
        with open_checkpoint(path) as checkpoint, pytest.raises(Conflict, match="another model"):
            full(rank, checkpoint)


def test_a_repair_lists_what_is_not_in_the_map(tmp_path: Path) -> None:
    wanted = tensors_of("BF16")
    path = write_safetensors(tmp_path / "wanted.safetensors", wanted)
    (rank,) = make_ranks(wanted)
    rank.map.unmap("norm.weight", "a test")
    rank.map.unmap("not in the checkpoint", "a test")
    rank.map.unmap("turned.weight", "a test")
    rank.map.unmapped.pop("turned.weight")
    rank.map.ignored = ("not in the checkpoint either", "turned.weight")
    with open_checkpoint(path) as checkpoint:
        found = full(rank, checkpoint)
    assert found.reload == ("norm.weight",)
    assert found.ignored == ("turned.weight",)
