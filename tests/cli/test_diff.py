"""``deltactl diff``, in each mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltactl.codec import ENCODINGS
from deltactl.format.delta import open_delta
from tests.cli.conftest import Checkpoints, Cli
from tests.support.checkpoints import random_tensor, write_safetensors

ELEMENTS = 3 * 32 * 32 + 32
CHANGED = 3 * 10


def test_json(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("diff", checkpoints.base, checkpoints.result, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = ran.json
    assert found["changed_elements"] == CHANGED
    assert found["total_elements"] == ELEMENTS
    assert found["sparsity"] == pytest.approx(1 - CHANGED / ELEMENTS)
    assert found["bytes_per_changed_element"] == found["delta_bytes"] / CHANGED
    assert found["checkpoint_bytes"] == 3 * 32 * 32 * 2 + 32 * 4
    assert found["times_smaller"] == found["checkpoint_bytes"] / found["delta_bytes"]
    assert found["encoding"] == "ulp"
    assert re.fullmatch("[0-9a-f]{64}", found["base_state"])
    assert found["base_state"] != found["result_state"]
    assert found["identical"] is False
    assert found["file"] is None
    assert [row["name"] for row in found["tensors"]] == [
        f"model.layers.{n}.weight" for n in range(3)
    ]
    assert {row["kind"] for row in found["tensors"]} == {"sparse"}
    assert {row["changed"] for row in found["tensors"]} == {10}


def test_human(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("diff", checkpoints.base, checkpoints.result)
    assert (ran.code, ran.stderr) == (0, "")
    assert f"changed       {CHANGED} of {ELEMENTS:,} elements" in ran.stdout
    assert "sparsity      99.03%" in ran.stdout
    assert "bytes per changed element" in ran.stdout
    assert "x the delta" in ran.stdout


def test_quiet(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "delta"
    ran = cli("diff", checkpoints.base, checkpoints.result, "-q", "-o", out)
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")
    assert out.stat().st_size > 0


@pytest.mark.parametrize("flag", ["--json", "-q", ""])
def test_exit_code(flag: str, cli: Cli, checkpoints: Checkpoints) -> None:
    flags = [flag] if flag else []
    base, result = checkpoints.base, checkpoints.result
    assert cli("diff", base, result, *flags).code == 0
    assert cli("diff", base, result, "--exit-code", *flags).code == 1
    assert cli("diff", base, base, "--exit-code", *flags).code == 0


def test_identical_checkpoints_give_an_empty_delta(
    cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    out = tmp_path / "delta"
    ran = cli("diff", checkpoints.base, checkpoints.base, "-o", out)
    assert "the checkpoints are identical" in ran.stdout
    found = cli("diff", checkpoints.base, checkpoints.base, "--json").json
    assert found["identical"] is True
    assert found["sparsity"] == 1
    assert found["bytes_per_changed_element"] is None
    assert found["tensors"] == []
    assert open_delta(out).header.changed_elements == 0


@pytest.mark.parametrize("encoding", ["raw", "gap_delta", "ulp"])
def test_output_encoding_and_step_are_in_the_file(
    encoding: str, cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    out = tmp_path / "delta"
    out.write_bytes(b"what was there before")
    words = ("-o", out, "--encoding", encoding, "--step", 7, "--json")
    found = cli("diff", checkpoints.base, *words, checkpoints.result).json
    header = open_delta(out).header
    assert (header.encoding, header.step) == (encoding, 7)
    assert (header.base_state, header.result_state) == (found["base_state"], found["result_state"])
    assert found["delta_bytes"] == out.stat().st_size
    assert found["file"] == str(out)


def test_measuring_gives_the_size_of_what_would_be_written(
    cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    measured = cli("diff", checkpoints.base, checkpoints.result, "--json").json
    cli("diff", checkpoints.base, checkpoints.result, "-o", tmp_path / "delta")
    assert measured["delta_bytes"] == (tmp_path / "delta").stat().st_size


def test_to_stdout(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    cli("diff", checkpoints.base, checkpoints.result, "-o", tmp_path / "delta")
    ran = cli("diff", checkpoints.base, checkpoints.result, "-o", "-")
    assert ran.out == (tmp_path / "delta").read_bytes()
    assert "changed" in ran.stderr
    assert not Path("-").exists()
    quiet = cli("diff", checkpoints.base, checkpoints.result, "-o", "-", "-q")
    assert (quiet.out, quiet.err) == (ran.out, b"")


def test_json_and_stdout_exclude_each_other(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("diff", checkpoints.base, checkpoints.result, "-o", "-", "--json")
    assert ran.code == 2
    assert ran.json["error"]["what"] == "--json and -o - both want stdout"


def test_whole_tensors_are_named(cli: Cli, tmp_path: Path) -> None:
    old = {
        "gone\x1b[2J": random_tensor("BF16", (2, 3)),
        "other": random_tensor("BF16", (4,)),
        "same": random_tensor("BF16", (4,)),
    }
    new = {
        "new": random_tensor("F32", (5,)),
        "other": random_tensor("F32", (2, 2)),
        "same": old["same"],
    }
    a = write_safetensors(tmp_path / "a.safetensors", old)
    b = write_safetensors(tmp_path / "b.safetensors", new)
    lines = cli("diff", a, b).stdout.splitlines()
    assert r"removed   gone\x1b[2J  BF16 [2, 3]" in lines
    assert "added     new  F32 [5]" in lines
    assert "replaced  other  F32 [2, 2], was BF16 [4]" in lines
    rows = {row["name"]: row for row in cli("diff", a, b, "--json").json["tensors"]}
    assert {name: row["kind"] for name, row in rows.items()} == {
        "gone\x1b[2J": "removed",
        "new": "added",
        "other": "dense",
    }
    assert rows["other"]["base_dtype"] == "BF16"
    assert rows["other"]["base_shape"] == [4]
    assert rows["new"]["base_dtype"] is None


def test_many_whole_tensors_are_counted(cli: Cli, tmp_path: Path) -> None:
    a = write_safetensors(tmp_path / "a.safetensors", {"x": random_tensor("U8", (1,))})
    many = {f"t{n:03d}": random_tensor("U8", (1,)) for n in range(30)}
    b = write_safetensors(tmp_path / "b.safetensors", many)
    assert "and 11 more, which --json lists" in cli("diff", a, b).stdout


@pytest.mark.parametrize("flag", ["--json", "-q", ""])
def test_no_such_checkpoint(flag: str, cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    ran = cli("diff", checkpoints.base, tmp_path / "nope", *([flag] if flag else []))
    assert ran.code == 10
    assert str(tmp_path / "nope") in ran.stderr
    if flag == "--json":
        assert ran.json["error"]["file"] == str(tmp_path / "nope")


def test_auto_takes_one_and_says_by_what(
    cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    out = tmp_path / "delta"
    command = ("diff", checkpoints.base, checkpoints.result, "--encoding", "auto")
    found = cli(*command, "-o", out, "--json").json
    assert [row["encoding"] for row in found["advice"]] == list(ENCODINGS)
    best = min(found["advice"], key=lambda row: row["seconds"])
    assert found["encoding"] == best["encoding"] == open_delta(out).header.encoding
    slow = cli(*command, "--bandwidth", "1", "--json").json
    assert all(row["seconds"] >= row["bytes"] > 0 for row in slow["advice"])
    assert slow["encoding"] == min(slow["advice"], key=lambda row: row["bytes"])["encoding"]
    shown = cli(*command, "--bandwidth", "100M").stdout
    assert "made, shipped at 100 MB/s, decoded" in shown
    assert re.search(r"^taken: (\w+)$", shown, re.MULTILINE)


def test_without_auto_there_is_no_advice(cli: Cli, checkpoints: Checkpoints) -> None:
    command = ("diff", checkpoints.base, checkpoints.result)
    assert cli(*command, "--json").json["advice"] is None
    ran = cli(*command, "--bandwidth", "100M")
    assert ran.code == 2
    assert "--bandwidth is for --encoding auto" in ran.stderr
    assert cli(*command, "--encoding", "auto", "--bandwidth", "fast").code == 2
