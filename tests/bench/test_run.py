"""A whole run on small checkpoints: all is there, ratios fit the times, nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deltactl.bench import catch_up, run
from deltactl.bench.peers import NOT_INSTALLED, PEERS, TRL
from deltactl.bench.run import bench
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import ENCODINGS
from deltactl.core.errors import DeltactlError, NotFound, UsageError
from deltactl.ops.diff import diff
from tests.support.checkpoints import changed, random_tensor, write_hf_directory


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two sharded directories with a removed, an added and a changed tensor each of two kinds."""
    old = {f"t{i}": random_tensor(d, (64, 64), seed=i) for i, d in enumerate(("BF16", "F32", "F4"))}
    new = {name: changed(spec, 0.02) for name, spec in old.items()}
    old["gone"] = new["come"] = random_tensor("BF16", (8,), seed=9)
    for name, tensors in (("a", old), ("b", new)):
        write_hf_directory(tmp_path / name, tensors, shards=2)
    return tmp_path / "a", tmp_path / "b"


def check_ratios(document: dict[str, Any]) -> None:
    limits, size = document["limits"], document["checkpoint"]["bytes"]
    for row in document["encodings"]:
        for stage in ("encode", "decode", "apply", "rebuild"):
            found = row[stage]
            assert found["bytes_per_second"] == pytest.approx(size / found["seconds"])
        encode, rebuild = row["encode"], row["rebuild"]
        for ratio, expected in (
            (encode["share_of_reading"], limits["read"]["seconds"] / encode["seconds"]),
            (encode["times_read_and_hash"], encode["seconds"] / limits["read_and_hash"]["seconds"]),
            (rebuild["share_of_copy"], limits["copy_and_hash"]["seconds"] / rebuild["seconds"]),
            (
                rebuild["share_of_synced_copy"],
                limits["copy_sync_and_hash"]["seconds"] / rebuild["seconds"],
            ),
        ):
            assert ratio == pytest.approx(expected)


def test_ones_own_pair(pair: tuple[Path, Path], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen: list[tuple[str, int, int]] = []
    found = bench(*pair, rounds=1, scratch=scratch, progress=lambda *args: seen.append(args))
    document = found.facts()
    assert list(scratch.iterdir()) == []
    check_ratios(document)
    assert document["checkpoint"]["learning_rate"] is None
    with open_checkpoint(pair[0]) as base, open_checkpoint(pair[1]) as result:
        for row in document["encodings"]:
            expected = diff(base, result, None, encoding=row["encoding"])
            assert row["bytes"] == expected.delta_bytes
            assert row["bytes_per_changed_element"] == expected.bytes_per_changed_element
    assert [row["encoding"] for row in document["encodings"]] == list(ENCODINGS)
    assert [row["name"] for row in document["peers"]] == [TRL.name, *(p.name for p in PEERS)]
    assert all(row["sample_bytes"] for row in document["peers"])
    assert [row["links"] for row in document["catch_up"]] == [1]
    (ulp,) = (row for row in document["encodings"] if row["encoding"] == "ulp")
    assert document["catch_up"][0]["seconds"] == ulp["rebuild"]["seconds"]
    assert {what for what, _, _ in seen} == {"measuring"}
    assert seen[-1][1] == seen[-1][2]


def test_made_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "LINKS", (1, 3))
    monkeypatch.setattr(catch_up, "PARAMS", 1 << 16)
    document = bench(params=1 << 18, rounds=1, scratch=tmp_path).facts()
    assert list(tmp_path.iterdir()) == []
    check_ratios(document)
    assert document["checkpoint"]["elements"] == 1 << 18
    assert document["checkpoint"]["learning_rate"] == 1e-6
    assert document["peers"][0]["sample_bytes"] is None
    one, three = document["catch_up"]
    assert (one["links"], three["links"]) == (1, 3)
    assert three["changed_elements"] > 2 * one["changed_elements"] > 0
    assert three["bytes"] > 2 * one["bytes"]
    for row in (one, three):
        each = row["seconds"] / row["changed_elements"]
        assert row["seconds_per_changed_element"] == pytest.approx(each)


def test_peers_that_are_not_installed_leave_the_rest(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = Path(shutil.which("cp") or "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cp").symlink_to(binary)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    document = bench(*pair, rounds=1, scratch=tmp_path).facts()
    problems = {row["name"]: row["problem"] for row in document["peers"]}
    assert problems["zstd -3 --patch-from"] == problems["xdelta3 -3"] == NOT_INSTALLED
    assert problems["zstd -3 of B alone"] is None


def test_where_memory_is_short_nothing_is_held_in_it(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "available_memory", lambda: 1)
    document = bench(*pair, rounds=1, scratch=tmp_path).facts()
    assert all(row["apply"] is None for row in document["encodings"])
    assert document["peers"][0]["sample_bytes"] is not None


def test_identical_checkpoints(pair: tuple[Path, Path], tmp_path: Path) -> None:
    document = bench(pair[0], pair[0], rounds=1, scratch=tmp_path).facts()
    assert document["checkpoint"]["sparsity"] == 1
    assert all(row["bytes_per_changed_element"] is None for row in document["encodings"])
    assert document["catch_up"][0]["seconds_per_changed_element"] is None


def test_too_little_room_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    monkeypatch.setattr(run, "write_steps", lambda *args, **options: pytest.fail("it was made"))
    with pytest.raises(DeltactlError, match="too little room") as raised:
        bench(params=1 << 20, scratch=tmp_path)
    assert raised.value.found == 1 << 20
    assert "--scratch" in (raised.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sense_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        bench(pair[0])
    with pytest.raises(UsageError):
        bench(*pair, rounds=0)
    with pytest.raises(NotFound):
        bench(*pair, scratch=tmp_path / "missing")
    with pytest.raises(NotFound):
        bench(pair[0], tmp_path / "missing", scratch=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
