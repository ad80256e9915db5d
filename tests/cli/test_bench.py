"""``deltactl bench``, in each mode."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

from deltactl.bench import catch_up, run
from deltactl.bench.peers import PEERS
from deltactl.cli import bench as verb
from deltactl.codec import ENCODINGS
from tests.cli.conftest import Checkpoints, Cli


@pytest.fixture(autouse=True)
def small_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "LINKS", (1, 3))
    monkeypatch.setattr(catch_up, "PARAMS", 1 << 16)


def test_json_has_the_keys_that_are_documented(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("bench", checkpoints.base, checkpoints.result, "--rounds", 1, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = ran.json
    documented = cli("bench", "--help").stdout.partition("JSON")[2]
    for key in found:
        assert re.search(rf"^  {key} ", documented, re.MULTILINE)
    stages = {"encode", "decode", "apply", "rebuild"}
    for row in found["encodings"]:
        assert stages < row.keys()
        for key in row.keys() - stages | {k for stage in stages for k in row[stage]}:
            assert key in documented
    for part in (found["machine"], found["checkpoint"], found["limits"], found["peers"][0]):
        assert all(key in documented for key in part)
    assert all(key in documented for key in found["catch_up"][0])


def test_human_on_made_checkpoints(cli: Cli, tmp_path: Path) -> None:
    ran = cli("bench", "--params", 1 << 18, "--rounds", 1, "--scratch", tmp_path)
    assert (ran.code, ran.stderr) == (0, "")
    assert "made, one step at learning rate 1e-06" in ran.stdout
    assert "of 262,144 elements" in ran.stdout
    assert "medians of 1 round\n" in ran.stdout
    for name in (*ENCODINGS, *(peer.name for peer in PEERS), "read and BLAKE3 both"):
        assert re.search(rf"^{re.escape(name)}  ", ran.stdout, re.MULTILINE)
    assert re.search(r"^ +3 .* ns$", ran.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_said(
    cli: Cli, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = replace(PEERS[0], needs="no-such-tool-anywhere")
    monkeypatch.setattr(run, "PEERS", (missing,))
    ran = cli("bench", checkpoints.base, checkpoints.result, "--rounds", 1)
    assert re.search(rf"^{re.escape(missing.name)} .* not installed$", ran.stdout, re.MULTILINE)


def test_identical_checkpoints(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("bench", checkpoints.base, checkpoints.base, "--rounds", 1)
    assert (ran.code, ran.stderr) == (0, "")
    assert re.search(r"^changed +0 of ", ran.stdout, re.MULTILINE)


def test_quiet(cli: Cli, checkpoints: Checkpoints) -> None:
    ran = cli("bench", checkpoints.base, checkpoints.result, "--rounds", 1, "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")


def test_misuse(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    base, result = checkpoints.base, checkpoints.result
    assert cli("bench", base).code == 2
    assert cli("bench", base, result, "--params", 1000).code == 2
    assert cli("bench", "--rounds", 0).code == 2
    assert cli("bench", base, tmp_path / "missing").code == 10
    ran = cli("bench", base, result, "--scratch", tmp_path / "missing")
    assert ran.code == 10
    assert "hint: mkdir" in ran.stderr


def test_the_defaults_are_the_librarys() -> None:
    assert verb._PARAMS == run.PARAMS
    assert signature(verb.bench).parameters["rounds"].default == run.ROUNDS
