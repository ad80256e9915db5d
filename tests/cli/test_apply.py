"""``deltactl apply``, in each mode."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Checkpoints, Cli
from tests.support.checkpoints import flip_bit, read_tensors


def test_json(cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = cli("apply", delta, checkpoints.base, "-o", out, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    state = cli("diff", checkpoints.base, checkpoints.result, "--json").json["result_state"]
    assert ran.json == {
        "step": 2,
        "state": state,
        "changed_elements": 30,
        "written": True,
        "proven": True,
        "out": str(out),
    }
    assert read_tensors(out) == read_tensors(checkpoints.result)


def test_human_and_the_second_time(
    cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path
) -> None:
    first = cli("apply", delta, checkpoints.base, "-o", tmp_path / "out")
    assert first.stdout.startswith("applied the delta, step 2: 30 elements changed\n")
    again = cli("apply", delta, checkpoints.base, "-o", tmp_path / "out")
    assert again.code == 0
    assert "holds the delta's result already, step 2: nothing to do" in again.stdout


def test_quiet(cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path) -> None:
    ran = cli("apply", delta, checkpoints.base, "-o", tmp_path / "out", "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")


def test_in_place(cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoints.base, model)
    first = cli("apply", delta, model, "--in-place", "--json").json
    assert (first["written"], first["out"]) == (True, str(model))
    assert read_tensors(model) == read_tensors(checkpoints.result)
    assert (model / "config.json").exists()
    again = cli("apply", "--in-place", delta, model, "--json").json
    assert (again["written"], again["state"]) == (False, first["state"])


def test_a_delta_on_stdin(cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = cli("apply", "-", checkpoints.base, "-o", out, stdin=delta.read_bytes())
    assert ran.code == 0
    assert read_tensors(out) == read_tensors(checkpoints.result)


@pytest.mark.parametrize("flag", ["--json", "-q", ""])
def test_another_base_is_refused(
    flag: str, cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = [flag] if flag else []
    ran = cli("apply", delta, checkpoints.steps[2], "-o", out, *flags)
    assert ran.code == 11
    assert "wrong base" in ran.stderr
    assert not out.exists()
    if flag == "--json":
        assert ran.json["error"]["exit_code"] == 11


def test_a_flipped_bit_is_caught(
    cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path
) -> None:
    flip_bit(delta, delta.stat().st_size - 1)
    out = tmp_path / "out"
    ran = cli("apply", delta, checkpoints.base, "-o", out)
    assert ran.code == 3
    assert str(delta) in ran.stderr
    assert not out.exists()
