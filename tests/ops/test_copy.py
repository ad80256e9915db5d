"""Chains from bucket to bucket: byte for byte, sound at every moment, all of it proven."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Conflict, Malformed, NotFound, Transient, UsageError
from deltactl.format.link_names import anchor_directory, delta_name
from deltactl.ops.copy import CopyReport, copy_chain
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support.chains import content, every_kind, first_state, holds, make_chain, states, write
from tests.support.checkpoints import flip_bit
from tests.support.crash import crashes
from tests.support.flips import done_at_once
from tests.support.remote import RemoteBucket, dying, flipping
from tests.support.trl_writer import write_chain

STEPS = states(6)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket of STEPS with anchors at 1 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Path(make_chain(tmp_path_factory.mktemp("made"), STEPS, anchor_every=4).url)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "source"))


@pytest.fixture
def source(root: Path) -> LocalBucket:
    return LocalBucket(root)


@pytest.fixture
def dest(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "dest")


def names(bucket: LocalBucket) -> list[str]:
    return [link.name for link in read_chain(bucket).links]


def of(bucket: LocalBucket) -> dict[str, bytes]:
    return content(Path(bucket.url))


@pytest.mark.parametrize("there", [LocalBucket, RemoteBucket])
@pytest.mark.parametrize("here", [LocalBucket, RemoteBucket])
def test_a_chain_byte_for_byte(
    root: Path, tmp_path: Path, here: type[LocalBucket], there: type[LocalBucket]
) -> None:
    source, dest = here(root), there(tmp_path / "dest")
    total = sum(link.bytes for link in read_chain(source).links)
    report = copy_chain(source, dest)
    assert of(dest) == of(source)
    assert report == CopyReport(7, 7, 0, total, 1, 6, 6, True, False)
    assert verify_bucket(LocalBucket(tmp_path / "dest"), level="rebuild").ok
    pull(dest, tmp_path / "pulled", step=6)
    assert holds(tmp_path / "pulled", STEPS[5])


class Watched(LocalBucket):
    """After each object that is put, what is there is a chain without a fault, or none yet."""

    puts: list[str]

    def put(self, name: str, path: Path) -> bool:
        created = super().put(name, path)
        self.puts.append(name)
        if read_chain(self).links:
            report = verify_bucket(LocalBucket(Path(self.url)), level="rebuild")
            assert report.ok, (name, report.errors)
        return created


def test_the_destination_is_a_sound_chain_at_every_moment(
    source: LocalBucket, tmp_path: Path
) -> None:
    dest = Watched(tmp_path / "dest", jobs=1)
    dest.puts = []
    copy_chain(source, dest)
    assert dest.puts[-3:] == [f"{anchor_directory(4)}/{INDEX}", delta_name(5), delta_name(6)]
    assert [name for name in dest.puts if name in names(source)] == names(source)


def test_a_second_time_there_is_nothing_to_do(source: LocalBucket, dest: LocalBucket) -> None:
    copy_chain(source, dest)
    was = of(dest)
    remote = RemoteBucket(Path(source.url))
    report = copy_chain(remote, dest)
    assert (report.copied, report.skipped, report.bytes) == (0, 7, 0)
    assert of(dest) == was
    assert {start for _, start, _ in remote.reads} == {0}, "only headers"


def test_following_a_chain_that_grows(source: LocalBucket, dest: LocalBucket, root: Path) -> None:
    aside = root.parent / "aside"
    for step in (6, 5):
        shutil.move(root / delta_name(step), aside.with_name(f"{step}"))
    assert copy_chain(source, dest).tip == 4
    for step in (5, 6):
        shutil.move(aside.with_name(f"{step}"), root / delta_name(step))
        report = copy_chain(source, dest)
        assert (report.copied, report.skipped, report.tip) == (1, step, step)
    assert of(dest) == of(source)


@pytest.mark.parametrize(
    ("step", "first", "count"),
    [(0, None, 0), (1, 1, 7), (3, 1, 7), (4, 4, 3), (5, 4, 3), (99, 4, 3)],
)
def test_from_a_step(
    source: LocalBucket, dest: LocalBucket, tmp_path: Path, step: int, first: int, count: int
) -> None:
    if first is None:
        with pytest.raises(NotFound, match="no anchor") as caught:
            copy_chain(source, dest, from_step=step)
        assert caught.value.found == "anchors at 1, 4"
        return
    report = copy_chain(source, dest, from_step=step)
    assert (report.first_step, report.last_step, report.links, report.copied) == (
        first, 6, count, count,
    )  # fmt: skip
    assert (delta_name(4) in names(dest)) == (first == 1), "its base would not be there"
    assert verify_bucket(dest, level="rebuild").ok
    pull(dest, tmp_path / "pulled")
    assert holds(tmp_path / "pulled", STEPS[5])
    assert copy_chain(source, dest, from_step=step).copied == 0


def test_the_older_part_later(source: LocalBucket, dest: LocalBucket) -> None:
    copy_chain(source, dest, from_step=4)
    report = copy_chain(source, dest)
    assert (report.copied, report.skipped) == (4, 3)
    assert of(dest) == of(source)


def test_a_source_that_forgot_its_beginning(source: LocalBucket, dest: LocalBucket) -> None:
    copy_chain(source, dest)
    for step in (2, 3, 4):
        source.delete(delta_name(step))
    shutil.rmtree(Path(source.url, anchor_directory(1)))
    report = copy_chain(source, dest)
    assert (report.links, report.copied, report.first_step) == (3, 0, 4)


def test_a_dry_run_does_nothing(source: LocalBucket, dest: LocalBucket) -> None:
    report = copy_chain(source, dest, dry_run=True)
    assert not Path(dest.url).exists()
    assert report == CopyReport(7, 7, 0, report.bytes, 1, 6, 6, True, True)
    real = copy_chain(source, dest)
    assert real.bytes == report.bytes
    assert copy_chain(source, dest, dry_run=True).copied == 0


def test_progress_ends(source: LocalBucket, dest: LocalBucket) -> None:
    for bucket, place in ((source, "a"), (RemoteBucket(Path(source.url)), "b")):
        calls: dict[str, list[tuple[int, int]]] = {}
        copy_chain(
            bucket,
            LocalBucket(Path(dest.url) / place),
            progress=lambda what, *row: calls.setdefault(what, []).append(row),  # noqa: B023
        )
        assert set(calls) == {"verifying", "copying"}
        for row in calls.values():
            assert row[-1][0] == row[-1][1] > 0


# What is refused.


def test_one_bucket(source: LocalBucket, root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    for a, b in [
        (root, root),
        (root, tmp_path / "link"),
        (root, root / "deltas"),
        (root / "anchors", root),
    ]:
        with pytest.raises(UsageError, match="one bucket"):
            copy_chain(LocalBucket(a), LocalBucket(b))


def test_no_chain(tmp_path: Path, dest: LocalBucket) -> None:
    with pytest.raises(NotFound, match="no such bucket"):
        copy_chain(LocalBucket(tmp_path / "none"), dest)
    (tmp_path / "none").mkdir()
    with pytest.raises(NotFound, match="no chain"):
        copy_chain(LocalBucket(tmp_path / "none"), dest)


def a_whole_other_chain(dest: LocalBucket, root: Path) -> None:
    make_chain(root.parent / "other", [every_kind(first_state())])
    shutil.copytree(root.parent / "other/bucket", dest.url)


def another_delta(dest: LocalBucket, root: Path) -> None:
    make_chain(root.parent / "other", [STEPS[0], STEPS[2]])
    shutil.copytree(root.parent / "other/bucket", dest.url)


def one_step_more(dest: LocalBucket, root: Path) -> None:
    copy_chain(LocalBucket(root), dest)
    push(write(root.parent / "more", states(7)[6]), dest)


def a_torn_delta(dest: LocalBucket, root: Path) -> None:
    copy_chain(LocalBucket(root), dest)
    os.truncate(Path(dest.url, delta_name(3)), 50)


def another_config(dest: LocalBucket, root: Path) -> None:
    source = write(root.parent / "other", STEPS[0])
    (source / "config.json").write_text("{}")
    push(source, dest)


@pytest.mark.parametrize(
    "there", [a_whole_other_chain, another_delta, one_step_more, a_torn_delta, another_config]
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_destination_that_does_not_agree(
    source: LocalBucket,
    dest: LocalBucket,
    root: Path,
    there: Callable[[LocalBucket, Path], None],
    dry_run: bool,
) -> None:
    there(dest, root)
    was = of(dest)
    with pytest.raises(Conflict) as caught:
        copy_chain(source, dest, dry_run=dry_run)
    assert caught.value.file in {item.name for item in dest.list()}
    assert of(dest) == was


def test_an_anchor_more_in_the_destination_is_fine(
    source: LocalBucket, dest: LocalBucket, root: Path
) -> None:
    """Of a state that the source has too."""
    copy_chain(source, dest)
    shutil.rmtree(root / anchor_directory(4))
    assert copy_chain(source, dest).copied == 0


@pytest.mark.parametrize("same", [True, False])
def test_an_unfinished_anchor(
    source: LocalBucket, dest: LocalBucket, root: Path, same: bool
) -> None:
    place = Path(dest.url, anchor_directory(1))
    shutil.copytree(root / anchor_directory(1), place)
    (place / INDEX).unlink()
    if same:
        assert copy_chain(source, dest).copied == 7
        assert of(dest) == of(source)
        return
    flip_bit(place / SHARDS[0], 900)
    with pytest.raises(Conflict, match="link of other content"):
        copy_chain(source, dest)
    assert names(dest) == []


@pytest.mark.parametrize("same", [True, False])
def test_somebody_who_is_faster(
    source: LocalBucket, tmp_path: Path, root: Path, same: bool
) -> None:
    class Raced(LocalBucket):
        def put(self, name: str, path: Path) -> bool:
            if name == delta_name(3):
                target = Path(self.url, name)
                shutil.copy(path, target)
                if not same:
                    flip_bit(target, 300)
            return super().put(name, path)

    dest = Raced(tmp_path / "dest")
    if same:
        report = copy_chain(source, dest)
        assert (report.copied, report.skipped) == (6, 1)
        return
    with pytest.raises(Conflict, match="other content") as caught:
        copy_chain(source, dest)
    assert caught.value.step == 3


# What is wrong with the source.


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("name", "offset", "before"),
    [
        (delta_name(3), 100, 2),
        (delta_name(3), -1, 2),
        (f"{anchor_directory(4)}/{SHARDS[1]}", -1, 4),
        (f"{anchor_directory(4)}/{SHARDS[0]}", 30, 4),
        (f"{anchor_directory(4)}/config.json", 2, 4),
        (f"{anchor_directory(4)}/{INDEX}", 500, 3),
        (f"{anchor_directory(1)}/{SHARDS[0]}", -1, 0),
    ],
)
def test_what_is_sound_before_a_fault_is_copied(
    root: Path, dest: LocalBucket, name: str, offset: int, before: int, remote: bool
) -> None:
    path = root / name
    flip_bit(path, offset % path.stat().st_size)
    source = RemoteBucket(root) if remote else LocalBucket(root)
    with pytest.raises(Malformed) as caught:
        copy_chain(source, dest)
    assert str(caught.value.file).endswith(name)
    assert caught.value.step == int(name.split("step_")[1][:6])
    assert str(caught.value.hint).startswith("deltactl ")
    assert len(names(dest) if before else []) == before
    if before:
        assert verify_bucket(dest, level="rebuild").ok
    else:
        assert not Path(dest.url).exists()


def test_a_gap_and_a_missing_anchor(source: LocalBucket, dest: LocalBucket, root: Path) -> None:
    source.delete(delta_name(3))
    with pytest.raises(Malformed) as caught:
        copy_chain(source, dest)
    assert caught.value.step == 4
    assert read_chain(dest).tip == 2
    assert copy_chain(source, dest, from_step=4).tip == 6
    shutil.rmtree(root / anchor_directory(1))
    with pytest.raises(Malformed, match="begins with a delta"):
        copy_chain(source, LocalBucket(root.parent / "elsewhere"))


def test_the_delta_of_the_anchor_that_a_chain_begins_with_is_left(
    tmp_path: Path, dest: LocalBucket
) -> None:
    """What it stands on was removed, and ``verify`` finds no fault with that."""
    source = make_chain(tmp_path / "cut", states(4), anchor_every=2)
    shutil.rmtree(Path(source.url, anchor_directory(1)))
    assert read_chain(source).links[0].name == delta_name(2)
    assert verify_bucket(source, level="rebuild").ok
    report = copy_chain(source, dest)
    assert (report.first_step, report.tip) == (2, 4)
    assert [link.name for link in read_chain(dest).links] == [
        link.name for link in read_chain(source).links[1:]
    ]
    assert verify_bucket(dest, level="rebuild").ok
    assert copy_chain(source, dest).copied == 0


def test_a_fault_before_where_it_begins_is_none(
    source: LocalBucket, dest: LocalBucket, root: Path
) -> None:
    for step in (2, 4):
        os.truncate(root / delta_name(step), 99)
    assert copy_chain(source, dest, from_step=5).tip == 6


def test_a_bit_that_is_wrong_on_the_way_is_not_put(root: Path, dest: LocalBucket) -> None:
    source = RemoteBucket(root)
    source.faults = [flipping(delta_name(5), (root / delta_name(5)).stat().st_size - 1)]
    with pytest.raises(Malformed):
        copy_chain(source, dest)
    assert read_chain(dest).tip == 4
    source.faults = []
    assert copy_chain(source, dest).copied == 2


def test_a_source_that_dies(root: Path, dest: LocalBucket) -> None:
    source = RemoteBucket(root, jobs=1)
    runs, after = 0, 12
    while True:
        source.faults = [dying(after)]
        try:
            copy_chain(source, dest)
            break
        except Transient:
            runs += 1
            after += 3
            assert not Path(dest.url).exists() or verify_bucket(dest, level="rebuild").ok
    assert runs > 1
    assert of(dest) == of(source)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    bucket = make_chain(tmp_path, STEPS[:3], anchor_every=2)
    (tmp_path / "start").mkdir()
    tips = set()
    for place, call in crashes(tmp_path, "copy"):
        dest = LocalBucket(place / "copy")
        with done_at_once():
            chain = read_chain(dest) if Path(dest.url).exists() else None
            if chain is not None and chain.links:
                assert verify_bucket(dest, level="rebuild").ok, call
                tips.add(chain.tip)
            copy_chain(bucket, dest)
        assert {n: d for n, d in of(dest).items() if not n.endswith(".tmp")} == of(bucket), call
    assert tips == {1, 2, 3}


# What TRL wrote.


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("dialect", ["trl-1", "raw", "gap_delta"])
def test_links_without_digests(
    tmp_path: Path, dest: LocalBucket, dialect: str, remote: bool
) -> None:
    write_chain(tmp_path / "trl", STEPS[:3], dialect, anchor_every=10)
    source = (RemoteBucket if remote else LocalBucket)(tmp_path / "trl")
    report = copy_chain(source, dest)
    assert (report.copied, report.proven, report.tip) == (report.links, False, 3)
    assert {item.name for item in dest.list()} >= set(names(source))
    again = copy_chain(source, dest)
    assert (again.copied, again.skipped) == (0, report.links)
    last = Path(dest.url, names(source)[-1])
    flip_bit(last, last.stat().st_size - 1)
    with pytest.raises(Conflict):
        copy_chain(source, dest)
