"""Fetching from a bucket that cannot be mapped: in ranges, checked on the way, gone on with."""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.chain.transfer import ranges as transfer_module
from deltactl.chain.transfer.ranges import Wanted
from deltactl.core.errors import Malformed, NotAllowed, NotFound, Transient, UsageError
from deltactl.core.progress import Meter, silent
from deltactl.files.downloads import download_place, kept_downloads
from deltactl.format.checker import Expected
from deltactl.format.delta import Delta
from deltactl.format.link_names import anchor_directory, anchor_file_name, delta_name
from deltactl.ops import pull as pull_module
from deltactl.ops.pull import PullReport, pull
from deltactl.ops.verify import verify_bucket
from tests.support.chains import Tensors, content, holds, make_chain, states, write
from tests.support.checkpoints import changed, flip_bit, random_tensor, read_tensors
from tests.support.crash import crashes
from tests.support.remote import RemoteBucket, cutting, dying, failing, flipping, meeting, vanished
from tests.support.trl_writer import write_chain

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PART = 1000


def big_states(count: int) -> list[Tensors]:
    """Two shards of many parts each."""
    state: Tensors = {
        f"layers.{n}.weight": random_tensor("BF16", (50, 60), seed=n) for n in range(6)
    }
    state["nothing"] = ("BF16", (0, 3), b"")
    found = [state]
    while len(found) < count:
        seed = len(found)
        state = {n: s if n == "nothing" else changed(s, 0.02, seed) for n, s in state.items()}
        found.append(state)
    return found


STEPS = big_states(4)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket of STEPS with an anchor at 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Path(make_chain(tmp_path_factory.mktemp("made"), STEPS).url)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bucket"))


@pytest.fixture(params=[PART, None], ids=["parts", "whole"])
def bucket(request: pytest.FixtureRequest, root: Path) -> RemoteBucket:
    return RemoteBucket(root, request.param)


@pytest.fixture
def parts(root: Path) -> RemoteBucket:
    return RemoteBucket(root, PART)


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "dest"


def unproven(name: str, size: int) -> Expected:
    """Of an object without digests."""
    return Expected(name, None, size, 0, lambda _: [])


def payload_bytes(bucket: LocalBucket) -> int:
    return sum(link.bytes for link in read_chain(bucket).links)


def assert_tidy(dest: Path) -> None:
    assert [path.name for path in dest.parent.iterdir()] == [dest.name]


def assert_nothing_visible(dest: Path) -> None:
    assert [path.name for path in dest.parent.iterdir()] == [download_place(dest).name]


def kept(dest: Path, pattern: str = "**/*") -> list[Path]:
    place = download_place(dest)
    return sorted(path for path in place.glob(pattern) if path.is_file() and path.name != "lock")


# In parts, many at once.


def test_in_parts_and_many_at_once(parts: RemoteBucket, dest: Path) -> None:
    chain = read_chain(parts)
    parts.forget()
    parts.faults = [meeting(parts)]
    report = pull_module.materialize(parts, chain, dest)
    assert holds(dest, STEPS[3])
    assert report.bytes_fetched == payload_bytes(LocalBucket(Path(parts.url)))
    assert report.bytes_resumed == 0
    assert {stop - start <= PART for _, start, stop in parts.reads} == {True}
    assert len({name for name, _, _ in parts.reads}) == 3 + 5, "deltas; index, shards and others"
    assert parts.most_at_once <= parts.jobs
    assert parts.fetches == []
    assert_tidy(dest)


def test_where_the_store_splits_for_itself(root: Path, dest: Path) -> None:
    whole = RemoteBucket(root, None)
    chain = read_chain(whole)
    whole.forget()
    report = pull_module.materialize(whole, chain, dest)
    assert holds(dest, STEPS[3])
    assert (whole.reads, len(whole.fetches)) == ([], 8)
    assert report.bytes_fetched == payload_bytes(LocalBucket(root))


def test_two_requests_are_under_way_at_once_for_one_object(
    parts: RemoteBucket, tmp_path: Path, dest: Path
) -> None:
    """Each read of the shard waits for another one of it."""
    shard = f"{anchor_directory(1)}/{SHARDS[0]}"
    barrier, first = threading.Barrier(2), []

    def meet(name: str, start: int, data: bytes) -> bytes:
        if name == shard and len(first) < 2 and len(data) == PART:
            first.append(start)
            barrier.wait(60)
        return data

    parts.faults = [meet]
    pull(parts, dest, step=1)
    assert len(set(first)) == 2


def test_progress_counts_the_bytes(bucket: RemoteBucket, dest: Path) -> None:
    calls: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "fetching":
            calls.append((done, total))

    pull(bucket, dest, progress=progress)
    total = payload_bytes(bucket)
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_server_that_gives_less_than_asked_is_asked_for_the_rest(
    parts: RemoteBucket, dest: Path
) -> None:
    chain = read_chain(parts)
    parts.faults = [lambda name, start, data: data[: max(1, len(data) // 3)]]
    report = pull_module.materialize(parts, chain, dest)
    assert holds(dest, STEPS[3])
    parts.faults = []
    assert report.bytes_fetched == payload_bytes(parts)


def test_what_is_checked_on_the_way_is_not_read_again(
    bucket: RemoteBucket, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("read a second time")

    for method in ("check_payload", "payload_faults"):
        monkeypatch.setattr(Delta, method, never)
    monkeypatch.setattr("deltactl.ops.pull.check_file", never)
    for module in ("ops.pull", "chain.check.payload"):
        monkeypatch.setattr(f"deltactl.{module}.faults_at", never)
    pull(bucket, dest)
    assert holds(dest, STEPS[3])
    assert verify_bucket(bucket, level="rebuild").ok


# Wrong bytes.


def offsets_of(path: Path) -> dict[str, int]:
    """Bytes of every kind in a safetensors file."""
    size = path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return {"length": 0, "high length": 6, "header": 40, "first": header, "last": size - 1}


@pytest.mark.parametrize("name", [delta_name(3), f"{anchor_directory(1)}/{SHARDS[1]}"])
@pytest.mark.parametrize("where", ["length", "high length", "header", "first", "last"])
def test_a_wrong_byte_on_the_way(
    bucket: RemoteBucket, root: Path, dest: Path, name: str, where: str
) -> None:
    """The header that the chain was read by was right."""
    chain = read_chain(bucket)
    bucket.faults = [flipping(name, offsets_of(root / name)[where])]
    with pytest.raises(Malformed) as caught:
        pull_module.materialize(bucket, chain, dest)
    error = caught.value
    assert error.file == name
    assert error.step == (3 if "deltas" in name else 1)
    assert error.expected
    assert error.found
    if "anchors" in name and where in ("first", "last"):
        assert error.tensor is not None
    assert list(dest.parent.iterdir()) == []


def test_a_wrong_byte_ends_the_transfer_early(root: Path, dest: Path) -> None:
    one = RemoteBucket(root, PART, jobs=1)
    chain = read_chain(one)
    one.forget()
    name = f"{anchor_directory(1)}/{SHARDS[0]}"
    one.faults = [flipping(name, offsets_of(root / name)["first"])]
    with pytest.raises(Malformed, match="tensor") as caught:
        pull_module.materialize(one, chain, dest, step=1)
    assert caught.value.tensor == "layers.0.weight"
    read = [start for asked, start, _ in one.reads if asked == name]
    tensor = 50 * 60 * 2
    assert tensor <= max(read) < tensor + 3 * PART < (root / name).stat().st_size


def test_an_object_of_another_size(bucket: RemoteBucket, dest: Path) -> None:
    chain = read_chain(bucket)
    name = f"{anchor_directory(1)}/{SHARDS[0]}"
    for fault in (cutting(name, 2500), lambda n, _, data: data + b"x" if n == name else data):
        bucket.faults = [fault]
        with pytest.raises(Malformed, match="size that it was listed with") as caught:
            pull_module.materialize(bucket, chain, dest)
        assert caught.value.file == name
        assert list(dest.parent.iterdir()) == []


def test_an_object_that_was_exchanged_for_another_sound_one(
    bucket: RemoteBucket, root: Path, dest: Path, tmp_path: Path
) -> None:
    """Between the listing and the fetching, by one of the same size."""
    other = big_states(2)
    other[1]["layers.0.weight"] = changed(other[0]["layers.0.weight"], 0.02, 99)
    make_chain(tmp_path / "other", other)
    chain = read_chain(bucket)
    index = f"{anchor_directory(1)}/model.safetensors.index.json"
    theirs = (tmp_path / "other/bucket" / delta_name(2)).read_bytes()
    mine = root / delta_name(2)
    mine.write_bytes(theirs[: mine.stat().st_size].ljust(mine.stat().st_size, b"\0"))
    with pytest.raises(Malformed):
        pull_module.materialize(bucket, chain, dest, step=2)
    flip_bit(root / index, 700)
    with pytest.raises(Malformed) as caught:
        pull_module.materialize(bucket, chain, dest, step=1)
    assert caught.value.file == index


# Gone on with.


def interrupted(bucket: RemoteBucket, dest: Path, after: int) -> int:
    """A pull that a dead bucket ends; returns how many bytes it had fetched."""
    before = len(bucket.reads), len(bucket.fetches)
    bucket.faults = [dying(after)]
    with pytest.raises(Transient, match="reset"):
        pull(bucket, dest)
    bucket.faults = []
    assert (len(bucket.reads), len(bucket.fetches)) > before
    return sum(path.stat().st_size for path in kept(dest) if path.suffix != ".parts")


@pytest.mark.parametrize("after", [4, 8, 20, 45])
def test_a_bucket_that_dies_in_the_middle(bucket: RemoteBucket, dest: Path, after: int) -> None:
    """Four reads are of headers."""
    interrupted(bucket, dest, after if bucket.part_bytes else min(after, 9))
    assert_nothing_visible(dest)
    total = payload_bytes(bucket)
    report = pull(bucket, dest)
    assert holds(dest, STEPS[3])
    assert report.bytes_fetched + report.bytes_resumed == total
    assert (report.bytes_resumed > 0) == (after > 4)
    assert_tidy(dest)


def test_only_what_is_missing_is_fetched(parts: RemoteBucket, dest: Path) -> None:
    interrupted(parts, dest, 40)
    chain = read_chain(parts)
    held = {path.name: path for path in kept(dest)}
    assert held
    parts.forget()
    report = pull_module.materialize(parts, chain, dest)
    fetched = sum(min(stop - start, PART) for _, start, stop in parts.reads)
    assert report.bytes_fetched <= fetched < payload_bytes(LocalBucket(Path(parts.url)))
    assert report.bytes_resumed > 0


def test_again_and_again(parts: RemoteBucket, dest: Path) -> None:
    """Each run gets a little further."""
    chain = read_chain(parts)
    total = payload_bytes(parts)
    runs = 0
    while True:
        runs += 1
        parts.faults = [dying(10)]
        try:
            report = pull_module.materialize(parts, chain, dest)
            break
        except Transient:
            assert runs < 20
    assert runs > 3
    assert report.bytes_fetched + report.bytes_resumed == total
    assert holds(dest, STEPS[3])
    assert_tidy(dest)


@pytest.mark.parametrize("which", ["partial", "whole", "journal"])
def test_what_was_kept_is_not_believed(parts: RemoteBucket, dest: Path, which: str) -> None:
    interrupted(parts, dest, 48)
    total = payload_bytes(parts)
    wholes = [p for p in kept(dest) if ".partial" not in p.parent.name]
    partials = [p for p in kept(dest) if ".partial" in p.parent.name and p.suffix != ".parts"]
    assert wholes
    assert partials
    for path in partials if which == "partial" else wholes if which == "whole" else []:
        if path.stat().st_size:
            flip_bit(path, path.stat().st_size // 3)
    if which == "journal":
        for path in kept(dest, "**/*.parts"):
            size = path.with_suffix("").stat().st_size
            lie = struct.pack("<6Q", 0, size, size, size + 5000, 1 << 60, 1 << 61)
            path.write_bytes(struct.pack("<4Q", 5, 3, 0, 0) + lie + b"torn")
            os.truncate(path.with_suffix(""), size // 2)
            os.truncate(path.with_suffix(""), size)
    report = pull(parts, dest)
    assert holds(dest, STEPS[3])
    assert report.bytes_fetched + report.bytes_resumed >= total
    if which != "journal":
        assert report.bytes_resumed < total - report.bytes_resumed or report.bytes_fetched > 0
    assert_tidy(dest)


def test_what_was_kept_wrong_and_is_wrong_again_is_malformed(root: Path, dest: Path) -> None:
    """It is fetched anew once, and no more."""
    one = RemoteBucket(root, PART, jobs=1)
    interrupted(one, dest, 18)
    (partial,) = [path for path in kept(dest) if (path.with_name(path.name + ".parts")).exists()]
    flip_bit(partial, 3000)
    chain = read_chain(one)
    one.forget()
    one.faults = [flipping("model-0000", 3000)]
    with pytest.raises(Malformed, match="tensor"):
        pull_module.materialize(one, chain, dest)
    asked = [start for name, start, _ in one.reads if "model-0000" in name]
    assert asked.count(3000) == 1
    assert asked.count(0) == 1


@pytest.mark.parametrize("error", [NotFound, NotAllowed, Transient, KeyboardInterrupt])
def test_what_may_pass_keeps_what_was_fetched(
    bucket: RemoteBucket, dest: Path, error: type[BaseException]
) -> None:
    chain = read_chain(bucket)
    bucket.faults = [dying(4, error=lambda: error("gone"))]  # type: ignore[arg-type, return-value]
    with pytest.raises(error):
        pull_module.materialize(bucket, chain, dest)
    assert kept(dest)
    assert_nothing_visible(dest)


def test_where_it_is_kept_is_told(bucket: RemoteBucket, dest: Path) -> None:
    bucket.faults = [dying(6)]
    with pytest.raises(Transient) as caught:
        pull(bucket, dest)
    assert str(caught.value.hint).endswith(f"kept in {download_place(dest)}")


def test_what_a_killed_process_fetched_as_a_whole_is_no_use(root: Path, dest: Path) -> None:
    whole = RemoteBucket(root, None)
    interrupted(whole, dest, 7)
    (directory, *_) = download_place(dest).glob("*.partial")
    (directory / "0123.new").write_bytes(b"half")
    whole.faults = [dying(0, on="deltas")]
    chain = read_chain(LocalBucket(root))
    with pytest.raises(Transient):
        pull_module.materialize(whole, chain, dest)
    assert not (directory / "0123.new").exists()


def test_a_vanished_object(bucket: RemoteBucket, dest: Path) -> None:
    chain = read_chain(bucket)
    bucket.faults = [vanished(delta_name(3))]
    with pytest.raises(NotFound) as caught:
        pull_module.materialize(bucket, chain, dest)
    assert caught.value.file == delta_name(3)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "copy_file_range"])
def test_a_full_disk_keeps_nothing(
    parts: RemoteBucket, dest: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, count = getattr(os, call), [0]

    def full(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > 1:
            raise OSError(28, "No space left on device")
        return function(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            pull(parts, dest)
    assert list(dest.parent.iterdir()) == []


def test_what_was_kept_for_another_step_or_chain_is_removed(
    parts: RemoteBucket, dest: Path, tmp_path: Path
) -> None:
    interrupted(parts, dest, 40)
    first = {path.parent for path in kept(dest)}
    other = RemoteBucket(Path(make_chain(tmp_path / "other", states(2)).url), PART)
    chain = read_chain(other)
    other.faults = [dying(3)]
    with pytest.raises(Transient):
        pull_module.materialize(other, chain, dest)
    assert first.isdisjoint({path.parent for path in kept(dest)})
    other.faults = []
    report = pull(other, dest)
    assert report.bytes_resumed > 0
    assert_tidy(dest)


def test_left_overs_go_where_nothing_is_to_be_done(parts: RemoteBucket, dest: Path) -> None:
    """As where a process was killed between its success and its tidying up."""
    pull(parts, dest)
    (download_place(dest) / "x").mkdir(parents=True)
    assert not pull(parts, dest).written
    assert_tidy(dest)


def test_two_pulls_do_not_share_what_is_kept(parts: RemoteBucket, dest: Path) -> None:
    interrupted(parts, dest, 40)
    was = {path: path.read_bytes() for path in kept(dest)}
    with kept_downloads(dest):
        report = pull(parts, dest)
        assert report.bytes_resumed == 0
        assert {path: path.read_bytes() for path in kept(dest)} == was
    assert_tidy(dest)


@pytest.mark.parametrize("there", ["file", "link", "other"])
def test_a_place_that_is_not_ours_is_not_used(
    parts: RemoteBucket, dest: Path, tmp_path: Path, there: str
) -> None:
    place = download_place(dest)
    (tmp_path / "elsewhere").mkdir()
    if there == "file":
        place.write_text("mine")
    elif there == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        os.chown(place, 12345, 12345)
    pull(parts, dest)
    assert holds(dest, STEPS[3])
    assert os.path.lexists(place)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The next pull goes on, and leaves nothing but the result."""
    bucket = make_chain(tmp_path, states(3), anchor_every=0)
    (tmp_path / "start").mkdir()
    resumed = []
    for place, call in crashes(tmp_path, "pull remote"):
        model = place / "model"
        visible = {path.name for path in place.iterdir()} - {download_place(model).name}
        assert visible <= {"model"} or all(name.endswith(".tmp") for name in visible - {"model"})
        report = pull(RemoteBucket(Path(bucket.url), 700), model)
        assert holds(model, states(3)[2]), call
        resumed.append(report.bytes_resumed)
        assert [path.name for path in place.iterdir()] == ["model"], call
    assert max(resumed) == payload_bytes(bucket)
    assert len(set(resumed)) > 8


def test_memory_is_bounded_by_the_parts_under_way(
    parts: RemoteBucket, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are there and wait for one before them are in the file, and nowhere else."""
    held, most, lock = 0, 0, threading.Lock()
    arrived = transfer_module._Object._arrived

    def watched(self: Any, start: int, data: bytes) -> None:
        nonlocal held, most
        with lock:
            held += len(data)
            most = max(most, held)
        arrived(self, start, data)
        with lock:
            held -= len(data)

    monkeypatch.setattr(transfer_module._Object, "_arrived", watched)
    pull(parts, dest)
    assert 0 < most <= parts.jobs * PART


# Anchors of one file, and what TRL wrote.


def test_an_anchor_of_one_file(tmp_path: Path, dest: Path) -> None:
    bucket = RemoteBucket(Path(make_chain(tmp_path, STEPS[:2], shards=0).url), PART)
    name = anchor_file_name(1)
    chain = read_chain(bucket)
    offset = offsets_of(Path(bucket.url, name))
    for where in ("header", "first", "last"):
        bucket.faults = [flipping(name, offset[where])]
        with pytest.raises(Malformed) as caught:
            pull_module.materialize(bucket, chain, dest)
        assert caught.value.file == name
        assert (caught.value.tensor is None) == (where == "header")
    bucket.faults = [dying(15)]
    with pytest.raises(Transient):
        pull_module.materialize(bucket, chain, dest)
    bucket.faults = []
    assert pull(bucket, dest).bytes_resumed > 0
    assert holds(dest, STEPS[1])


def test_what_has_no_digest_is_fetched_anew(tmp_path: Path, dest: Path) -> None:
    write_chain(tmp_path / "bucket", STEPS[:3], "raw", anchor_every=10)
    bucket = RemoteBucket(tmp_path / "bucket", PART)
    interrupted(bucket, dest, 30)
    report = pull(bucket, dest)
    assert (report.bytes_resumed, report.proven) == (0, False)
    assert report.bytes_fetched == payload_bytes(bucket)
    assert holds(dest, STEPS[2])
    assert_tidy(dest)


# Other callers.


def test_files_beside_the_weights_are_mended(bucket: RemoteBucket, dest: Path) -> None:
    pull(bucket, dest)
    (dest / "config.json").unlink()
    report = pull(bucket, dest)
    assert report.written
    assert report.bytes_fetched == (dest / "config.json").stat().st_size
    assert_tidy(dest)


def test_verify_fetches_every_byte_once(bucket: RemoteBucket) -> None:
    headers = verify_bucket(bucket, level="links")
    total = payload_bytes(bucket)
    for level in ("data", "rebuild"):
        bucket.forget()
        report = verify_bucket(bucket, level=level)
        assert report.ok
        assert report.bytes_read == headers.bytes_read + total
        assert report.requests == len(bucket.reads) + len(bucket.fetches) + bucket.lists


def test_verify_finds_every_fault(bucket: RemoteBucket, root: Path) -> None:
    shard = f"{anchor_directory(1)}/{SHARDS[0]}"
    offsets = offsets_of(root / shard)
    bucket.faults = [
        flipping(shard, offsets["first"]),
        flipping(shard, offsets["last"]),
        flipping(delta_name(2), offsets_of(root / delta_name(2))["last"]),
        flipping("config.json", 3),
    ]
    report = verify_bucket(bucket)
    found = {(row["step"], row["file"], row["tensor"]) for row in report.errors}
    assert found == {
        (1, shard, "layers.0.weight"),
        (1, shard, "layers.4.weight"),
        (1, f"{anchor_directory(1)}/config.json", None),
        (2, delta_name(2), None),
    }
    assert len(report.errors) == 4


def test_verify_tells_a_vanished_object_from_a_dead_bucket(bucket: RemoteBucket) -> None:
    name = f"{anchor_directory(1)}/{SHARDS[0]}"
    bucket.faults = [vanished(name)]
    report = verify_bucket(bucket)
    assert [(row["step"], row["file"]) for row in report.errors] == [(1, name)]
    bucket.faults = [failing(1, on=SHARDS[0])]
    with pytest.raises(Transient):
        verify_bucket(bucket)


@pytest.mark.parametrize("level", ["data", "rebuild"])
def test_verify_agrees_with_what_it_says_of_a_mapped_bucket(
    made: Path, tmp_path: Path, level: str
) -> None:
    damages: list[Callable[[Path], None]] = [
        lambda root: flip_bit(root / delta_name(3), (root / delta_name(3)).stat().st_size - 1),
        lambda root: flip_bit(root / anchor_directory(1) / SHARDS[1], 30),
        lambda root: flip_bit(root / anchor_directory(1) / SHARDS[1], -1 % 12000),
        lambda root: flip_bit(root / anchor_directory(1) / "config.json", 1),
        lambda root: flip_bit(root / anchor_directory(1) / SHARDS[0], 1),
    ]
    for number, damage in enumerate(damages):
        root = Path(shutil.copytree(made, tmp_path / f"{number}"))
        damage(root)
        here = verify_bucket(LocalBucket(root), level=level)
        there = verify_bucket(RemoteBucket(root, PART), level=level)
        keys = ("step", "file", "tensor")
        assert [[row[key] for key in keys] for row in there.errors] == [
            [row[key] for key in keys] for row in here.errors
        ]
        assert here.errors


def test_an_empty_aux_file(tmp_path: Path, dest: Path) -> None:
    source = write(tmp_path / "source", STEPS[0])
    for name in ("empty.txt", "also_empty.txt"):
        (source / name).touch()
    from deltactl.ops.push import push

    push(source, LocalBucket(tmp_path / "bucket"))
    report: PullReport = pull(RemoteBucket(tmp_path / "bucket", PART), dest)
    assert report.proven
    assert content(dest)["empty.txt"] == content(dest)["also_empty.txt"] == b""
    assert read_tensors(dest) == STEPS[0]
    (dest / "empty.txt").unlink()
    (dest / "also_empty.txt").unlink()
    assert pull(RemoteBucket(tmp_path / "bucket", PART), dest).step == 1
    assert (dest / "also_empty.txt").exists()


def test_a_huge_object_is_not_planned_in_advance(tmp_path: Path) -> None:
    """A store that lies about a size is found out by the first read past the end."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a").write_bytes(b"x" * 5000)
    bucket, place = RemoteBucket(tmp_path / "bucket", PART), tmp_path / "place"
    wanted = Wanted(unproven("a", 1 << 60), place / "a", place / "a.partial")
    with pytest.raises(Malformed, match="size"):
        transfer_module.transfer(bucket, [wanted], Meter(silent, "", 0), transfer_module.Tally())
    assert len(bucket.reads) < 20


def test_a_destination_that_cannot_be_exchanged_is_told_before_anything_is_fetched(
    parts: RemoteBucket, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest.mkdir()
    monkeypatch.chdir(dest)
    chain = read_chain(parts)
    parts.forget()
    with pytest.raises(UsageError, match="working directory"):
        pull_module.materialize(parts, chain, dest)
    assert (parts.reads, parts.fetches) == ([], [])


@pytest.mark.parametrize("method", ["begin", "_settle"])
def test_a_thread_that_comes_late_brings_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It was under way when another object failed, and goes on once all has been removed."""
    monkeypatch.setattr("deltactl.core.threads._GRACE", 0)
    arrived, removed, over = threading.Event(), threading.Event(), threading.Event()
    act = getattr(transfer_module._Object, method)

    def late(self: Any, *arguments: Any) -> None:
        if self._wanted.name != "late":
            act(self, *arguments)
            return
        arrived.set()
        assert removed.wait(60)
        try:
            act(self, *arguments)
        finally:
            over.set()

    def fails(name: str, start: int, data: bytes) -> bytes:
        if name == "fails":
            assert arrived.wait(60)
            raise Transient("gone")
        return data

    monkeypatch.setattr(transfer_module._Object, method, late)
    (tmp_path / "bucket").mkdir()
    for name in ("late", "fails"):
        (tmp_path / "bucket" / name).write_bytes(b"x" * 50)
    bucket, place = RemoteBucket(tmp_path / "bucket", PART), tmp_path / "place"
    bucket.faults = [fails]
    wanted = [
        Wanted(unproven(name, 50), place / name, place / f"{name}.partial")
        for name in ("late", "fails")
    ]
    with pytest.raises(Transient, match="gone"):
        transfer_module.transfer(bucket, wanted, Meter(silent, "", 0), transfer_module.Tally())
    if place.exists():
        shutil.rmtree(place)
    removed.set()
    assert over.wait(60)
    assert not place.exists()
