"""Pulling: what is fetched, what is written, what is mended, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import (
    Conflict,
    DeltactlError,
    Malformed,
    NotFound,
    Transient,
    UsageError,
)
from deltactl.format.link_names import anchor_directory, anchor_file_name, delta_name
from deltactl.ops import pull as pull_module
from deltactl.ops.destination import MARKER
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from tests.support.chains import (
    AUX,
    Tensors,
    content,
    every_kind,
    first_state,
    holds,
    make_chain,
    next_state,
    push_all,
    states,
    write,
    write_steps,
)
from tests.support.checkpoints import flip_bit, random_tensor, read_tensors, write_hf_directory
from tests.support.crash import crashes
from tests.support.flips import done_at_once
from tests.support.surroundings import decorate, holds_weights, others_of

STEPS = states(6)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


class Remote(LocalBucket):
    """As if its objects could not be mapped: all has to be fetched."""

    def path(self, name: str) -> Path | None:
        return None


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket of STEPS, with anchors at 1 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Path(make_chain(tmp_path_factory.mktemp("six"), STEPS, anchor_every=4).url)


@pytest.fixture(params=[LocalBucket, Remote])
def bucket(request: pytest.FixtureRequest, six_steps: Path, tmp_path: Path) -> LocalBucket:
    shutil.copytree(six_steps, tmp_path / "bucket")
    found: LocalBucket = request.param(tmp_path / "bucket")
    return found


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "dest"


def sizes(bucket: LocalBucket, *steps: int) -> int:
    """Bytes of those steps' deltas."""
    links = read_chain(bucket).deltas
    return sum(links[step].bytes for step in steps)


def assert_tidy(dest: Path) -> None:
    assert [path.name for path in dest.parent.iterdir()] == [dest.name]


# Into a new directory.


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_every_step_into_a_new_directory(bucket: LocalBucket, dest: Path, step: int) -> None:
    report = pull(bucket, dest, step=step)
    assert holds(dest, STEPS[step - 1])
    chain = read_chain(bucket)
    anchor, deltas = chain.path(step)
    assert report.step == step
    assert report.state == chain.state_at(step)
    assert report.bytes_fetched == anchor.bytes + sum(link.bytes for link in deltas)
    assert report.links == 1 + len(deltas)
    assert (report.from_step, report.written, report.proven, report.newer) == (None, True, True, ())
    assert_tidy(dest)


def test_the_tip_is_pulled_by_default(bucket: LocalBucket, dest: Path) -> None:
    assert pull(bucket, dest).step == 6
    assert holds(dest, STEPS[5])


def test_what_is_pulled_is_a_hugging_face_directory(bucket: LocalBucket, dest: Path) -> None:
    pull(bucket, dest)
    assert set(content(dest)) == {*AUX, *SHARDS, INDEX, MARKER}
    assert {name: (dest / name).read_bytes() for name in AUX} == AUX
    index = json.loads((dest / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(len(d) for _, _, d in STEPS[5].values())}
    homes = {}
    for shard in SHARDS:
        with safe_open(dest / shard, "np") as file:
            assert file.metadata() == {"format": "pt"}
            homes |= dict.fromkeys(file.keys(), shard)
    assert index["weight_map"] == homes


def test_an_anchor_of_one_file_becomes_a_directory_too(tmp_path: Path, dest: Path) -> None:
    bucket = make_chain(tmp_path, STEPS[:3], shards=0)
    pull(bucket, dest)
    assert set(content(dest)) == {"model.safetensors", MARKER}
    assert holds(dest, STEPS[2])
    with safe_open(dest / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}, "it is no anchor any more"


def test_an_empty_directory_and_parents_that_are_not_there(
    bucket: LocalBucket, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a/b/c"):
        pull(bucket, place)
        assert holds(place, STEPS[5])


def test_through_a_link(bucket: LocalBucket, dest: Path) -> None:
    link = dest.parent / "current"
    link.symlink_to(dest.name)
    for step in (2, 3):
        pull(bucket, link, step=step)
        assert link.is_symlink()
        assert holds(dest, STEPS[step - 1])


# What cannot be pulled.


def assert_nothing_came(dest: Path) -> None:
    assert list(dest.parent.iterdir()) == []


@pytest.mark.parametrize("step", [0, 7, 99])
def test_a_step_that_is_not_there(bucket: LocalBucket, dest: Path, step: int) -> None:
    with pytest.raises(NotFound, match="no such step"):
        pull(bucket, dest, step=step)
    assert_nothing_came(dest)


def test_no_bucket_and_no_chain(tmp_path: Path, dest: Path) -> None:
    with pytest.raises(NotFound, match="no such bucket"):
        pull(LocalBucket(tmp_path / "nothing"), dest)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no chain") as caught:
        pull(LocalBucket(tmp_path / "empty"), dest)
    assert "push" in str(caught.value.hint)
    assert_nothing_came(dest)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (delta_name(2), 3),
        (delta_name(6), 6),
        (f"{anchor_directory(1)}/{SHARDS[0]}", 1),
        (f"{anchor_directory(1)}/{SHARDS[1]}", 2),
        (f"{anchor_directory(1)}/config.json", 1),
        (f"{anchor_directory(1)}/tokenizer/vocab.txt", 3),
    ],
)
@pytest.mark.parametrize("offset", [-1, 3])
def test_what_is_damaged_is_named_and_nothing_is_visible(
    bucket: LocalBucket, dest: Path, name: str, step: int, offset: int
) -> None:
    path = Path(bucket.url, name)
    flip_bit(path, offset % path.stat().st_size)
    with pytest.raises(Malformed) as caught:
        pull(bucket, dest, step=step)
    assert caught.value.file is not None
    assert caught.value.file.endswith(Path(name).name)
    assert_nothing_came(dest)


def test_a_gap_is_never_jumped(bucket: LocalBucket, dest: Path) -> None:
    """Neither from an anchor nor from what is at hand, and what is at hand stays."""
    pull(bucket, dest, step=1)
    was = content(dest)
    bucket.delete(delta_name(2))
    with pytest.raises(Malformed, match="chain is broken") as caught:
        pull(bucket, dest, step=3)
    assert caught.value.file == delta_name(3)
    assert content(dest) == was
    with pytest.raises(NotFound):
        pull(bucket, dest, step=2)
    assert content(dest) == was


def test_a_later_anchor_leads_past_a_gap(bucket: LocalBucket, dest: Path) -> None:
    pull(bucket, dest, step=1)
    bucket.delete(delta_name(2))
    report = pull(bucket, dest)
    assert (report.step, report.from_step, report.newer) == (6, None, ())
    assert holds(dest, STEPS[5])


def test_newer_steps_that_cannot_be_rebuilt_are_told(bucket: LocalBucket, dest: Path) -> None:
    bucket.delete(delta_name(5))
    report = pull(bucket, dest)
    assert (report.step, report.newer) == (4, (6,))
    flip_bit(Path(bucket.url, delta_name(6)), 99)
    assert pull(bucket, dest).newer == (6,), "also where not even its header can be read"


def test_what_is_held_leads_on_past_a_damaged_link(bucket: LocalBucket, dest: Path) -> None:
    """A step that no anchor leads to any more is not given up for an older one."""
    pull(bucket, dest, step=3)
    (Path(bucket.url) / "deltas/step_000002.safetensors").write_bytes(b"torn")
    shutil.rmtree(Path(bucket.url) / "anchors/step_000004")
    report = pull(bucket, dest)
    assert (report.step, report.from_step, report.newer) == (6, 3, ())
    assert read_tensors(dest) == STEPS[5]


@pytest.mark.parametrize("damage", ["lost", "torn"])
def test_a_newer_step_is_never_replaced_unasked(
    bucket: LocalBucket, dest: Path, damage: str
) -> None:
    pull(bucket, dest)
    for step in (5, 6):
        link = Path(bucket.url) / f"deltas/step_{step:06d}.safetensors"
        link.unlink()
        if damage == "torn":
            link.write_bytes(b"torn")
    with pytest.raises(Conflict, match="newer step than the bucket") as caught:
        pull(bucket, dest)
    assert "--step 4" in str(caught.value.hint)
    assert read_tensors(dest) == STEPS[5]
    assert pull(bucket, dest, step=4).step == 4
    assert read_tensors(dest) == STEPS[3]


def test_a_chain_without_any_anchor(bucket: LocalBucket, dest: Path) -> None:
    shutil.rmtree(Path(bucket.url, "anchors"))
    with pytest.raises(Malformed):
        pull(bucket, dest)
    assert_nothing_came(dest)


def test_links_of_two_chains_do_not_mix(tmp_path: Path, dest: Path) -> None:
    one = make_chain(tmp_path / "one", STEPS[:3])
    two = make_chain(tmp_path / "two", [every_kind(STEPS[0]), *STEPS[1:3]])
    for step in (2, 3):
        shutil.copy(Path(two.url, delta_name(step)), Path(one.url, delta_name(step)))
    with pytest.raises(Malformed):
        pull(one, dest, step=3)
    report = pull(one, dest)
    assert (report.step, report.newer) == (1, (2, 3))
    assert holds(dest, STEPS[0])


def other_chain(tmp_path: Path) -> Path:
    steps = [every_kind(STEPS[0])]
    while len(steps) < 6:
        steps.append(next_state(steps[-1], 300 + len(steps)))
    return Path(make_chain(tmp_path / "other", steps, anchor_every=4).url)


@pytest.mark.parametrize("step", [4, 5, None])
def test_an_anchor_that_contradicts_the_deltas_is_not_rebuilt_from(
    bucket: LocalBucket, dest: Path, tmp_path: Path, step: int | None
) -> None:
    place = Path(bucket.url, anchor_directory(4))
    shutil.rmtree(place)
    shutil.copytree(other_chain(tmp_path) / anchor_directory(4), place)
    report = pull(bucket, dest, step=step)
    assert (report.step, report.newer) == (step or 6, ())
    assert holds(dest, STEPS[report.step - 1])
    with pytest.raises(Conflict, match="chain is damaged"):
        push(write(tmp_path / "next", next_state(STEPS[5], 6)), bucket)


def test_a_delta_of_another_chain_does_not_outweigh_the_anchor_of_its_step(
    bucket: LocalBucket, dest: Path, tmp_path: Path
) -> None:
    shutil.copy(other_chain(tmp_path) / delta_name(4), Path(bucket.url, delta_name(4)))
    for step in (4, 5, 6, 3):
        pull(bucket, dest, step=step)
        assert holds(dest, STEPS[step - 1])


# Into a directory that holds a step.


@pytest.mark.parametrize(("have", "want"), [(1, 2), (1, 3), (2, 4), (4, 6), (2, 6)])
def test_catching_up_fetches_what_is_missing(
    bucket: LocalBucket, dest: Path, have: int, want: int
) -> None:
    first = pull(bucket, dest, step=have)
    report = pull(bucket, dest, step=want)
    assert holds(dest, STEPS[want - 1])
    assert (report.from_step, report.links) == (have, want - have)
    assert report.bytes_fetched == sizes(bucket, *range(have + 1, want + 1))
    assert report.bytes_fetched < first.bytes_fetched
    assert_tidy(dest)


def test_a_server_that_follows_step_by_step_never_fetches_an_anchor_again(
    bucket: LocalBucket, dest: Path
) -> None:
    for step in range(1, 7):
        report = pull(bucket, dest, step=step)
        assert report.from_step == (step - 1 or None)
        assert holds(dest, STEPS[step - 1])


@pytest.mark.parametrize(("have", "want"), [(6, 5), (6, 1), (4, 3)])
def test_going_back(bucket: LocalBucket, dest: Path, have: int, want: int) -> None:
    pull(bucket, dest, step=have)
    report = pull(bucket, dest, step=want)
    assert report.from_step is None
    assert holds(dest, STEPS[want - 1])
    assert_tidy(dest)


def test_what_is_there_already_is_left_alone(bucket: LocalBucket, dest: Path) -> None:
    pull(bucket, dest)
    was = content(dest)
    inode = dest.stat().st_ino
    report = pull(bucket, dest)
    assert (report.step, report.from_step, report.links) == (6, 6, 0)
    assert (report.written, report.bytes_fetched, report.proven) == (False, 0, True)
    assert content(dest) == was
    assert dest.stat().st_ino == inode


def test_the_last_writer_of_an_element_wins(tmp_path: Path, dest: Path) -> None:
    """Deltas are merged on the way: the same elements changed again and again, and back."""

    def with_first_element(value: int) -> Tensors:
        dtype, shape, data = STEPS[0]["model.embed"]
        return {**STEPS[0], "model.embed": (dtype, shape, bytes([value]) + data[1:])}

    steps = [with_first_element(value) for value in (1, 2, 1, 3, 1, 7)]
    bucket = make_chain(tmp_path, steps, anchor_every=0)
    for have in range(1, 6):
        shutil.rmtree(dest, ignore_errors=True)
        pull(bucket, dest, step=have)
        report = pull(bucket, dest)
        assert holds(dest, steps[5])
        assert report.links == 6 - (5 if have in (1, 3) else have), "1, 3 and 5 are one state"


def test_tensors_that_come_and_go_between(tmp_path: Path, dest: Path) -> None:
    one = first_state()
    two = every_kind(one)
    without = {name: spec for name, spec in two.items() if name != "model.embed"}
    back = {**without, "model.embed": random_tensor("F32", (2, 3), 90)}
    steps = [one, two, without, back, next_state({**back, **one}, 91), one, two]
    bucket = make_chain(tmp_path, steps, anchor_every=0)
    for have in range(1, len(steps)):
        for want in range(have + 1, len(steps) + 1):
            shutil.rmtree(dest, ignore_errors=True)
            pull(bucket, dest, step=have)
            pull(bucket, dest, step=want)
            assert holds(dest, steps[want - 1]), (have, want)


def test_an_anchor_is_fetched_where_it_is_less_than_the_deltas(tmp_path: Path, dest: Path) -> None:
    steps = [{"w": random_tensor("BF16", (500,), seed)} for seed in range(5)]
    bucket = make_chain(tmp_path, steps, anchor_every=4, shards=1)
    pull(bucket, dest, step=1)
    report = pull(bucket, dest, step=4)
    assert (report.links, report.from_step) == (1, None)
    assert report.bytes_fetched == read_chain(bucket).anchors[4].bytes < sizes(bucket, 2, 3, 4)
    assert holds(dest, steps[3])


def test_a_checkpoint_that_is_a_step_needs_no_marker(
    bucket: LocalBucket, dest: Path, tmp_path: Path
) -> None:
    """The state says what it is, not a file beside it; also in other shards."""
    write(dest, STEPS[2], shards=3)
    report = pull(bucket, dest, step=5)
    assert report.from_step == 3
    assert holds(dest, STEPS[4])


def test_a_state_that_the_chain_had_twice(tmp_path: Path, dest: Path) -> None:
    steps = [STEPS[0], STEPS[1], STEPS[0], STEPS[2]]
    bucket = make_chain(tmp_path, steps, anchor_every=0)
    pull(bucket, dest, step=1)
    report = pull(bucket, dest, step=4)
    assert (report.from_step, report.links) == (3, 1)
    assert not pull(bucket, dest, step=4).written
    assert pull(bucket, dest, step=3).step == 3
    assert holds(dest, STEPS[0])


# A directory that is not the chain's.


def foreign_checkpoint(dest: Path) -> None:
    write(dest, next_state(first_state(), 99))


def other_files(dest: Path) -> None:
    dest.mkdir()
    (dest / "notes.txt").write_text("mine")


def one_bit_off(dest: Path) -> None:
    write(dest, STEPS[0])
    shard = dest / SHARDS[0]
    flip_bit(shard, shard.stat().st_size - 1)


def half_a_checkpoint(dest: Path) -> None:
    write(dest, STEPS[0])
    (dest / SHARDS[0]).unlink()


def with_a_marker_that_is_no_marker(dest: Path) -> None:
    other_files(dest)
    (dest / MARKER).write_text("[]")


@pytest.mark.parametrize(
    "there",
    [
        foreign_checkpoint,
        other_files,
        one_bit_off,
        half_a_checkpoint,
        with_a_marker_that_is_no_marker,
    ],
)
def test_what_is_not_of_the_chain_is_refused_and_untouched(
    bucket: LocalBucket, dest: Path, there: Callable[[Path], None]
) -> None:
    there(dest)
    was = content(dest)
    with pytest.raises(Conflict, match="not of this chain") as caught:
        pull(bucket, dest)
    assert caught.value.file == str(dest)
    assert content(dest) == was
    assert_tidy(dest)


# A trainer's directory.

KEPT = [
    "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "rng_state_3.pth",
    "training_args.bin", "optimizer.bin", "scaler.pt", "random_states_0.pkl", "global_step500/",
    "__0_0.distcp", "optimizer_0/", "lr_scheduler.pt", "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt", "optim_world_size_8_rank_0.pt",
    "checkpoint-500/optimizer.pt", "step_7/global_step100/", "epoch 1/rng_state_0.pth",
]  # fmt: skip


def keep(dest: Path, name: str) -> None:
    (dest / name).parent.mkdir(exist_ok=True)
    if name.endswith("/"):
        (dest / name).mkdir()
    else:
        (dest / name).write_bytes(b"moments")


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_weights_beside_a_trainers_state_are_not_replaced(
    bucket: LocalBucket, dest: Path, name: str, ours: bool
) -> None:
    if ours:
        pull(bucket, dest, step=4)
    else:
        write(dest, STEPS[3])
    keep(dest, name)
    was = content(dest)
    for step in (None, 5, 2):
        with pytest.raises(Conflict, match="a trainer keeps its state") as caught:
            pull(bucket, dest, step=step)
        assert caught.value.found == name.rstrip("/")
        assert f"deltactl pull {bucket.url} {dest} --force" in str(caught.value.hint)
    assert content(dest) == was
    assert_tidy(dest)
    pull(bucket, dest, step=5, force=True)
    assert holds(dest, STEPS[4])
    assert (dest / name).exists(), "what is not replaced stays"


def test_the_step_that_a_trainers_directory_holds_is_left_alone(
    bucket: LocalBucket, dest: Path
) -> None:
    write(dest, STEPS[5])
    keep(dest, "optimizer.pt")
    was = content(dest)
    assert not pull(bucket, dest).written
    (dest / "config.json").write_text("its own")
    with pytest.raises(Conflict, match="a trainer keeps its state"):
        pull(bucket, dest)
    assert (dest / "config.json").read_text() == "its own"
    assert pull(bucket, dest, force=True).written
    assert content(dest) == was


def test_a_trainers_own_weights_are_not_replaced_even_by_force(
    bucket: LocalBucket, dest: Path
) -> None:
    foreign_checkpoint(dest)
    keep(dest, "optimizer.pt")
    was = content(dest)
    for force in (False, True):
        with pytest.raises(Conflict, match="not of this chain"):
            pull(bucket, dest, force=force)
    assert content(dest) == was


OTHERS = ["optimizer.md", "my_scheduler.json", "global_steps", "states.pt", "checkpoint-5/notes.pt"]


@pytest.mark.parametrize("name", [*OTHERS, "a/b/optimizer.pt"])
def test_other_names_are_no_trainers(bucket: LocalBucket, dest: Path, name: str) -> None:
    write(dest, STEPS[3])
    (dest / "a").mkdir()
    keep(dest, name)
    pull(bucket, dest)
    assert holds(dest, STEPS[5])


# Files that an earlier pull put there.


def test_files_that_the_step_has_not_do_not_stay(tmp_path: Path, dest: Path) -> None:
    """As the config of another model, from another chain or from before the model changed."""
    one = make_chain(tmp_path / "one", [STEPS[0]])
    other = make_chain(tmp_path / "other", [every_kind(first_state())], shards=0)
    pull(one, dest)
    (dest / "tokenizer/vocab.txt").write_text("edited")
    (dest / "mine.txt").write_text("mine")
    pull(other, dest)
    found = content(dest)
    assert found.keys() == {"model.safetensors", MARKER, "tokenizer/vocab.txt", "mine.txt"}
    assert found["tokenizer/vocab.txt"] == b"edited", "somebody changed it since"
    pull(one, dest)
    assert content(dest).keys() == {*AUX, *SHARDS, INDEX, MARKER, "mine.txt"}


@pytest.mark.parametrize(
    "files",
    [
        None, [], "config.json", {"../victim": "0"}, {"/victim": "0"}, {"..": "0"}, {"": ""},
        {"notes.txt": None}, {"notes.txt": ["x"]}, {"notes.txt": "0" * 64}, {"sub": "0" * 64},
    ],
)  # fmt: skip
def test_what_the_marker_says_of_files_removes_nothing_else(
    bucket: LocalBucket, dest: Path, files: object
) -> None:
    pull(bucket, dest, step=1)
    (dest.parent / "victim").write_text("mine")
    (dest / "notes.txt").write_text("mine")
    (dest / "sub").mkdir()
    marker = json.loads((dest / MARKER).read_text()) | {"files": files}
    (dest / MARKER).write_text(json.dumps(marker))
    pull(bucket, dest, step=2)
    assert (dest.parent / "victim").read_text() == (dest / "notes.txt").read_text() == "mine"
    assert (dest / "sub").is_dir()
    assert {*AUX} <= content(dest).keys()


def test_a_file_is_no_destination(bucket: LocalBucket, dest: Path) -> None:
    dest.write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        pull(bucket, dest)
    assert dest.read_text() == "mine"


def test_what_pull_wrote_for_another_chain_may_be_replaced(
    bucket: LocalBucket, dest: Path, tmp_path: Path
) -> None:
    other = make_chain(tmp_path / "other", [every_kind(first_state())])
    pull(other, dest)
    report = pull(bucket, dest)
    assert report.from_step is None
    assert holds(dest, STEPS[5])


def test_the_word_of_a_marker_is_not_taken(bucket: LocalBucket, dest: Path) -> None:
    pull(bucket, dest, step=2)
    state = read_chain(bucket).state_at(6)
    marker = {"bucket": bucket.url, "step": 6, "state": state}
    (dest / MARKER).write_text(json.dumps(marker))
    report = pull(bucket, dest)
    assert (report.written, report.from_step) == (True, 2)
    assert holds(dest, STEPS[5])


# A directory of ours that is damaged.


def torn_shard(dest: Path) -> None:
    os.truncate(dest / SHARDS[1], 200)


def flipped_bit(dest: Path) -> None:
    flip_bit(dest / SHARDS[1], (dest / SHARDS[1]).stat().st_size - 1)


def flipped_header(dest: Path) -> None:
    flip_bit(dest / SHARDS[0], 20)


def lost_shard(dest: Path) -> None:
    (dest / SHARDS[0]).unlink()


def lost_index(dest: Path) -> None:
    (dest / INDEX).unlink()


def torn_index(dest: Path) -> None:
    (dest / INDEX).write_text("{")


def stale_single(dest: Path) -> None:
    write_hf_directory(dest, first_state(), shards=1)


def edited_weights(dest: Path) -> None:
    shutil.rmtree(dest)
    write(dest, next_state(first_state(), 98))
    (dest / MARKER).write_text(json.dumps({"bucket": "/elsewhere", "step": 1, "state": "0"}))


@pytest.mark.parametrize(
    "damage",
    [
        torn_shard, flipped_bit, flipped_header, lost_shard, lost_index, torn_index, stale_single,
        edited_weights,
    ],
)  # fmt: skip
@pytest.mark.parametrize("want", [3, 5, 6])
def test_weights_that_are_damaged_are_mended(
    bucket: LocalBucket, dest: Path, damage: Callable[[Path], None], want: int
) -> None:
    pull(bucket, dest, step=5)
    (dest / "notes.txt").write_text("mine")
    damage(dest)
    report = pull(bucket, dest, step=want)
    assert (report.written, report.from_step) == (True, None)
    assert holds(dest, STEPS[want - 1])
    assert (dest / "notes.txt").exists() or damage is edited_weights
    assert_tidy(dest)


@pytest.mark.parametrize("want", [4, 5, 6])
def test_other_files_that_are_lost_or_damaged_are_mended(
    bucket: LocalBucket, dest: Path, want: int
) -> None:
    """A directory without its config cannot be served, and deltas do not carry it."""
    pull(bucket, dest, step=4)
    (dest / "config.json").unlink()
    flip_bit(dest / "tokenizer/vocab.txt", 0)
    report = pull(bucket, dest, step=want)
    assert {name: (dest / name).read_bytes() for name in AUX} == AUX
    mended = sum(map(len, AUX.values()))
    assert report.written
    assert report.bytes_fetched == mended + sizes(bucket, *range(5, want + 1))
    assert report.from_step == 4
    assert_tidy(dest)
    assert not pull(bucket, dest, step=want).written


def test_other_files_are_those_of_the_newest_anchor(tmp_path: Path, dest: Path) -> None:
    bucket = LocalBucket(tmp_path / "bucket")
    sources = write_steps(tmp_path, STEPS[:5])
    for source in sources[2:]:
        (source / "config.json").write_text('{"model_type": "tiny", "rope_theta": "changed"}')
        (source / "added.txt").write_text("new")
    push_all(bucket, sources, anchor_every=4)
    pull(bucket, dest, step=1)
    assert (dest / "config.json").read_bytes() == AUX["config.json"]
    pull(bucket, dest, step=3)
    assert (dest / "config.json").read_bytes() == AUX["config.json"], "no anchor has the new one"
    report = pull(bucket, dest, step=5)
    assert report.from_step == 3
    assert "changed" in (dest / "config.json").read_text()
    assert (dest / "added.txt").read_text() == "new"


def test_what_others_put_into_the_directory_stays(bucket: LocalBucket, dest: Path) -> None:
    pull(bucket, dest, step=4)
    decorate(dest)
    (dest / MARKER).unlink()
    others = others_of(dest)
    for step in (5, 1, 6):
        pull(bucket, dest, step=step, force=True)
        (dest / MARKER).unlink()
        assert others_of(dest) == others
        assert holds_weights(dest, STEPS[step - 1])


def test_shards_of_the_step_before_do_not_stay(tmp_path: Path, dest: Path) -> None:
    bucket = LocalBucket(tmp_path / "bucket")
    layouts = [3, 1, 2]
    for n, shards in enumerate(layouts):
        push(write(tmp_path / f"{n}", STEPS[n], shards=shards), bucket, anchor_every=1)
    for step in (1, 2, 3, 1, 3, 2):
        shutil.rmtree(dest / "tokenizer", ignore_errors=True)
        (dest / "config.json").unlink(missing_ok=True)
        pull(bucket, dest, step=step)
        held = read_tensors(dest)
        assert held == STEPS[step - 1]
        index = dest / INDEX
        files = {path.name for path in dest.glob("*.safetensors")}
        if index.exists():
            assert files == set(json.loads(index.read_text())["weight_map"].values())
        else:
            assert files == {"model.safetensors"}


# Crashes and full disks.


@pytest.mark.parametrize("fallback", [False, True])
def test_killed_at_any_moment(tmp_path: Path, six_steps: Path, fallback: bool) -> None:
    bucket = LocalBucket(shutil.copytree(six_steps, tmp_path / "bucket"))
    start = tmp_path / "start/model"
    pull(bucket, start, step=2)
    (start / "notes.txt").write_text("mine")
    for step in (5, 6):
        bucket.delete(delta_name(step))
    found = crashes(tmp_path, "pull", fallback=fallback)
    seen = []
    with done_at_once():
        for place, call in found:
            model = place / "model"
            if model.exists() or not fallback:
                tensors = read_tensors(model)
                assert tensors in (STEPS[1], STEPS[3]), call
                seen.append(2 if tensors == STEPS[1] else 4)
                assert (model / "notes.txt").exists()
            report = pull(bucket, model)
            assert report.step == 4
            assert holds(model, STEPS[3])
            assert (model / "notes.txt").exists()
            assert_tidy(model)
    assert seen == sorted(seen)
    assert set(seen) == {2, 4}


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync", "copy_file_range", "mkdir"])
@pytest.mark.parametrize("have", [None, 2])
def test_a_full_disk_leaves_all_as_it_was(
    bucket: LocalBucket, dest: Path, monkeypatch: pytest.MonkeyPatch, call: str, have: int | None
) -> None:
    if have:
        pull(bucket, dest, step=have)
        (dest / "config.json").unlink()
    was = content(dest.parent)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            pull(bucket, dest)
    assert content(dest.parent) == was
    assert len(list(dest.parent.iterdir())) == (have is not None)


def test_hostile_names_never_become_paths(tmp_path: Path, dest: Path) -> None:
    """An index that names files outside of the anchor's directory, sealed as if it were right."""
    from deltactl.checkpoint.checkpoint import open_checkpoint
    from deltactl.checkpoint.state import tensor_states
    from deltactl.format.anchor import AnchorFile, anchor_index

    source = write(tmp_path / "source", STEPS[0], shards=1)
    (tmp_path / "secret").write_text("secret")
    with open_checkpoint(source) as checkpoint:
        tensors = tensor_states(checkpoint)
    weight_map = {tensor.name: "model.safetensors" for tensor in tensors}
    directory = tmp_path / "bucket" / anchor_directory(1)
    directory.mkdir(parents=True)
    shutil.copy(source / "model.safetensors", directory)
    shard = AnchorFile(
        "model.safetensors", (directory / "model.safetensors").stat().st_size, "0" * 64, True
    )
    for name in (
        "../../../secret",
        "/etc/passwd",
        "a/../../x",
        "..",
        "a\\b",
        "a\0b",
        "./x",
        "x//y",
    ):
        hostile = AnchorFile(name, 6, "0" * 64, False)
        (directory / INDEX).write_bytes(anchor_index(1, tensors, weight_map, (shard, hostile)))
        with pytest.raises(DeltactlError):
            pull(LocalBucket(tmp_path / "bucket"), dest)
        assert_nothing_came(dest)
    hostile = AnchorFile("../x/model.safetensors", shard.nbytes, "0" * 64, True)
    (directory / INDEX).write_bytes(anchor_index(1, tensors, weight_map, (shard, hostile)))
    with pytest.raises(DeltactlError):
        pull(LocalBucket(tmp_path / "bucket"), dest)


def test_a_single_file_anchor_that_is_another_step_is_not_pulled(
    tmp_path: Path, dest: Path
) -> None:
    bucket = make_chain(tmp_path, STEPS[:1], shards=0)
    os.rename(Path(bucket.url, anchor_file_name(1)), Path(bucket.url, anchor_file_name(2)))
    with pytest.raises(Malformed, match="another step"):
        pull(bucket, dest)
    assert_nothing_came(dest)


def test_two_who_pull_into_one_directory_at_once(tmp_path: Path, six_steps: Path) -> None:
    """Whoever is last, it is one step whole."""
    bucket = LocalBucket(six_steps)
    for turn in range(10):
        dest = tmp_path / str(turn)
        pull(bucket, dest, step=1 + turn % 4)
        (dest / "notes.txt").write_text("mine")
        with ThreadPoolExecutor(2) as pool:
            pulls = [pool.submit(pull, bucket, dest, step=step) for step in (5, 6)]
        reports = [done.result() for done in pulls]
        assert [report.step for report in reports] == [5, 6]
        assert read_tensors(dest) in (STEPS[4], STEPS[5])
        assert (dest / "notes.txt").exists()
    assert len(list(tmp_path.iterdir())) == 10


def test_one_who_looks_into_a_directory_that_another_is_removing(
    tmp_path: Path, six_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of the old one, which has been exchanged, lacks what is gone already."""
    bucket, dest = LocalBucket(six_steps), tmp_path / "dest"
    pull(bucket, dest, step=4)
    look, others = pull_module.look, [5]

    def torn(*args: Any) -> Any:
        while others:
            pull(bucket, dest, step=others.pop())
            raise NotFound("no weights in this directory", file=dest)
        return look(*args)

    monkeypatch.setattr(pull_module, "look", torn)
    report = pull(bucket, dest, step=6)
    assert (report.step, report.from_step) == (6, 5)
    monkeypatch.setattr(pull_module, "look", _gone)
    with pytest.raises(NotFound):  # where nobody has exchanged it, it is told
        pull(bucket, dest, step=6)


def _gone(*_: Any) -> Any:
    raise NotFound("no weights in this directory")


@pytest.mark.parametrize("at", ["fetched", "_open_checked", "open_checkpoint", "_write"])
@pytest.mark.parametrize("steps", [(5, 6), (6, 5)])
def test_one_who_looked_before_another_pulled(
    tmp_path: Path,
    six_steps: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    steps: tuple[int, int],
) -> None:
    """What was found to build on is gone."""
    bucket, dest, (mine, others) = LocalBucket(six_steps), tmp_path / "dest", steps
    pull(bucket, dest, step=4)
    (dest / "notes.txt").write_text("mine")
    going_on, between = getattr(pull_module, at), [others]

    def late(*args: Any, **kwargs: Any) -> Any:
        while between:
            pull(bucket, dest, step=between.pop())
        return going_on(*args, **kwargs)

    monkeypatch.setattr(pull_module, at, late)
    assert pull(bucket, dest, step=mine).step == mine
    assert read_tensors(dest) == STEPS[mine - 1]
    assert (dest / "notes.txt").read_text() == "mine"
    assert [*tmp_path.iterdir()] == [dest]


def test_others_who_never_stop(
    tmp_path: Path, six_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, dest = LocalBucket(six_steps), tmp_path / "dest"
    pull(bucket, dest, step=4)
    opening = pull_module.open_checkpoint

    def exchanged(path: Path) -> Any:
        if path == dest:
            shutil.copytree(dest, tmp_path / "copy")
            shutil.rmtree(dest)
            os.rename(tmp_path / "copy", dest)
        return opening(path)

    monkeypatch.setattr(pull_module, "open_checkpoint", exchanged)
    with pytest.raises(Transient, match="somebody else wrote") as caught:
        pull(bucket, dest, step=6)
    assert "one pull at a time" in str(caught.value.hint)
    assert read_tensors(dest) == STEPS[3]
