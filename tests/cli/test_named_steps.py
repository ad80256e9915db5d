"""Steps by their number, as ``latest``, and from the tip back: wherever one is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Checkpoints, Cli, state_of
from tests.support.checkpoints import read_tensors

NAMES = [("latest", 3), ("-1", 3), ("-2", 2), ("-3", 1), ("2", 2)]


@pytest.mark.parametrize(("name", "step"), NAMES)
def test_every_verb_means_the_same_step(
    name: str, step: int, cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    place = f"{bucket}@{name}"
    assert {link["step"] for link in cli("show", place, "--json").json["links"]} == {step}
    assert cli("pull", place, tmp_path / "a", "--json").json["step"] == step
    assert cli("pull", bucket, tmp_path / "b", "--step", name, "--json").json["step"] == step
    held = checkpoints.steps[step - 1]
    assert read_tensors(tmp_path / "a") == read_tensors(tmp_path / "b") == read_tensors(held)
    assert cli("verify", place, "--against", held).code == 0
    assert cli("verify", bucket, "--against", held, "--step", name).code == 0
    other = checkpoints.steps[step % 3]
    assert cli("verify", place, "--against", other).code == 3


@pytest.mark.parametrize("verb", [("show",), ("pull", "out")])
def test_more_steps_back_than_there_are(verb: tuple[str, ...], cli: Cli, bucket: Path) -> None:
    ran = cli(verb[0], f"{bucket}@-4", *verb[1:])
    assert ran.code == 10
    assert "the chain has fewer steps than that; expected 4 steps, found 3 up to" in ran.stderr


def test_two_steps_are_one_too_many(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    ran = cli("pull", f"{bucket}@2", tmp_path / "out", "--step", 3)
    assert (ran.code, (tmp_path / "out").exists()) == (2, False)
    assert cli("pull", f"{bucket}@2", tmp_path / "out", "--step", 2).code == 0


@pytest.mark.parametrize("word", ["newest", "1.5", "--2", ""])
def test_what_is_no_step(word: str, cli: Cli, bucket: Path, tmp_path: Path) -> None:
    ran = cli("pull", bucket, tmp_path / "out", "--step", word)
    assert ran.code == 2
    assert "is not a step: a number, latest, or -2" in ran.stderr


@pytest.mark.parametrize("step", ["", "@", "@abc", "@1.5", "@LATEST"])
def test_the_hint_for_what_is_no_step_can_be_followed(step: str, cli: Cli, bucket: Path) -> None:
    ran = cli("show", f"{bucket}{step}")
    assert ran.code == 2
    assert ran.stderr.endswith(f"hint: deltactl show {bucket}@STEP\n")


# The delta of a step, onto a checkpoint.


@pytest.mark.parametrize("name", ["3", "latest"])
def test_apply_a_step_of_a_chain(
    name: str, cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = cli("apply", f"{bucket}@{name}", checkpoints.steps[1], "-o", out, "--json").json
    assert (found["step"], found["written"]) == (3, True)
    assert found["state"] == state_of(cli, checkpoints.steps[2])
    assert read_tensors(out) == read_tensors(checkpoints.steps[2])


def test_newer_steps_that_cannot_be_rebuilt_are_told(
    cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    (torn,) = bucket.glob("deltas/step_000003*")
    torn.write_bytes(torn.read_bytes()[:-1])
    for anchor in bucket.glob("anchors/step_000003*"):
        shutil.rmtree(anchor)
    place = f"{bucket}@latest"
    ran = cli("apply", place, checkpoints.base, "-o", tmp_path / "out", "--json")
    assert ran.json["step"] == 2
    assert ran.stderr.startswith("warning: newer steps cannot be rebuilt: 3; ")


def test_a_step_onto_another_base(
    cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    ran = cli("apply", f"{bucket}@3", checkpoints.steps[0], "-o", tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (11, False)
    assert ran.stderr.startswith("error: step 3, deltas/step_000003.safetensors: wrong base: ")
    assert f"hint: deltactl pull {bucket}@3 DEST" in ran.stderr


def test_a_step_that_has_an_anchor_alone(
    cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    ran = cli("apply", f"{bucket}@1", checkpoints.base, "-o", tmp_path / "out")
    assert ran.code == 10
    assert f"hint: deltactl pull {bucket}@1 DEST" in ran.stderr


def test_a_file_whose_name_ends_like_a_step(
    cli: Cli, checkpoints: Checkpoints, delta: Path, tmp_path: Path
) -> None:
    named = delta.rename(tmp_path / "delta@2")
    ran = cli("apply", named, checkpoints.base, "-o", tmp_path / "out", "--json")
    assert ran.json["state"] == state_of(cli, checkpoints.result)


def test_a_chain_without_a_step(cli: Cli, checkpoints: Checkpoints, bucket: Path) -> None:
    ran = cli("apply", bucket, checkpoints.base, "-o", "out")
    assert ran.code == 2
    assert f"hint: name a step: deltactl apply {bucket}@STEP" in ran.stderr


WHOLE = [
    ("log",), ("stats",), ("clean",), ("copy", "elsewhere"), ("push",),
]  # fmt: skip


@pytest.mark.parametrize("verb", WHOLE, ids=lambda verb: verb[0])
@pytest.mark.parametrize("name", ["2", "latest", "-1"])
def test_who_takes_a_whole_chain_refuses_a_step(
    verb: tuple[str, ...], name: str, cli: Cli, checkpoints: Checkpoints, bucket: Path
) -> None:
    """It made a new chain beside the one that was meant."""
    source = [checkpoints.base] if verb[0] == "push" else []
    ran = cli(verb[0], *source, f"{bucket}@{name}", *verb[1:])
    assert ran.code == 2
    assert f"hint: leave out the step: {bucket}; " in ran.stderr
    assert [path.name for path in bucket.parent.glob(f"{bucket.name}*")] == [bucket.name]


def test_a_bucket_whose_name_ends_like_a_step(
    cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    place = tmp_path / "run@5"
    assert cli("push", checkpoints.base, f"{place}/").code == 0
    assert cli("log", place).code == cli("push", checkpoints.result, place).code == 0
    assert cli("copy", f"{place}/", f"{tmp_path / 'copy@6'}/").code == 0


# The last links.


def test_the_last_links(cli: Cli, bucket: Path) -> None:
    everything = cli("log", bucket, "--json").json
    for count in (1, 2, 4, 99):
        found = cli("log", "-n", count, bucket, "--json").json
        assert found["links"] == everything["links"][-count:]
        assert found["tip"] == 3
    lines = cli("log", "--max-count", 1, bucket).stdout.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("the last 1 of ")
    assert cli("log", "-n", 0, bucket).code == 2


# Completion.


def completed(process: Cli, line: str) -> list[str]:
    asked = {
        "_DELTACTL_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": f"deltactl {line}",
    }
    return process(env=asked).stdout.split()


@pytest.mark.parametrize("verb", ["show", "pull", "verify", "apply"])
def test_steps_are_completed_after_the_at(verb: str, process: Cli, bucket: Path) -> None:
    steps = ["latest", "3", "2", "1"]
    assert completed(process, f"{verb} {bucket}@") == [f"{bucket}@{step}" for step in steps]
    assert completed(process, f"{verb} {bucket}@la") == [f"{bucket}@latest"]


@pytest.mark.parametrize("verb", ["pull", "verify"])
def test_steps_are_completed_for_the_option(verb: str, process: Cli, bucket: Path) -> None:
    assert completed(process, f"{verb} {bucket} --step ") == ["latest", "3", "2", "1"]


def test_of_no_bucket_no_steps_are_completed(process: Cli, tmp_path: Path) -> None:
    assert completed(process, f"show {tmp_path / 'none'}@9") == []


# What a bug report needs.


def test_the_environment_without_a_secret(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVERYSECRET")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:verysecret@proxy")
    found: Any = cli("env", "--json").json
    assert found["credentials"]["hf"][0] == "HF_TOKEN"
    assert found["credentials"]["s3"][0] == "AWS_ACCESS_KEY_ID"
    assert "HTTPS_PROXY" in found["variables"]
    assert found["packages"]["numpy"]
    assert found["cache"] == os.environ["DELTACTL_CACHE"]
    for words in (["env"], ["env", "--json"]):
        assert "verysecret" not in cli(*words).stdout.lower()


def test_the_cache_is_measured(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert cli("env", "--json").json["cache_bytes"] == 0
    cli("push", checkpoints.base, tmp_path / "bucket")
    found = cli("env", "--json").json
    files = [path for path in Path(found["cache"]).rglob("*") if path.is_file()]
    assert found["cache_bytes"] == sum(path.stat().st_size for path in files) > 0
