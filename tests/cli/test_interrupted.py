"""Ctrl-C, or SIGTERM, while a server does not answer: a quick end, and what should be left is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.ops.copy import copy_chain
from deltactl.ops.pull import pull
from deltactl.ops.verify import verify_bucket
from tests.support.chains import content, make_chain, states
from tests.support.remote import RemoteBucket


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    bucket = Path(make_chain(tmp_path / "made", states(3)).url)
    return Path(shutil.move(bucket, tmp_path / "remote"))


def interrupt(tmp_path: Path, after: int, *args: object, by: signal.Signals = signal.SIGINT) -> str:
    """Run a command until its bucket hangs, press Ctrl-C; returns stderr."""
    (tmp_path / "tmp").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.hanging", str(after), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    assert child.stderr is not None
    try:
        while (line := child.stderr.readline()) != "hangs\n":
            assert line, child.wait()
        child.send_signal(by)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert list((tmp_path / "tmp").iterdir()) == []
    return err


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_pull_goes_on_where_it_was(tmp_path: Path, remote: Path, by: signal.Signals) -> None:
    (tmp_path / "place").mkdir()
    interrupt(tmp_path, 8, "pull", remote, tmp_path / "place/dest", by=by)
    assert [path.name for path in (tmp_path / "place").iterdir()] == [".dest.deltactl-download"]
    report = pull(RemoteBucket(remote, 1000), tmp_path / "place/dest")
    assert report.bytes_resumed > 0
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["dest"]


@pytest.mark.parametrize("after", [0, 2])
def test_pull_while_headers_are_read(tmp_path: Path, remote: Path, after: int) -> None:
    (tmp_path / "place").mkdir()
    interrupt(tmp_path, after, "pull", remote, tmp_path / "place/dest")
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("level", ["links", "data", "rebuild"])
def test_verify_leaves_nothing(tmp_path: Path, remote: Path, level: str) -> None:
    interrupt(tmp_path, 1 if level == "links" else 8, "verify", remote, "--level", level)


@pytest.mark.parametrize("verb", ["log", "show"])
def test_what_only_reads(tmp_path: Path, remote: Path, verb: str) -> None:
    interrupt(tmp_path, 1, verb, f"{remote}@2" if verb == "show" else remote)


def test_copy_leaves_a_sound_chain(tmp_path: Path, remote: Path) -> None:
    """One batch has been put when the next one hangs."""
    dest = LocalBucket(tmp_path / "dest")
    interrupt(tmp_path, 9, "copy", remote, dest.url)
    if Path(dest.url).exists():
        assert verify_bucket(dest).ok
    copy_chain(LocalBucket(remote), dest)
    assert content(remote) == content(Path(dest.url))
