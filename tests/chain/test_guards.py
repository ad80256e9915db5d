"""What is refused because it would destroy something, or publish what never was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltactl.bucket import open_bucket
from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import Malformed, NotAllowed, NotFound, Transient, UsageError
from deltactl.files.atomic import atomic_directory
from deltactl.ops.apply import apply_delta
from deltactl.ops.diff import diff
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.verify import verify_bucket
from tests.support.checkpoints import changed, random_tensor, write_hf_directory


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    tensor = random_tensor("BF16", (64, 64), seed=1)
    places = []
    for step in range(3):
        places.append(tmp_path / f"step_{step}")
        write_hf_directory(places[-1], {"w": tensor}, shards=1, aux={"config.json": b"{}"})
        tensor = changed(tensor, 0.05, seed=step)
    return places


@pytest.fixture
def bucket(tmp_path: Path, steps: list[Path]) -> LocalBucket:
    found = LocalBucket(tmp_path / "bucket")
    for step in steps[:2]:
        push(step, found)
    return found


def _tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("at_hand", [False, True])
def test_a_source_that_is_written_to_is_not_published(
    tmp_path: Path, steps: list[Path], bucket: LocalBucket, at_hand: bool
) -> None:
    """Even if what was read is consistent in itself: it may be a mixture that never existed."""
    before = _tree(tmp_path / "bucket")
    weights = steps[2] / "model.safetensors"

    def touch(what: str, done: int, total: int) -> None:
        if what == "comparing" and done == total:
            os.utime(weights, ns=(1, 1))

    with pytest.raises(Malformed, match="nothing was published"):
        push(steps[2], bucket, base=steps[1] if at_hand else None, progress=touch)
    assert _tree(tmp_path / "bucket") == before


def test_nor_is_it_as_a_first_anchor(tmp_path: Path, steps: list[Path]) -> None:
    bucket = LocalBucket(tmp_path / "empty")

    def touch(what: str, done: int, total: int) -> None:
        if what == "writing" and done == total:
            os.utime(steps[0] / "model.safetensors", ns=(1, 1))

    with pytest.raises(Malformed, match="nothing was published"):
        push(steps[0], bucket, progress=touch)
    with pytest.raises(NotFound):
        verify_bucket(bucket)


@pytest.mark.parametrize("step", [-1, 10**18, 10**20])
def test_steps_that_the_format_does_not_have(
    tmp_path: Path, steps: list[Path], bucket: LocalBucket, step: int
) -> None:
    with pytest.raises(UsageError, match="out of range"):
        push(steps[2], bucket, step=step)
    a, b = map(open_checkpoint, steps[:2])
    with pytest.raises(UsageError, match="out of range"):
        diff(a, b, tmp_path / "delta", step=step)
    assert not (tmp_path / "delta").exists()


def test_no_step_follows_the_last_one(steps: list[Path], bucket: LocalBucket) -> None:
    push(steps[2], bucket, step=10**18 - 1)
    with pytest.raises(UsageError, match="out of range"):
        push(steps[2], bucket)


@pytest.mark.parametrize("side", [0, 1])
def test_a_delta_does_not_take_the_place_of_what_it_is_made_from(
    steps: list[Path], tmp_path: Path, side: int
) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(steps[side] / "model.safetensors")
    before = _tree(steps[side])
    for out in (link, steps[side] / "model.safetensors"):
        a, b = map(open_checkpoint, steps[:2])
        with pytest.raises(UsageError, match="one of the two"):
            diff(a, b, out)
    assert _tree(steps[side]) == before


@pytest.mark.parametrize("inside", ["bucket/anchors/step_000001", "bucket/new", "bucket", "."])
def test_nothing_is_pulled_into_the_bucket_or_over_it(
    tmp_path: Path, bucket: LocalBucket, inside: str
) -> None:
    before = _tree(tmp_path)
    with pytest.raises(UsageError, match="lie in each other"):
        pull(bucket, tmp_path / inside)
    assert _tree(tmp_path) == before


def test_an_anchor_is_not_changed_in_place(tmp_path: Path, bucket: LocalBucket) -> None:
    before = _tree(tmp_path / "bucket")
    delta = tmp_path / "bucket/deltas/step_000002.safetensors"
    with pytest.raises(UsageError, match="an anchor of a chain"):
        apply_delta(delta, tmp_path / "bucket/anchors/step_000001", None)
    assert _tree(tmp_path / "bucket") == before


@pytest.mark.parametrize("kind", [NotAllowed, Transient])
def test_a_link_that_cannot_be_read_now_is_not_called_broken(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(name: str, start: int, stop: int) -> bytes:
        raise kind("no", file=name)

    monkeypatch.setattr(bucket, "read", refuse)
    with pytest.raises(kind):
        read_chain(bucket)


def test_the_working_directory_is_not_exchanged(
    tmp_path: Path, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(bucket, tmp_path / "served", step=1)
    (tmp_path / "served/below").mkdir()
    for place in (tmp_path / "served", tmp_path / "served/below"):
        monkeypatch.chdir(place)
        with pytest.raises(UsageError, match="working directory"):
            pull(bucket, tmp_path / "served")


def test_a_mount_point_is_not_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "model")
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="mount point"), atomic_directory(tmp_path / "model"):
        pass


def test_a_cache_that_cannot_be_made_says_how_to_name_another(
    steps: list[Path], bucket: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "file"))
    with pytest.raises(NotAllowed) as caught:
        push(steps[2], bucket)
    assert "DELTACTL_CACHE" in str(caught.value.hint)


def test_a_bucket_whose_name_is_no_text(tmp_path: Path, steps: list[Path]) -> None:
    bucket = LocalBucket(tmp_path / os.fsdecode(b"b\xff"))
    push(steps[0], bucket)
    assert verify_bucket(bucket).ok


def test_file_urls(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a b"):
        assert open_bucket(url).url == str(tmp_path / "a b")
    for url in ("", "file://elsewhere/a", "file:// a", "s4://a"):
        with pytest.raises(UsageError):
            open_bucket(url)


def test_files_that_a_delta_does_not_carry_are_named(
    steps: list[Path], bucket: LocalBucket
) -> None:
    (steps[2] / "config.json").write_text('{"vocab_size": 2}')
    (steps[2] / "chat_template.jinja").write_text("hello")
    report = push(steps[2], bucket)
    assert (report.kind, report.left_behind) == ("delta", ("chat_template.jinja", "config.json"))
    assert push(steps[2], bucket, step=10).left_behind == ()  # an anchor carries them
    assert push(steps[2], bucket).left_behind == ()
