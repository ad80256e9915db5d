"""What a model's directory holds: hashed once, and again whenever it may be something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.checkpoint.state import state_of
from deltactl.codec.bits import touch_sum
from deltactl.core.errors import Conflict, NotFound
from deltactl.vllm.update import directory
from deltactl.vllm.update.directory import identify
from tests.support.adversarial import unsigned
from tests.support.chains import first_state, next_state, write, write_torch
from tests.support.checkpoints import flip_bit, random_tensor


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints whose bytes were read, each time."""
    found: list[Path] = []
    real = directory._hash

    def hash_(checkpoint: directory.Checkpoint) -> directory.Identity:
        found.append(checkpoint.path)
        return real(checkpoint)

    monkeypatch.setattr(directory, "_hash", hash_)
    return found


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old as soon as they are written."""
    monkeypatch.setattr(directory, "_YOUNG", -(10**18))


def shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[0]


@pytest.mark.parametrize("form", ["directory", "file", "torch"])
def test_state_and_sums_over_all_elements(form: str, tmp_path: Path) -> None:
    tensors = first_state()
    tensors["large"] = random_tensor("U8", ((2 << 20) + 3,), 9)  # of more than one chunk
    if form == "torch":
        del tensors["large"]
        model = write_torch(tmp_path / "model", tensors)
    else:
        model = write(tmp_path / "model", tensors, shards=2 if form == "directory" else 0)
    found = identify(model)
    with open_checkpoint(model) as checkpoint:
        assert found.state == state_of(checkpoint)
    assert found.tensors.keys() == tensors.keys()
    for name, (dtype, shape, data) in tensors.items():
        tensor = found.tensors[name]
        bits = np.frombuffer(data, unsigned(dtype))
        assert (tensor.name, tensor.dtype, tensor.shape) == (name, dtype, shape)
        assert tensor.touch_sum == touch_sum(np.arange(bits.size), bits)


@pytest.mark.usefixtures("old_files")
def test_it_is_hashed_once(tmp_path: Path, hashed: list[Path]) -> None:
    model = write(tmp_path / "model", first_state())
    found = identify(model)
    (tmp_path / "link").symlink_to(model)
    assert identify(model) == identify(tmp_path / "link") == found
    assert len(hashed) == 1


@pytest.mark.usefixtures("old_files")
def test_of_many_at_once_one_hashes(tmp_path: Path, hashed: list[Path]) -> None:
    model = write(tmp_path / "model", first_state())
    found: list[directory.Identity] = []
    threads = [threading.Thread(target=lambda: found.append(identify(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(other == found[0] for other in found)
    assert len(hashed) == 1


def test_of_young_files_nothing_is_kept(tmp_path: Path, hashed: list[Path]) -> None:
    """A write in the same tick of the clock would not show, old as its times may claim to be."""
    model = write(tmp_path / "model", first_state())
    os.utime(shard(model), (1, 1))
    for turn in range(1, 3):
        identify(model)
        assert len(hashed) == turn


def rewrite(model: Path) -> None:
    """Other bytes in the same file, of the same size and with the same time of change."""
    path = shard(model)
    before = path.stat()
    flip_bit(path, before.st_size - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def exchange(model: Path) -> None:
    """Another file of the same size under the same name, with the same time of change."""
    path = shard(model)
    before = path.stat()
    data = path.read_bytes()
    path.rename(model / "aside")
    path.write_bytes(data)
    rewrite(model)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("change", [rewrite, exchange])
def test_files_that_were_written_to_are_hashed_again(
    change: Callable[[Path], None], tmp_path: Path, hashed: list[Path]
) -> None:
    model = write(tmp_path / "model", first_state())
    before = identify(model)
    change(model)
    after = identify(model)
    assert after.state != before.state
    with open_checkpoint(model) as checkpoint:
        assert after.state == state_of(checkpoint)
    assert len(hashed) == 2


@pytest.mark.usefixtures("old_files")
def test_another_model_in_the_same_place(tmp_path: Path) -> None:
    first, second = first_state(), next_state(first_state(), 5)
    before = identify(write(tmp_path / "model", first))
    (tmp_path / "model").rename(tmp_path / "old")
    after = identify(write(tmp_path / "model", second))
    assert after.state != before.state


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("fault", ["flip", "cut", "empty", "noise", "gone"])
def test_what_was_kept_and_is_torn_is_not_believed(
    fault: str, tmp_path: Path, hashed: list[Path]
) -> None:
    model = write(tmp_path / "model", first_state())
    found = identify(model)
    (kept,) = (tmp_path / "cache").rglob("identity")
    data = kept.read_bytes()
    if fault == "flip":
        flip_bit(kept, len(data) - 40)
    elif fault == "gone":
        kept.unlink()
    else:
        kept.write_bytes({"cut": data[:-1], "empty": b"", "noise": b"\xff\n\xff"}[fault])
    assert identify(model) == found
    assert identify(model) == found
    assert len(hashed) == 2


def test_files_that_are_written_to_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model", first_state())
    real = directory._hash

    def hash_(checkpoint: directory.Checkpoint) -> directory.Identity:
        found = real(checkpoint)
        flip_bit(shard(model), 400)
        return found

    monkeypatch.setattr(directory, "_hash", hash_)
    with pytest.raises(Conflict, match="written to") as error:
        identify(model)
    assert error.value.hint is not None


@pytest.mark.usefixtures("old_files")
def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_KEPT", 2)
    for n in range(5):
        identify(write(tmp_path / f"model-{n}", first_state()))
    assert len(list((tmp_path / "cache").rglob("identity"))) == 3


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        identify(tmp_path / "none")
