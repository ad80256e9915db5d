"""Pushing: what is written, what is left alone, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import Conflict, Malformed, NotFound, Transient, UsageError
from deltactl.files.cache import tip_cache
from deltactl.format.delta import open_delta
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.ops.diff import diff
from deltactl.ops.oddities import of_first
from deltactl.ops.pull import pull
from deltactl.ops.push import PushReport, push
from deltactl.ops.verify import verify_bucket
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
    write_torch,
)
from tests.support.checkpoints import flip_bit, read_tensors, write_hf_directory, write_safetensors
from tests.support.crash import crashes
from tests.support.flips import done_at_once
from tests.support.pushers import CONFLICT, THERE, WRITTEN, Turn, race


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket")


def cached_tip(bucket: LocalBucket) -> Path:
    with tip_cache(bucket.url) as path:
        return path


def names(bucket: LocalBucket) -> list[str]:
    return sorted(item.name for item in bucket.list())


def sizes(bucket: LocalBucket) -> dict[str, int]:
    return {item.name: item.size for item in bucket.list()}


def assert_whole(bucket: LocalBucket, steps: dict[int, Tensors], place: Path) -> None:
    """The chain has these steps, is proven, and gives their bits back."""
    report = verify_bucket(bucket, level="rebuild")
    assert report.ok, report.errors
    assert read_chain(bucket).steps == sorted(steps)
    for step, tensors in steps.items():
        shutil.rmtree(place, ignore_errors=True)
        pull(bucket, place, step=step)
        assert holds(place, tensors), step
    shutil.rmtree(place)


# The first push.


def test_the_first_push_of_a_directory_is_an_anchor_that_is_a_checkpoint(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    source = write(tmp_path / "source", first_state())
    (source / "optimizer.pt").write_bytes(b"not for others")
    (source / ".hidden").write_bytes(b"not for others")
    report = push(source, bucket)
    anchor = tmp_path / "bucket/anchors/step_000001"
    assert content(anchor).keys() == {
        *AUX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert holds(anchor, first_state())
    with open_checkpoint(anchor) as checkpoint:
        total, odd = checkpoint.total_elements, of_first(checkpoint)
    assert report == PushReport(
        step=1,
        kind="anchor",
        bytes=sum(sizes(bucket).values()),
        state=str(read_chain(bucket).state_at(1)),
        written=True,
        changed_elements=None,
        total_elements=total,
        dry_run=False,
        files=report.files,
        notes=odd,
    )
    assert sorted(report.files) == names(bucket)
    assert report.files[-1].endswith("index.json"), "what makes it visible comes last"


def test_the_first_push_of_a_file_is_an_anchor_of_one_file(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    report = push(write(tmp_path / "s.safetensors", first_state(), shards=0), bucket, step=7)
    assert names(bucket) == ["anchors/step_000007.safetensors"]
    assert (report.step, report.kind) == (7, "anchor")
    assert read_tensors(tmp_path / "bucket/anchors/step_000007.safetensors") == first_state()


@pytest.mark.parametrize("step", [None, 0, 3, 10, 999_999, 1_000_000])
def test_the_first_step(tmp_path: Path, bucket: LocalBucket, step: int | None) -> None:
    source = write(tmp_path / "source", first_state())
    assert push(source, bucket, step=step).step == (1 if step is None else step)
    later = write(tmp_path / "later", next_state(first_state(), 1))
    assert push(later, bucket).step == (2 if step is None else step + 1)
    assert verify_bucket(bucket, level="rebuild").ok


def test_a_torch_source(tmp_path: Path, bucket: LocalBucket) -> None:
    steps = states(3)
    for n, tensors in enumerate(steps, 1):
        push(write_torch(tmp_path / f"step_{n}", tensors), bucket)
    assert "anchors/step_000001/model.safetensors" in names(bucket)
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_every_layout_may_follow_on_every_other(
    tmp_path: Path, bucket: LocalBucket, shards: int
) -> None:
    steps = [*states(2), every_kind(first_state())]
    for n, tensors in enumerate(steps, 1):
        layout = [2, shards, 2][n - 1]
        name = f"step_{n}" if layout else f"step_{n}.safetensors"
        push(write(tmp_path / name, tensors, shards=layout), bucket, anchor_every=2)
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


# When an anchor is due.


@pytest.mark.parametrize(
    ("every", "steps", "anchors"),
    [
        (10, [1, 2, 9, 10, 11, 20], [1, 10, 20]),
        (10, [1, 8, 12, 13, 19, 25, 29], [1, 12, 25]),
        (3, [1, 2, 3, 4, 5, 6, 7], [1, 3, 6]),
        (1, [1, 2, 3], [1, 2, 3]),
        (0, [1, 10, 20, 300], [1]),
        (10, [10, 11, 20], [10, 20]),
        (10, [0, 1, 10], [0, 10]),
        (4, [7, 8, 9], [7, 8]),
    ],
)
def test_an_anchor_is_due_as_anchor_every_says(
    tmp_path: Path, bucket: LocalBucket, every: int, steps: list[int], anchors: list[int]
) -> None:
    found = states(len(steps))
    for step, source in zip(steps, write_steps(tmp_path, found, shards=1), strict=True):
        report = push(source, bucket, step=step, anchor_every=every)
        assert report.kind == ("anchor" if step in anchors else "delta")
        written = {name for name in sizes(bucket) if f"step_{step:06d}" in name}
        assert set(report.files) == written
        assert report.bytes == sum(sizes(bucket)[name] for name in written)
    chain = read_chain(bucket)
    assert sorted(chain.anchors) == anchors
    assert sorted(chain.deltas) == steps[1:], "an anchor's step has its delta too"
    assert_whole(bucket, dict(zip(steps, found, strict=True)), tmp_path / "pulled")


def test_what_the_headers_say(tmp_path: Path, bucket: LocalBucket) -> None:
    for step, source in zip([1, 4], write_steps(tmp_path, states(2)), strict=True):
        push(source, bucket, step=step, encoding="raw")
    header = read_chain(bucket).deltas[4].header
    assert header.metadata["model_version"] == "4"
    assert header.metadata["prev_model_version"] == "1"
    assert header.metadata["encoding"] == "raw"


# What is there already.


def test_the_same_step_again_is_left_alone(tmp_path: Path, bucket: LocalBucket) -> None:
    sources = write_steps(tmp_path, states(3))
    first = push_all(bucket, sources, anchor_every=2)
    other_shards = write(tmp_path / "other", states(3)[1], shards=1)
    was = content(tmp_path)
    for step in (3, 1, 2):
        again = push(sources[step - 1], bucket, step=step, anchor_every=2)
        assert (again.step, again.state) == (step, first[step - 1].state)
        assert (again.kind, again.written, again.bytes, again.files) == (
            first[step - 1].kind, False, 0, (),
        )  # fmt: skip
    assert not push(other_shards, bucket, step=2).written, "shards do not enter the state"
    assert not push(sources[1], bucket, step=2, anchor_every=1).written
    assert content(tmp_path) == was


def test_files_that_differ_from_the_newest_anchors_are_told(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    """Those of an older one do not count any more."""
    first, second, third = write_steps(tmp_path, states(3))
    push(first, bucket)
    (second / "config.json").write_text('{"model_type": "tiny", "vocab_size": 8}')
    assert push(second, bucket, anchor_every=2).left_behind == (), "the anchor has it"
    (third / "config.json").write_bytes((second / "config.json").read_bytes())
    assert push(third, bucket, dry_run=True).left_behind == ()
    (third / "config.json").write_bytes((first / "config.json").read_bytes())
    assert push(third, bucket).left_behind == ("config.json",)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_same_step_with_other_content_is_a_conflict(
    tmp_path: Path, bucket: LocalBucket, step: int
) -> None:
    push_all(bucket, write_steps(tmp_path, states(3)))
    other = write(tmp_path / "other", next_state(first_state(), 50))
    was = content(tmp_path)
    with pytest.raises(Conflict, match="other content") as caught:
        push(other, bucket, step=step)
    assert caught.value.step == step
    assert content(tmp_path) == was


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_step_that_is_not_above_the_tip_is_refused(
    tmp_path: Path, bucket: LocalBucket, step: int
) -> None:
    """The version only rises: a writer that starts again from 1 is told so."""
    for at, source in zip([1, 5, 7], write_steps(tmp_path, states(3)), strict=True):
        push(source, bucket, step=at)
    was = content(tmp_path)
    with pytest.raises(Conflict, match="not above the tip") as caught:
        push(write(tmp_path / "new", next_state(first_state(), 9)), bucket, step=step)
    assert "8" in str(caught.value.expected)
    shutil.rmtree(tmp_path / "new")
    assert content(tmp_path) == was


def test_an_unchanged_checkpoint_is_an_explicit_empty_link(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    source = write(tmp_path / "source", first_state())
    push(source, bucket)
    report = push(source, bucket, step=2)
    assert (report.step, report.kind, report.changed_elements, report.written) == (
        2, "delta", 0, True,
    )  # fmt: skip
    link = read_chain(bucket).deltas[2]
    assert link.base_state == link.result_state == report.state
    assert link.sparsity == 1.0
    assert push(source, bucket, step=10).kind == "anchor"
    assert_whole(bucket, dict.fromkeys([1, 2, 10], first_state()), tmp_path / "pulled")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("shards", [0, 1, 2])
def test_the_tip_again_without_a_step_writes_nothing(
    tmp_path: Path, bucket: LocalBucket, shards: int, dry_run: bool
) -> None:
    one, two = write_steps(tmp_path, states(2))
    push_all(bucket, [one, two])
    other_layout = write(tmp_path / "again.safetensors", states(2)[1], shards=shards)
    was = content(tmp_path)
    for base in (None, two):
        report = push(other_layout, bucket, base=base, dry_run=dry_run)
        assert (report.step, report.kind, report.written, report.files) == (2, "delta", False, ())
        assert content(tmp_path) == was


def test_the_tip_again_with_other_files_beside_it_says_so(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    source = write(tmp_path / "source", first_state())
    push(source, bucket)
    (source / "config.json").write_text('{"model_type": "tiny", "vocab_size": 8}')
    report = push(source, bucket)
    assert (report.written, report.left_behind) == (False, ("config.json",))


def test_the_tip_again_without_a_step_finishes_an_anchor_that_is_due(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    one, two = write_steps(tmp_path, states(2))
    push_all(bucket, [one, two], anchor_every=0)
    report = push(two, bucket, anchor_every=2)
    assert (report.step, report.kind, report.written) == (2, "anchor", True)
    assert not push(two, bucket, anchor_every=2).written
    assert_whole(bucket, dict(enumerate(states(2), 1)), tmp_path / "pulled")


@pytest.mark.parametrize("again", [{"anchor_every": 0}, {"anchor_every": 7}, {"dry_run": True}])
def test_an_anchor_is_finished_at_the_tip_and_where_one_is_due_alone(
    tmp_path: Path, bucket: LocalBucket, again: dict[str, Any]
) -> None:
    """For those below the tip nobody waits any more, whatever anchors are due."""
    sources = write_steps(tmp_path, states(4))
    push_all(bucket, sources, anchor_every=0)
    was = content(tmp_path)
    for step in (1, 2, 3):
        for every in (1, 2, 3):
            report = push(sources[step - 1], bucket, step=step, anchor_every=every)
            assert (report.written, report.files) == (False, ())
    assert not push(sources[3], bucket, step=4, **again).written
    assert content(tmp_path) == was
    report = push(sources[3], bucket, step=4, anchor_every=2)
    assert (report.kind, report.written) == ("anchor", True)


def test_what_comes_back_to_earlier_bits_is_a_change(tmp_path: Path, bucket: LocalBucket) -> None:
    """Deltas are against what was published last, not masks of what the last step touched."""
    one, two = states(2)
    three = {**one, "model.norm": next_state(every_kind(one), 5)["model.norm"]}
    steps = [one, two, three, one, two]
    push_all(bucket, write_steps(tmp_path, steps))
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


# The cached tip.


def lose(cached: Path, place: Path) -> None:
    shutil.rmtree(cached)


def tear(cached: Path, place: Path) -> None:
    shard = next(cached.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 3)


def flip(cached: Path, place: Path) -> None:
    shard = next(cached.glob("*.safetensors"))
    flip_bit(shard, shard.stat().st_size - 1)


def drop_a_shard(cached: Path, place: Path) -> None:
    next(cached.glob("*.safetensors")).unlink()


def earlier(cached: Path, place: Path) -> None:
    shutil.rmtree(cached)
    shutil.copytree(place / "step_1", cached)


def of_another_chain(cached: Path, place: Path) -> None:
    shutil.rmtree(cached)
    other = make_chain(place / "elsewhere", [every_kind(first_state())])
    shutil.copytree(cached_tip(other), cached)


def make_empty(cached: Path, place: Path) -> None:
    shutil.rmtree(cached)
    cached.mkdir()


def make_a_file(cached: Path, place: Path) -> None:
    shutil.rmtree(cached)
    cached.write_bytes(b"junk")


def make_junk(cached: Path, place: Path) -> None:
    shutil.rmtree(cached)
    cached.mkdir()
    (cached / "junk").write_bytes(b"junk")


def nothing(cached: Path, place: Path) -> None:
    pass


@pytest.mark.parametrize(
    "spoil",
    [
        nothing, lose, tear, flip, drop_a_shard, earlier, of_another_chain, make_empty,
        make_a_file, make_junk,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shards", [0, 2])
def test_whatever_the_cache_holds_the_delta_is_against_the_tip(
    tmp_path: Path, bucket: LocalBucket, spoil: Any, shards: int
) -> None:
    steps = states(4)
    sources = write_steps(tmp_path, steps, shards)
    if shards == 0 and spoil is earlier:
        write(tmp_path / "step_1", steps[0], shards=1)
    push_all(bucket, sources[:3], anchor_every=0)
    assert holds(cached_tip(bucket), steps[2])
    spoil(cached_tip(bucket), tmp_path)
    report = push(sources[3], bucket)
    assert report.changed_elements is not None
    assert 0 < report.changed_elements < 50
    assert holds(cached_tip(bucket), steps[3])
    assert {path.name for path in cached_tip(bucket).parent.iterdir()} == {"lock", "tip", "url"}
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


def test_a_bucket_that_was_begun_anew_is_not_diffed_against_the_old_tip(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    steps = states(3)
    sources = write_steps(tmp_path, steps)
    push_all(bucket, sources)
    shutil.rmtree(tmp_path / "bucket")
    push(sources[2], bucket)
    push(sources[0], bucket)
    assert_whole(bucket, {1: steps[2], 2: steps[0]}, tmp_path / "pulled")


def test_a_base_at_hand_is_used_and_checked(tmp_path: Path, bucket: LocalBucket) -> None:
    steps = states(4)
    sources = write_steps(tmp_path, steps)
    push(sources[0], bucket, base=None)
    shutil.rmtree(cached_tip(bucket))
    push(sources[1], bucket, base=sources[0])
    assert not cached_tip(bucket).exists(), "with a base at hand no copy is kept"
    was = content(tmp_path)
    with pytest.raises(Conflict, match="not the chain's tip") as caught:
        push(sources[2], bucket, base=sources[0])
    assert caught.value.file == str(sources[0])
    with pytest.raises(NotFound):
        push(sources[2], bucket, base=tmp_path / "nothing")
    assert content(tmp_path) == was
    push(sources[2], bucket, base=sources[1])
    push(sources[3], bucket)
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


def test_a_base_of_another_chain_does_not_begin_one(tmp_path: Path, bucket: LocalBucket) -> None:
    one, two = write_steps(tmp_path, states(2))
    assert push(two, bucket, base=one).kind == "anchor"


# A dry run.


@pytest.mark.parametrize("there", [0, 1, 2])
@pytest.mark.parametrize("step", [None, 10])
def test_a_dry_run_says_what_a_push_would_do_and_does_nothing(
    tmp_path: Path, bucket: LocalBucket, there: int, step: int | None
) -> None:
    sources = write_steps(tmp_path, states(3))
    push_all(bucket, sources[:there])
    was = content(tmp_path)
    said = push(sources[there], bucket, step=step, dry_run=True)
    assert content(tmp_path) == was
    assert (tmp_path / "bucket").exists() == (there > 0)
    done = push(sources[there], bucket, step=step)
    for key in ("step", "kind", "state", "written", "changed_elements", "total_elements"):
        assert getattr(said, key) == getattr(done, key), key
    assert (said.dry_run, done.dry_run) == (True, False)
    if done.kind == "delta":
        assert (said.bytes, said.files) == (done.bytes, done.files)
    else:
        assert abs(said.bytes - done.bytes) < 5000, "an estimate: headers are not counted"


def test_a_dry_run_refuses_what_a_push_would(tmp_path: Path, bucket: LocalBucket) -> None:
    sources = write_steps(tmp_path, states(3))
    push_all(bucket, sources[:2])
    with pytest.raises(Conflict):
        push(sources[2], bucket, step=2, dry_run=True)
    assert not push(sources[1], bucket, step=2, dry_run=True).written


# A delta.


def make_delta(path: Path, base: Path, result: Path, step: int | None = None) -> Path:
    with open_checkpoint(base) as a, open_checkpoint(result) as b:
        diff(a, b, path, step=step)
    return path


@pytest.mark.parametrize(
    ("in_header", "asked", "step", "kind"),
    [
        (None, None, 2, "delta"),
        (5, None, 5, "delta"),
        (5, 6, 6, "delta"),
        (None, 7, 7, "delta"),
        (10, None, 10, "anchor"),
        (None, 12, 12, "anchor"),
    ],
)
def test_a_delta_is_pushed(
    tmp_path: Path,
    bucket: LocalBucket,
    in_header: int | None,
    asked: int | None,
    step: int,
    kind: str,
) -> None:
    steps = [first_state(), every_kind(first_state())]
    one, two = write_steps(tmp_path, steps)
    push(one, bucket)
    delta = make_delta(tmp_path / "delta.safetensors", one, two, in_header)
    said = push(delta, bucket, step=asked, dry_run=True)
    assert names(bucket) == [name for name in names(bucket) if "000001" in name]
    report = push(delta, bucket, step=asked)
    assert (report.step, report.kind, report.written) == (step, kind, True)
    assert (said.step, said.kind, said.state) == (step, kind, report.state)
    assert set(report.files) == {name for name in names(bucket) if f"{step:06d}" in name}
    header = read_chain(bucket).deltas[step].header
    assert header.metadata["model_version"] == str(step)
    assert header.metadata["prev_model_version"] == "1"
    if kind == "anchor":
        anchor = content(tmp_path / f"bucket/anchors/step_{step:06d}")
        assert {name: anchor[name] for name in AUX} == AUX, "the config travels on"
    again = push(delta, bucket, step=step)
    assert (again.written, again.state) == (False, report.state)
    assert_whole(bucket, {1: steps[0], step: steps[1]}, tmp_path / "pulled")


@pytest.mark.parametrize("source", ["", DELTA_INDEX], ids=["directory", "index"])
def test_a_delta_of_several_files_is_told_where_to_go(
    tmp_path: Path, bucket: LocalBucket, source: str
) -> None:
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / DELTA_INDEX).write_text("{}")
    with pytest.raises(UsageError, match="several files is not pushed") as refused:
        push(tmp_path / "delta" / source, bucket)
    assert refused.value.hint == "deltactl copy SOURCE DEST"


def test_a_delta_and_checkpoints_take_turns(tmp_path: Path, bucket: LocalBucket) -> None:
    steps = states(5)
    sources = write_steps(tmp_path, steps)
    push_all(bucket, sources[:2])
    for n in (2, 3):
        push(make_delta(tmp_path / f"{n}.safetensors", sources[n - 1], sources[n]), bucket)
    push(sources[4], bucket)
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


def test_deltas_that_are_refused(tmp_path: Path, bucket: LocalBucket) -> None:
    one, two, three, four = write_steps(tmp_path, states(4))
    onto_two = make_delta(tmp_path / "23.safetensors", two, three)
    with pytest.raises(Conflict, match="chain is empty"):
        push(onto_two, bucket)
    push(one, bucket)
    was = content(tmp_path)
    with pytest.raises(Conflict, match="not the chain's tip"):
        push(onto_two, bucket)
    with pytest.raises(Conflict, match="other content"):
        push(onto_two, bucket, step=1)
    with pytest.raises(UsageError, match="names its own"):
        push(onto_two, bucket, base=two)
    torn = Path(shutil.copy(onto_two, tmp_path / "torn.safetensors"))
    flip_bit(torn, torn.stat().st_size - 1)
    with pytest.raises(Malformed):
        push(torn, bucket)
    torn.unlink()
    assert content(tmp_path) == was
    push(two, bucket)
    with pytest.raises(Conflict, match="other content"):
        push(make_delta(tmp_path / "14.safetensors", one, four), bucket, step=2)


def test_a_delta_of_trl_cannot_be_proven_so_it_is_not_pushed(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    push(write(tmp_path / "source", first_state()), bucket)
    tensors = {"w.indices": ("I32", (1,), bytes(4)), "w.values": ("BF16", (1,), bytes(2))}
    metadata = {"format": "sparse_weight_patch", "sparse": "True", "model_version": "2"}
    delta = write_safetensors(tmp_path / "trl.safetensors", tensors, metadata)
    with pytest.raises(UsageError, match="name their base and result"):
        push(delta, bucket)


# What makes no sense, and what cannot be read.


def test_requests_that_make_no_sense(tmp_path: Path, bucket: LocalBucket) -> None:
    source = write(tmp_path / "source", first_state())
    options: list[dict[str, Any]] = [{"step": -1}, {"anchor_every": -1}, {"encoding": "zip"}]
    for option in options:
        with pytest.raises(UsageError):
            push(source, bucket, **option)
    with pytest.raises(NotFound):
        push(tmp_path / "nothing", bucket)
    assert not (tmp_path / "bucket").exists()


def test_a_source_that_is_incomplete_is_refused(tmp_path: Path, bucket: LocalBucket) -> None:
    """An anchor is complete, or it is none."""
    source = write(tmp_path / "source", first_state())
    next(source.glob("*.safetensors")).unlink()
    with pytest.raises(Malformed, match="missing"):
        push(source, bucket)
    assert not (tmp_path / "bucket").exists()


def test_onto_a_broken_chain_nothing_is_put(tmp_path: Path) -> None:
    def delete(bucket: Path) -> None:
        (bucket / "deltas/step_000003.safetensors").unlink()

    def damage(bucket: Path) -> None:
        flip_bit(bucket / "deltas/step_000002.safetensors", 100)

    def swap(bucket: Path) -> None:
        shutil.copy(tmp_path / "elsewhere.safetensors", bucket / "deltas/step_000004.safetensors")

    other = make_chain(tmp_path / "other", [every_kind(first_state()), *states(3)])
    shutil.copy(other.path("deltas/step_000004.safetensors"), tmp_path / "elsewhere.safetensors")
    new = write(tmp_path / "new", next_state(first_state(), 60))
    for n, spoil in enumerate((delete, damage, swap)):
        bucket = make_chain(tmp_path / str(n), states(4))
        spoil(Path(bucket.url))
        was = content(Path(bucket.url))
        with pytest.raises(Conflict, match="chain is damaged") as caught:
            push(new, bucket)
        assert "verify" in str(caught.value.hint)
        assert content(Path(bucket.url)) == was


def test_a_newer_anchor_mends_the_way_for_those_who_come_after(tmp_path: Path) -> None:
    bucket = make_chain(tmp_path, states(4), anchor_every=4)
    bucket.delete("deltas/step_000002.safetensors")
    push(write(tmp_path / "new", next_state(first_state(), 60)), bucket)
    pull(bucket, tmp_path / "pulled")
    assert holds(tmp_path / "pulled", next_state(first_state(), 60))
    assert not verify_bucket(bucket).ok


# What goes wrong on the way.


class Faulty(LocalBucket):
    """Fails to put what has ``word`` in its name."""

    def __init__(self, root: Path, word: str) -> None:
        super().__init__(root)
        self._word = word

    def put(self, name: str, source: Path) -> bool:
        if self._word in name:
            raise Transient("the server is busy", file=name)
        return super().put(name, source)


@pytest.mark.parametrize("word", ["deltas/", "model-00002", "config.json", "index.json"])
def test_a_push_that_failed_changed_nothing_that_the_next_one_builds_on(
    tmp_path: Path, bucket: LocalBucket, word: str
) -> None:
    """The cached tip moves on only when the link is in the bucket."""
    steps = states(3)
    sources = write_steps(tmp_path, steps)
    push(sources[0], bucket)
    with pytest.raises(Transient):
        push(sources[1], Faulty(tmp_path / "bucket", word), step=2, anchor_every=2)
    report = verify_bucket(bucket, level="rebuild")
    assert report.ok
    assert 2 not in read_chain(bucket).anchors
    if word == "deltas/":
        assert holds(cached_tip(bucket), steps[0])
        sources[1] = write(tmp_path / "another", steps[2])
        steps[1] = steps[2]
    again = push(sources[1], bucket, step=2, anchor_every=2)
    assert (again.written, again.kind) == (True, "anchor")
    push(sources[2], bucket, step=3)
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


@pytest.mark.parametrize("step", [2, 10])
def test_a_source_that_changes_while_it_is_pushed(
    tmp_path: Path, bucket: LocalBucket, step: int
) -> None:
    steps = states(3)
    one, two = write_steps(tmp_path, steps[:2])
    push(one, bucket)

    def change(what: str, done: int, total: int) -> None:
        if what == "writing" and not done:  # after it was compared, before it is copied
            for file in write(tmp_path / "step_3", steps[2]).glob("*.safetensors"):
                (two / file.name).write_bytes(file.read_bytes())

    with pytest.raises(Malformed, match="changed while it was pushed"):
        push(two, bucket, step=step, progress=change)
    assert_whole(bucket, {1: steps[0]}, tmp_path / "pulled")  # not even the delta was put
    push(two, bucket, step=step)
    assert_whole(bucket, {1: steps[0], step: steps[2]}, tmp_path / "pulled")


@pytest.mark.parametrize("call", ["pwrite", "copy_file_range", "ftruncate"])
def test_a_full_disk(
    tmp_path: Path, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Of the cache or of the bucket: the chain stays whole, and nothing is left behind."""
    steps = states(2)
    one, two = write_steps(tmp_path, steps)
    push(one, bucket)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            push(two, bucket, step=2, anchor_every=2)
    assert verify_bucket(bucket).ok
    hidden = [name for name in content(tmp_path / "bucket") if "/." in name]
    assert hidden == []
    assert {path.name for path in cached_tip(bucket).parent.iterdir()} == {"lock", "tip", "url"}
    assert push(two, bucket, step=2, anchor_every=2).kind == "anchor"
    assert_whole(bucket, dict(enumerate(steps, 1)), tmp_path / "pulled")


def unfinished(bucket: LocalBucket, source: Path) -> None:
    """What a push leaves that dies before the last object of an anchor."""
    with pytest.raises(Transient):
        push(source, Faulty(Path(bucket.url), "index.json"), step=1)


def test_an_unfinished_anchor_is_no_link_and_is_finished_by_the_same_content(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    source = write(tmp_path / "source", first_state())
    unfinished(bucket, source)
    assert len(names(bucket)) == 4
    assert read_chain(bucket).links == ()
    with pytest.raises(NotFound):
        verify_bucket(bucket)
    with pytest.raises(NotFound):
        pull(bucket, tmp_path / "pulled")
    assert push(source, bucket).written
    assert_whole(bucket, {1: first_state()}, tmp_path / "pulled")


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_an_unfinished_anchor_of_other_content_is_in_the_way(
    tmp_path: Path, bucket: LocalBucket, shards: int
) -> None:
    """Or in other shards: one too many could be taken for one of the anchor's."""
    unfinished(bucket, write(tmp_path / "source", first_state(), shards=shards))
    was = content(Path(bucket.url))
    other = write(tmp_path / "other", next_state(first_state(), 3))
    with pytest.raises(Conflict, match="link of other content") as caught:
        push(other, bucket)
    assert "anchors/step_000001" in str(caught.value.hint)
    assert content(Path(bucket.url)) == was
    shutil.rmtree(tmp_path / "bucket/anchors/step_000001")
    push(other, bucket)
    assert_whole(bucket, {1: next_state(first_state(), 3)}, tmp_path / "pulled")


def test_killed_at_any_moment_the_chain_is_whole_and_the_next_push_goes_on(
    tmp_path: Path, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = states(3)
    one, two, three = write_steps(tmp_path / "steps", steps)
    start = tmp_path / "start"
    monkeypatch.setenv("DELTACTL_CACHE", str(start / "cache"))
    push(one, LocalBucket(start / "bucket"))
    two.rename(tmp_path / "source")
    found = crashes(tmp_path, "push")
    assert {"pwrite", "link", "unlink", "copy_file_range"} <= {call for _, call in found}
    seen = set()
    with done_at_once():
        for place, call in found:
            monkeypatch.setenv("DELTACTL_CACHE", str(place / "cache"))
            bucket = LocalBucket(place / "bucket")
            report = verify_bucket(bucket)
            assert report.ok, (call, report.errors)
            seen.add(report.links)
            again = push(tmp_path / "source", bucket, step=2, anchor_every=2)
            assert (again.written, again.kind) == (report.links < 3, "anchor"), call
            push(three, bucket)
            chain = read_chain(bucket)
            assert [(link.step, link.kind) for link in chain.links] == [
                (1, "anchor"), (2, "delta"), (2, "anchor"), (3, "delta"),
            ]  # fmt: skip
            report = verify_bucket(bucket, level="rebuild")
            assert report.ok, (call, report.errors)
            left = [path.name for path in cached_tip(bucket).parent.iterdir()]
            assert sorted(left) == ["lock", "tip", "url"], call
    assert seen == {1, 2, 3}


# Two at once.


def test_two_who_push_one_step_at_once(tmp_path: Path) -> None:
    """With caches of their own, as on two machines: exactly one is published, twenty times."""
    bucket = tmp_path / "bucket"
    base = first_state()
    push(write(tmp_path / "base", base), LocalBucket(bucket))
    rivals: list[list[Turn]] = []
    content: dict[tuple[int, int], Tensors] = {}
    for step in range(2, 22):
        row = []
        for n in range(2):
            content[step, n] = next_state(base, 100 * n + step)
            source = write(tmp_path / f"{step}_{n}", content[step, n])
            row.append(Turn(source, str(bucket), step))
        rivals.append(row)
    found = race(tmp_path / "caches", rivals)
    assert all(sorted(outcome) == [CONFLICT, WRITTEN] for outcome in found), repr(found)
    truth = {n: content[n, row.index(WRITTEN)] for n, row in enumerate(found, 2)}
    assert_whole(LocalBucket(bucket), {1: base, **truth}, tmp_path / "pulled")


@pytest.mark.parametrize("layouts", [(2, 2), (1, 2), (2, 3), (0, 0)])
def test_two_who_begin_one_chain_at_once(tmp_path: Path, layouts: tuple[int, int]) -> None:
    turns = []
    steps = states(2)
    for n in range(5):
        sources = [
            write(tmp_path / f"{n}_{i}{'' if k else '.safetensors'}", steps[i], shards=k)
            for i, k in enumerate(layouts)
        ]
        turns.append([Turn(source, str(tmp_path / f"bucket_{n}"), 1) for source in sources])
    found = race(tmp_path / "caches", turns)
    for n, outcome in enumerate(found):
        assert sorted(outcome) == [CONFLICT, WRITTEN], found
        bucket = LocalBucket(tmp_path / f"bucket_{n}")
        assert_whole(bucket, {1: steps[outcome.index(WRITTEN)]}, tmp_path / "pulled")


def test_two_who_push_the_same_at_once(tmp_path: Path) -> None:
    steps = states(8)
    sources = write_steps(tmp_path, steps)
    turns = [
        [Turn(source, str(tmp_path / "bucket"), step)] * 2 for step, source in enumerate(sources, 1)
    ]
    found = race(tmp_path / "caches", turns)
    # Step 7 is two objects, its delta and its anchor: each of the two may have written one.
    either = [[THERE, WRITTEN], [WRITTEN, WRITTEN]]
    for step, outcome in enumerate(found, 1):
        assert sorted(outcome) in (either if step == 7 else either[:1]), (step, outcome)
    assert_whole(LocalBucket(tmp_path / "bucket"), dict(enumerate(steps, 1)), tmp_path / "pulled")


def test_what_is_lost_to_another_with_the_same_content_was_not_written(
    tmp_path: Path, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_steps(tmp_path, states(2))
    push(one, bucket)
    put = LocalBucket.put

    def overtaken(self: LocalBucket, name: str, source: Path) -> bool:
        put(self, name, source)
        return put(self, name, source)

    monkeypatch.setattr(LocalBucket, "put", overtaken)
    assert not push(two, bucket).written
    assert open_delta(tmp_path / "bucket/deltas/step_000002.safetensors").header.step == 2


def test_an_unused_file_of_a_lost_race_does_not_disturb_readers(tmp_path: Path) -> None:
    """Its pusher may have died before it could see that it had lost."""
    bucket = make_chain(tmp_path, states(3))
    stray = {"stray": first_state()["model.embed"]}
    write_safetensors(tmp_path / "bucket/anchors/step_000001/model.safetensors", stray)
    write_hf_directory(tmp_path / "bucket/anchors/step_000001", stray, shards=1)
    assert_whole(bucket, dict(enumerate(states(3), 1)), tmp_path / "pulled")


def test_auto_publishes_in_the_encoding_that_is_advised(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    """At a byte a second that is the smallest."""
    first, second = write_steps(tmp_path, states(2))
    anchor = push(first, bucket, encoding="auto")
    assert (anchor.encoding, anchor.advice) == (None, None)
    report = push(second, bucket, encoding="auto", bandwidth=1)
    assert report.advice is not None
    smallest = min(report.advice.estimates, key=lambda estimate: estimate.bytes)
    assert report.encoding == report.advice.encoding == smallest.encoding
    bucket.fetch("deltas/step_000002.safetensors", tmp_path / "delta")
    assert open_delta(tmp_path / "delta").header.encoding == report.encoding
    pull(bucket, tmp_path / "pulled")
    assert holds(tmp_path / "pulled", states(2)[1])
