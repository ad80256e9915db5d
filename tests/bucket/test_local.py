"""What only a directory can be or do. (What every bucket does: test_conformance.py.)"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deltactl.bucket import local, open_bucket
from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import NotAllowed, NotFound, Transient, UsageError
from tests.support.fixtures import unprivileged

__all__ = ["unprivileged"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def names(bucket: LocalBucket) -> list[str]:
    return sorted(item.name for item in bucket.list())


def test_the_address_is_a_path_in_one_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("bucket")
    (tmp_path / "bucket").mkdir()
    spellings = ["bucket", "./bucket", "bucket/", "link", str(tmp_path / "bucket")]
    spellings.append(f"file://{tmp_path}/bucket")
    assert {open_bucket(url).url for url in spellings} == {str(tmp_path / "bucket")}


@pytest.mark.parametrize("url", ["s4://bucket/chain", "http://host/chain", "S4://x"])
def test_an_unknown_scheme_is_no_directory(url: str) -> None:
    with pytest.raises(UsageError, match="unknown kind of bucket"):
        open_bucket(url)


@pytest.mark.parametrize(
    "url", ["s3:/bucket/chain", "S3:bucket", "hf:buckets/a/b", "gs:/me:s3cret@b/x", "https:/x"]
)
def test_an_address_without_its_slashes_is_no_directory(url: str) -> None:
    with pytest.raises(UsageError, match="looks like a URL") as caught:
        open_bucket(url)
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"
    assert open_bucket(f"./{url}").path("a") is not None


def test_a_file_is_no_bucket(root: Path, source: Path) -> None:
    with pytest.raises(NotFound):
        names(LocalBucket(source))
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        LocalBucket(source).put("object", source)


def test_what_is_hidden_or_unfinished_or_no_file_is_not_listed(root: Path, source: Path) -> None:
    bucket = LocalBucket(root)
    bucket.put("deltas/object", source)
    (root / "deltas/.hidden").touch()
    (root / "deltas/half.tmp").touch()
    (root / ".git").mkdir()
    (root / ".git/config").touch()
    (root / "empty").mkdir()
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to(".")
    os.mkfifo(root / "pipe")
    assert names(bucket) == ["deltas/object"]


def test_what_a_killed_put_left_is_never_seen_and_does_not_stay(root: Path, source: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from deltactl.bucket.local import LocalBucket\n"
        "os.link = os.rename = lambda *_: os._exit(7)\n"
        "LocalBucket(Path(sys.argv[1])).put('deltas/object', Path(sys.argv[2]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, root, source]).returncode == 7
    bucket = LocalBucket(root)
    assert len(os.listdir(root / "deltas")) == 1
    assert names(bucket) == []
    assert bucket.put("deltas/object", source)
    assert os.listdir(root / "deltas") == ["object"]


def test_a_full_disk(root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("copy_file_range", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match="No space left"):
                LocalBucket(root).put("deltas/object", source)
        assert os.listdir(root / "deltas") == []


@pytest.fixture(params=["rename that does not replace", "claim"])
def _no_hard_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    if request.param == "claim":
        monkeypatch.setattr(local, "rename_new", lambda *_: False)


@pytest.mark.usefixtures("_no_hard_links")
def test_where_there_are_no_hard_links(root: Path, source: Path, tmp_path: Path) -> None:
    bucket = LocalBucket(root)
    assert bucket.put("deltas/object", source)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    assert not bucket.put("deltas/object", other)
    assert bucket.read("deltas/object", 0, 99) == b"content"
    assert os.listdir(root / "deltas") == ["object"]


def test_a_claim_that_nobody_holds_any_more_is_named(
    root: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    monkeypatch.setattr(local, "rename_new", lambda *_: False)
    claim = root / "deltas/.object.claim"
    claim.mkdir(parents=True)
    with pytest.raises(Transient) as caught:
        LocalBucket(root).put("deltas/object", source)
    assert str(claim) in str(caught.value.hint)
    claim.rmdir()
    assert LocalBucket(root).put("deltas/object", source)
    assert os.listdir(root / "deltas") == ["object"]


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A bucket's directory that all users can reach; pytest's own are closed to others."""
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory, "bucket")


def test_what_may_not_be_read_is_not_taken_for_absent(
    open_root: Path, source: Path, unprivileged: AbstractContextManager[None]
) -> None:
    """Else an unreadable chain would look like an empty one, and be begun anew."""
    bucket = LocalBucket(open_root)
    bucket.put("deltas/object", source)
    bucket.put("anchors/object", source)
    (open_root / "deltas").chmod(0)
    (open_root / "anchors/object").chmod(0)
    target = open_root.parent / "target"
    with unprivileged:
        with pytest.raises(NotAllowed):
            names(bucket)
        with pytest.raises(NotAllowed):
            bucket.read("anchors/object", 0, 1)
        with pytest.raises(NotAllowed):
            bucket.fetch("anchors/object", target)
        with pytest.raises(NotAllowed):
            bucket.put("deltas/new", source)
    (open_root / "deltas").chmod(0o755)
    assert not target.exists()
