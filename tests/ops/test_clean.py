"""Left-overs on this machine: of this host and of others, of killed processes, of the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import NotAllowed, NotFound, Transient
from deltactl.files.atomic import atomic_directory, temporary_file
from deltactl.files.cache import cache_root, tip_cache
from deltactl.files.downloads import kept_downloads
from deltactl.files.temporary import NEW, OLD, aside
from deltactl.ops.clean import CleanReport, clean_bucket
from deltactl.ops.clean_cache import clean_cache
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support.chains import content, states, write
from tests.support.crash import crashes
from tests.support.flips import done_at_once

DAY = 86400.0
OTHER_HOST = "0badcafe"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


def left(path: Path, what: str = NEW, host: str = OTHER_HOST, content: bytes = b"half") -> Path:
    """What a process that died left beside ``path``: a file, on another host by default."""
    name = f".{path.name}.{host}.12345678.{what}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(name).write_bytes(content)
    return path.with_name(name)


def cleaned(root: Path, days: float = 2, **options: bool) -> CleanReport:
    return clean_bucket(LocalBucket(root), now=time.time() + days * DAY, **options)


def actions(report: CleanReport) -> dict[str, str]:
    return {Path(item.name).name: item.action for item in report.items}


def test_temporaries_of_every_host_go_by_their_age(tmp_path: Path) -> None:
    root = tmp_path / "models"
    deep = [left(root / "a.safetensors"), left(root / "runs/one/model", host="feedf00d")]
    deep.append(aside(root / "b", NEW))  # of this host, and nobody holds it
    deep[-1].write_bytes(b"half")
    (root / "c").mkdir()
    (root / "c/file").write_bytes(b"mine")
    young = cleaned(root, days=0.5)
    assert {item.action for item in young.items} == {"keep"}
    report = cleaned(root)
    assert report.bytes == 12
    assert not any(path.exists() for path in deep)
    assert content(root) == {"c/file": b"mine"}


def test_the_newest_file_in_it_is_a_directorys_age(tmp_path: Path) -> None:
    place = tmp_path / f"models/.model.{OTHER_HOST}.12345678.{NEW}.tmp"
    (place / "sub").mkdir(parents=True)
    (place / "sub/shard").write_bytes(b"half")
    old = time.time() - 10 * DAY
    os.utime(place / "sub", (old, old))
    os.utime(place, (old, old))
    (item,) = clean_bucket(LocalBucket(tmp_path / "models")).items
    assert (item.action, item.bytes) == ("keep", 4)
    os.utime(place / "sub/shard", (old, old))
    assert clean_bucket(LocalBucket(tmp_path / "models")).bytes == 4
    assert not place.exists()


@pytest.mark.parametrize(
    "name",
    [
        ".model.tmp",
        ".model.0badcafe.12345678.new",
        "model.0badcafe.12345678.new.tmp",
        ".model.0badcafe.1234567.new.tmp",
        ".model.0BADCAFE.12345678.new.tmp",
        ".model.0badcafe.12345678.other.tmp",
        ".deltactl-downloads",
        "model.deltactl-download",
        "x.claim",
    ],
)
def test_other_names_are_nobodys_left_overs(tmp_path: Path, name: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / name).write_bytes(b"mine")
    (tmp_path / "models/.git").mkdir()
    left(tmp_path / "models/.git/hidden")
    before = content(tmp_path / "models")
    assert cleaned(tmp_path / "models").items == ()
    assert content(tmp_path / "models") == before


def test_what_a_process_of_this_machine_holds_stays_however_old(tmp_path: Path) -> None:
    with temporary_file(tmp_path / "models/file") as (_, name):
        report = cleaned(tmp_path / "models", days=1000)
        assert [item.why for item in report.items] == ["somebody is at it"]
        assert name.exists()
    with atomic_directory(tmp_path / "models/model") as name:
        assert [item.action for item in cleaned(tmp_path / "models").items] == ["keep"]
        assert name.exists()
    assert (tmp_path / "models/model").is_dir()
    assert cleaned(tmp_path / "models").items == ()


def test_another_hosts_lock_counts_where_the_file_system_has_it(tmp_path: Path) -> None:
    name = left(tmp_path / "models/model")
    with open(name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list(actions(cleaned(tmp_path / "models")).values()) == ["keep"]
    assert list(actions(cleaned(tmp_path / "models")).values()) == ["remove"]


def test_the_only_copy_gets_its_name_back(tmp_path: Path) -> None:
    old = left(tmp_path / "models/model", OLD, content=b"whole")
    (dry,) = cleaned(tmp_path / "models", dry_run=True).items
    assert (dry.kind, dry.action) == ("old content", "give back")
    assert old.exists()
    report = cleaned(tmp_path / "models")
    assert ([item.action for item in report.items], report.bytes) == (["give back"], 0)
    assert content(tmp_path / "models") == {"model": b"whole"}


def test_where_the_name_has_new_content_the_old_goes(tmp_path: Path) -> None:
    left(tmp_path / "models/model", OLD)
    (tmp_path / "models/model").write_bytes(b"new")
    assert [item.kind for item in cleaned(tmp_path / "models").items] == ["temporary"]
    assert content(tmp_path / "models") == {"model": b"new"}


def test_an_only_copy_whose_name_is_not_known_is_left(tmp_path: Path) -> None:
    """Of names that were too long there is a digest."""
    long = aside(tmp_path / "models" / ("m" * 200), OLD)
    long.parent.mkdir()
    long.write_bytes(b"whole")
    (item,) = cleaned(tmp_path / "models").items
    assert item.action == "keep"
    assert "only copy" in str(item.why)
    assert long.read_bytes() == b"whole"


def interrupted(dest: Path) -> Path:
    """A download that was kept to go on with."""
    with contextlib.suppress(Transient), kept_downloads(dest) as place:
        (place / "part").write_bytes(b"fetched")
        raise Transient("the network went away")
    assert place.exists()
    return place


def test_downloads_that_were_kept(tmp_path: Path) -> None:
    dest = tmp_path / "models/model"
    place = interrupted(dest)
    assert actions(cleaned(tmp_path / "models", days=0.5)) == {place.name: "keep"}
    with kept_downloads(dest) as held:
        assert held == place
        (item,) = cleaned(tmp_path / "models").items
        assert item.why == "somebody is at it"
        assert (place / "part").exists()
    interrupted(dest)
    report = cleaned(tmp_path / "models")
    assert [item.kind for item in report.items] == ["download"]
    assert not place.exists()


def test_what_lies_beside_a_directory_under_its_name(tmp_path: Path) -> None:
    model = write(tmp_path / "model", states(1)[0])
    mine, others = left(model), left(tmp_path / "another")
    also = left(tmp_path / "model.v2")
    before = content(model)
    assert actions(cleaned(model)) == {mine.name: "remove"}
    assert others.exists() and also.exists() and not mine.exists()
    assert content(model) == before


def test_what_a_first_pull_left_where_its_directory_is_to_be(tmp_path: Path) -> None:
    place = interrupted(tmp_path / "model")
    assert actions(cleaned(tmp_path / "model")) == {place.name: "remove"}
    assert not place.exists()
    with pytest.raises(NotFound):
        cleaned(tmp_path / "model")


def test_a_directory_with_a_part_that_may_not_be_looked_into(
    unprivileged: AbstractContextManager[None],
) -> None:
    """As /tmp: what may be seen is cleaned, and the rest is told; of no step anything goes."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "scratch")
        (root / "closed").mkdir(parents=True)
        (root / "closed").chmod(0o700)
        mine, of_step = left(root / "verify"), left(root / "deltas/step_000002.safetensors")
        for path in (Path(directory), root, root / "deltas"):
            path.chmod(0o777)
        with unprivileged:
            report = cleaned(root)
        assert actions(report) == {mine.name: "remove", of_step.name: "keep"}
        assert not mine.exists() and of_step.exists()
    assert [type(error) for error in report.errors] == [NotAllowed]


def test_claims_that_nobody_took_back(tmp_path: Path) -> None:
    empty, full = tmp_path / "models/.object.claim", tmp_path / "models/.other.claim"
    empty.mkdir(parents=True)
    full.mkdir()
    (full / "file").write_bytes(b"mine")
    report = cleaned(tmp_path / "models")
    assert not empty.exists()
    assert (full / "file").exists(), "that is no claim"
    assert [Path(str(error.file)).name for error in report.errors] == [".other.claim"]


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    outside = left(tmp_path / "outside/file")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/way").symlink_to(tmp_path / "outside")
    link = tmp_path / f"models/.link.{OTHER_HOST}.12345678.{NEW}.tmp"
    link.symlink_to(outside)
    cleaned(tmp_path / "models", days=1000)
    assert outside.exists()


def test_what_may_not_be_removed_is_told(unprivileged: AbstractContextManager[None]) -> None:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        name = left(Path(root, "models/file"))
        name.parent.chmod(0o555)
        with unprivileged:
            report = cleaned(name.parent)
        name.parent.chmod(0o755)
        assert name.exists()
    (item,), (error,) = report.items, report.errors
    assert (item.action, type(error)) == ("keep", NotAllowed)
    assert error.file == item.name == str(name)


# Of pushes that were killed.


def test_after_a_push_that_was_killed_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if on another host: nothing of the chain goes, and all else does once it has gone on."""
    one, two, three = (write(tmp_path / f"c{n}", s) for n, s in enumerate(states(3)))
    start = tmp_path / "start"
    monkeypatch.setenv("DELTACTL_CACHE", str(start / "cache"))
    push(one, LocalBucket(start / "bucket"))
    shutil.copytree(two, tmp_path / "source")
    kinds = set()
    with done_at_once():
        for place, call in crashes(tmp_path, "push"):
            monkeypatch.setenv("DELTACTL_CACHE", str(place / "cache"))
            bucket = LocalBucket(place / "bucket")
            _to_another_host(place)
            links = [link.name for link in read_chain(bucket).links]
            first = cleaned(place / "bucket")
            assert first.errors == (), call
            assert [link.name for link in read_chain(bucket).links] == links, call
            kinds |= _past(place, three)
            again = push(two, bucket, step=2, anchor_every=2)
            assert again.kind == "anchor", call
            push(three, bucket, anchor_every=2)
            second = cleaned(place / "bucket")
            kinds |= {item.kind for report in (first, second) for item in report.cleaned}
            report = verify_bucket(bucket, level="rebuild")
            assert (report.ok, report.links) == (True, 4), call
            hidden = [p for p in (place / "bucket").rglob("*") if p.name.startswith(".")]
            assert hidden == [], call
            clean_cache(now=time.time() + 2 * DAY)
            names = {path.name for path in (place / "cache").rglob("*") if path.is_file()}
            assert names <= {"lock", "url"}, call
    assert kinds == {"temporary", "unfinished anchor"}


def _past(place: Path, three: Path) -> set[str]:
    """What is cleaned where nobody finishes the anchor of step 2, and the chain goes on."""
    bucket = LocalBucket(shutil.copytree(place / "bucket", place / "copy"))
    chain = read_chain(bucket)
    if chain.tip != 2 or 2 in chain.anchors:
        return set()
    push(three, bucket)
    report = cleaned(place / "copy")
    assert verify_bucket(bucket, level="rebuild").ok
    there = {item.name.split("/")[1] for item in bucket.list() if item.name.startswith("anchors/")}
    assert there == {"step_000001"}
    return {item.kind for item in report.cleaned}


def _to_another_host(place: Path) -> None:
    for path in sorted(place.rglob(".*.tmp"), reverse=True):  # what is in one before itself
        stem, _, random, what, end = path.name.rsplit(".", 4)
        path.rename(path.with_name(f"{stem}.{OTHER_HOST}.{random}.{what}.{end}"))


# The cache.


def test_a_tip_that_nobody_used_for_long(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"c{n}", s) for n, s in enumerate(states(2)))
    bucket = LocalBucket(tmp_path / "bucket")
    push(one, bucket)
    with tip_cache(bucket.url) as tip:
        assert tip.is_dir()
        report = clean_cache(now=time.time() + 2 * DAY)
        assert [item.why for item in report.items] == ["somebody is at it"]
    assert [item.action for item in clean_cache().items] == ["keep"]
    dry = clean_cache(now=time.time() + 2 * DAY, dry_run=True)
    assert tip.is_dir()
    report = clean_cache(now=time.time() + 2 * DAY)
    assert report.bytes == dry.bytes > 1000
    assert not tip.exists()
    assert clean_cache(now=time.time() + 2 * DAY).items == ()
    assert push(two, bucket).step == 2, "it is rebuilt"


def test_temporaries_and_shelves_in_the_cache(tmp_path: Path) -> None:
    shelf = cache_root() / "links/shelf"
    shelf.mkdir(parents=True)
    (shelf / "digest.safetensors").write_bytes(b"link")
    aside_of_one = left(cache_root() / "tips/0123/tip")
    (cache_root() / "tips/0123/lock").touch()
    assert {item.action for item in clean_cache().items} == {"keep"}
    report = clean_cache(now=time.time() + 2 * DAY)
    assert sorted(Path(item.name).name for item in report.cleaned) == ["0123", "digest.safetensors"]
    assert not aside_of_one.exists()
    assert not any(shelf.iterdir())


def test_a_trainer_that_runs_keeps_its_place(tmp_path: Path) -> None:
    rank = cache_root() / "trainers/0123/rank-1"
    rank.mkdir(parents=True)
    (rank / "deltas").mkdir()
    (rank / "deltas/7.safetensors").write_bytes(b"delta")
    with open(rank / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = clean_cache(now=time.time() + 1000 * DAY)
        assert [item.action for item in report.items] == ["keep"]
        assert (rank / "deltas/7.safetensors").exists()
    clean_cache(now=time.time() + 1000 * DAY)
    assert not rank.exists()


def test_there_may_be_no_cache() -> None:
    assert clean_cache().items == ()
    assert not cache_root().exists()
