"""``deltactl copy`` in each of its modes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Checkpoints, Cli
from tests.support.chains import content
from tests.support.checkpoints import flip_bit, read_tensors
from tests.support.trl_writer import write_chain


def test_json(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    ran = cli("copy", bucket, dest, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    size = sum(map(len, content(bucket).values()))
    assert ran.json == {
        "links": 4,
        "copied": 4,
        "skipped": 0,
        "bytes": size,
        "first_step": 1,
        "last_step": 3,
        "tip": 3,
        "proven": True,
        "dry_run": False,
    }
    assert content(dest) == content(bucket)
    again = cli("copy", bucket, dest, "--json").json
    assert (again["copied"], again["skipped"], again["bytes"]) == (0, 4, 0)


def test_human_and_quiet(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    lines = cli("copy", bucket, dest, "--dry-run").stdout.splitlines()
    assert re.fullmatch(r"would copy 4 links, [\d.]+ kB", lines[0])
    assert lines[1:] == ["steps   1 to 3", "tip     3", f"output  {dest}"]
    assert not dest.exists()
    shutil.copytree(bucket / "anchors/step_000001", dest / "anchors/step_000001")
    first = cli("copy", bucket, dest).stdout.splitlines()[0]
    assert re.fullmatch(r"copied 3 links, [\d.]+ kB; 1 there already", first)
    assert cli("copy", bucket, dest).stdout.startswith(f"{dest} holds all 4 links already")
    quiet = cli("copy", bucket, tmp_path / "other", "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, b"", b"")
    assert content(tmp_path / "other") == content(bucket)


def test_from_step(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    found = cli("copy", bucket, tmp_path / "dest", "--from-step", 3, "--json").json
    assert (found["links"], found["first_step"], found["tip"]) == (1, 3, 3)
    assert cli("verify", tmp_path / "dest", "--level", "rebuild").code == 0


def test_exit_statuses(cli: Cli, bucket: Path, tmp_path: Path, checkpoints: Checkpoints) -> None:
    assert cli("copy", bucket, bucket).code == 2
    assert cli("copy", tmp_path / "none", tmp_path / "dest").code == 10
    assert cli("copy", bucket, tmp_path / "dest", "--from-step", 0).code == 10
    assert cli("push", checkpoints.steps[1], tmp_path / "dest").code == 0
    ran = cli("copy", bucket, tmp_path / "dest", "--json")
    assert (ran.code, ran.json["error"]["exit_code"]) == (11, 11)


@pytest.mark.parametrize("flag", [(), ("--json",), ("-q",)], ids=["human", "json", "quiet"])
def test_a_fault_is_named_and_what_is_before_it_is_there(
    cli: Cli, bucket: Path, tmp_path: Path, flag: tuple[str, ...]
) -> None:
    delta = bucket / "deltas/step_000003.safetensors"
    flip_bit(delta, delta.stat().st_size - 1)
    ran = cli("copy", bucket, tmp_path / "dest", *flag)
    assert ran.code == 3
    assert "step 3, deltas/step_000003.safetensors: the payload does not have" in ran.stderr
    assert f"hint: deltactl verify {bucket}" in ran.stderr
    assert cli("log", tmp_path / "dest", "--json").json["tip"] == 2
    if flag == ("--json",):
        assert ran.json["error"]["step"] == 3


def test_what_trl_wrote_is_copied_with_a_warning(
    cli: Cli, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    write_chain(tmp_path / "trl", [read_tensors(p) for p in checkpoints.steps], "raw")
    ran = cli("copy", tmp_path / "trl", tmp_path / "dest", "--json")
    assert (ran.code, ran.json["proven"]) == (0, False)
    assert ran.stderr.startswith("warning: some links name no digest")
