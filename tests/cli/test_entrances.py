"""What the commands say at the doors of a chain: foreign files, other models, a trainer's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Checkpoints, Cli
from tests.support.chains import content
from tests.support.checkpoints import random_weights, write_hf_directory
from tests.support.foreign import FOREIGN, LFS

MODES = pytest.mark.parametrize("flag", ["", "--json", "-q"])


def flags(flag: str) -> list[str]:
    return [flag] if flag else []


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of another architecture."""
    tensors = {f"h.{n}.weight": random_weights("BF16", (8, 8), n) for n in range(3)}
    config = {"config.json": json.dumps({"model_type": "other"})}
    return write_hf_directory(tmp_path / "other", tensors, aux=config)


@pytest.mark.parametrize("name", ["xor directory", "skyrl file", "our delta", "lfs pointer"])
@pytest.mark.parametrize("flag", ["", "--json"])
def test_what_is_no_checkpoint_is_named_by_every_verb(
    name: str, flag: str, cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    make, word = FOREIGN[name]
    (tmp_path / "made").mkdir()
    path, base = make(tmp_path / "made"), checkpoints.base
    delta = tmp_path / "step_2.delta"
    assert cli("diff", base, checkpoints.result, "-o", delta).code == 0
    for command in (
        ("diff", base, path),
        ("diff", path, base),
        ("stats", base, path),
        ("verify", bucket, "--against", path),
        ("push", checkpoints.base, bucket, "--base", path, "--step", 9),
        ("apply", delta, path, "-o", tmp_path / "out"),
        *([] if name == "our delta" else [("push", path, bucket)]),
    ):
        ran = cli(*command, *flags(flag))
        assert ran.code == 1, command
        assert word in ran.stderr
        assert "\nhint: " in ran.stderr
        if flag:
            assert word in ran.json["error"]["what"]
            assert ran.json["error"]["file"] == str(path)
            assert ran.json["error"]["hint"]
    assert not (tmp_path / "out").exists()


def test_the_command_for_a_git_lfs_pointer(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text(LFS)
    ran = cli("push", tmp_path, tmp_path / "bucket")
    assert ran.code == 1
    assert ran.stderr.splitlines() == [
        f"error: {tmp_path}/model.safetensors: a Git LFS pointer, in the place of the file that "
        "was not fetched; expected 4976698672 bytes, found a pointer of 135 bytes",
        f"hint: git -C {tmp_path} lfs pull",
    ]
    assert not (tmp_path / "bucket").exists()


@MODES
def test_another_model(flag: str, cli: Cli, bucket: Path, other: Path) -> None:
    was = content(bucket)
    ran = cli("push", other, bucket, *flags(flag))
    assert ran.code == 11
    assert ran.stderr.startswith(
        f"error: {other}: another model than the chain's tip, step 3: tiny became other; "
        "4 of 4 names are gone"
    )
    assert f"deltactl push {other} {bucket} --allow-other-model" in ran.stderr
    if flag == "--json":
        assert ran.json["error"]["step"] is None  # 3 is the tip, and 4 was to be
    assert content(bucket) == was
    meant = cli("push", other, bucket, "--allow-other-model", *flags(flag))
    assert meant.code == 0
    assert "warning: tiny became other\n" in meant.stderr
    if flag == "--json":
        assert (meant.json["kind"], meant.json["step"]) == ("anchor", 4)
        assert meant.json["notes"][0] == "tiny became other"
    if not flag:
        assert meant.stdout.startswith("pushed step 4 as an anchor, ")
    assert cli("verify", bucket, "--level", "rebuild").code == 0


@MODES
def test_a_new_head_is_said(flag: str, cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.weight": random_weights("BF16", (32, 32), n) for n in range(3)}
    bucket = tmp_path / "to"
    assert cli("push", write_hf_directory(tmp_path / "a", tensors), bucket).code == 0
    tensors["score.weight"] = random_weights("BF16", (1, 32), 7)
    ran = cli("push", write_hf_directory(tmp_path / "b", tensors), bucket, *flags(flag))
    assert ran.code == 0
    assert ran.stderr == "warning: 1 tensor is new: score.weight\n"
    if flag == "--json":
        assert ran.json["notes"] == ["1 tensor is new: score.weight"]


@MODES
def test_the_tip_again(flag: str, cli: Cli, checkpoints: Checkpoints, bucket: Path) -> None:
    was = content(bucket)
    ran = cli("push", checkpoints.steps[2], bucket, "--anchor-every", 3, *flags(flag))
    assert (ran.code, ran.stderr) == (0, "")
    if flag == "--json":
        assert (ran.json["written"], ran.json["step"], ran.json["files"]) == (False, 3, [])
    if not flag:
        assert ran.stdout == (
            "already the tip, step 3: nothing to do\n"
            "--step 4 would publish it as a step of its own\n"
        )
    assert content(bucket) == was
    assert cli("push", checkpoints.steps[2], bucket, "--step", 4).code == 0


@MODES
def test_a_trainers_directory(
    flag: str, cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "run"
    assert cli("pull", bucket, dest, "--step", 1).code == 0
    (dest / "optimizer.pt").write_bytes(b"moments")
    was = content(dest)
    ran = cli("pull", bucket, dest, *flags(flag))
    assert ran.code == 11
    assert "a trainer keeps its state in the destination" in ran.stderr
    assert f"deltactl pull {bucket} {dest} --force" in ran.stderr
    if flag == "--json":
        assert ran.json["error"]["found"] == "optimizer.pt"
    assert content(dest) == was
    assert cli("pull", bucket, dest, "--force", *flags(flag)).code == 0
    assert (dest / "optimizer.pt").read_bytes() == b"moments"
    assert cli("diff", dest, checkpoints.steps[2], "--exit-code").code == 0


@MODES
def test_a_link_that_replaces_everything(flag: str, cli: Cli, bucket: Path, other: Path) -> None:
    name = "anchors/step_000004/model.safetensors.index.json"
    said = f"warning: {name} keeps almost nothing of the step before: another model may begin there"
    assert said not in cli("verify", bucket).stderr
    assert cli("push", other, bucket, "--allow-other-model").code == 0
    ran = cli("log", bucket, *flags(flag))
    if flag == "--json":
        assert [link["replaces_all"] for link in ran.json["links"]] == [False] * 4 + [True]
    if not flag:
        assert [line.split()[-3] for line in ran.stdout.splitlines()[1:6]][-1] == "replaced"
    ran = cli("verify", bucket, *flags(flag))
    assert (ran.code, ran.stderr) == (0, f"{said}\n")
    if flag == "--json":
        assert ran.json["replaced"] == [name]


@MODES
def test_another_runs_weights(flag: str, cli: Cli, tmp_path: Path) -> None:
    bucket = tmp_path / "to"
    for n in range(2):
        tensors = {f"h.{m}.weight": random_weights("BF16", (8, 64), 10 * n + m) for m in range(3)}
        ran = cli("push", write_hf_directory(tmp_path / f"{n}", tensors), bucket, *flags(flag))
        assert ran.code == 0
    said = "1,536 of 1,536 elements changed: these look like another run's weights"
    assert ran.stderr == f"warning: {said}\n"
    name = "deltas/step_000002.safetensors"
    kept = f"warning: {name} keeps almost nothing of the step before: another model may begin"
    shown = cli("log", bucket, *flags(flag))
    verified = cli("verify", bucket, *flags(flag))
    assert (shown.code, verified.code) == (0, 0)
    assert verified.stderr == f"{kept} there\n"
    if flag == "--json":
        assert ran.json["notes"] == [said]
        assert [link["replaces_all"] for link in shown.json["links"]] == [False, True]
        assert verified.json["replaced"] == [name]
    if not flag:
        assert shown.stdout.splitlines()[2].split()[-3] == "replaced"


@MODES
def test_a_delta_where_there_is_no_chain(
    flag: str, cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    delta = tmp_path / "step_2.delta"
    assert cli("diff", checkpoints.base, checkpoints.result, "-o", delta).code == 0
    ran = cli("push", delta, tmp_path / "to", *flags(flag))
    assert ran.code == 11
    assert ran.stderr.splitlines()[-1] == (
        "hint: the chain begins with a checkpoint: push the one that the delta stands on first"
    )
    assert not (tmp_path / "to").exists()
