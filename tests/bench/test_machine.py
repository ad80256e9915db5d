"""What is said of the machine, and the work that its limits are measured by."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from deltactl.bench import machine
from deltactl.checkpoint.checkpoint import open_checkpoint
from tests.support.checkpoints import random_tensor, write_hf_directory, write_safetensors


def test_facts_name_no_host() -> None:
    found = machine.facts()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["cpu"]
    assert platform.node() not in found.values()
    assert 0 < machine.available_memory() <= found["memory_bytes"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Smaller than a span, larger than several, and empty."""
    monkeypatch.setattr(machine, "_SPAN", 4096)
    monkeypatch.setattr(machine, "_CHUNK", 1000)
    sizes = {"small": 10, "large": 3 * 4096 + 7, "even": 4096, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(i % 251 for i in range(size)))
    return [tmp_path / name for name in sizes]


def test_every_byte_is_read_once(files: list[Path]) -> None:
    pieces: list[bytes] = []
    machine._spread(files, lambda: lambda data: pieces.append(bytes(data)))
    expected = b"".join(path.read_bytes() for path in files)
    assert sorted(b"".join(pieces)) == sorted(expected)
    assert max(map(len, pieces)) == 1000


@pytest.mark.parametrize("sync", [False, True])
def test_copies_are_whole(files: list[Path], sync: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    machine.copy_and_hash(files, target, sync=sync)
    for path in files:
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_limits_take_every_shard_and_run_again_and_again(tmp_path: Path) -> None:
    tensors = {str(i): random_tensor("BF16", (8, 8), seed=i) for i in range(3)}
    one = write_safetensors(tmp_path / "one.safetensors", tensors)
    many = tmp_path / "many"
    write_hf_directory(many, tensors, shards=3)
    with open_checkpoint(one) as a, open_checkpoint(many) as b:
        assert machine.files_of(a) == [one]
        assert len(machine.files_of(b)) == 3
        works = machine.Limits(a, b, tmp_path).works()
    assert list(works) == ["read", "read_and_hash", "copy_and_hash", "copy_sync_and_hash"]
    for work in [*works.values()] * 2:
        if work.clear is not None:
            work.clear()
        work.run()
    assert len(list((tmp_path / "copies").iterdir())) == 3
