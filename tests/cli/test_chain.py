"""push, pull, log, show and verify over one small chain, in each mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Checkpoints, Cli, state_of
from tests.support.checkpoints import flip_bit, read_tensors, write_safetensors

MODES = pytest.mark.parametrize("flag", ["", "--json", "-q"], ids=["human", "json", "quiet"])


def flags(flag: str) -> list[str]:
    return [flag] if flag else []


# push


def test_push_json(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    first = cli("push", checkpoints.base, bucket, "--json")
    assert (first.code, first.stderr) == (0, "")
    found = first.json
    assert (found["step"], found["kind"], found["written"]) == (1, "anchor", True)
    assert found["state"] == state_of(cli, checkpoints.base)
    assert found["changed_elements"] is None
    written = {name: (bucket / name).stat().st_size for name in found["files"]}
    assert found["bytes"] == sum(written.values())
    second = cli("push", checkpoints.result, bucket, "--json").json
    assert (second["step"], second["kind"], second["changed_elements"]) == (2, "delta", 30)
    assert second["files"] == ["deltas/step_000002.safetensors"]
    assert second["dry_run"] is False


def test_push_auto(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    auto = ("--encoding", "auto", "--bandwidth", "1")  # so slow that size alone counts
    first = cli("push", checkpoints.base, bucket, *auto, "--json").json
    assert first["encoding"] is first["advice"] is None
    second = cli("push", checkpoints.result, bucket, *auto, "--json").json
    best = min(second["advice"], key=lambda row: row["seconds"])
    assert second["encoding"] == best["encoding"]
    third = cli("push", checkpoints.steps[2], bucket, *auto)
    assert f"taken: {second['encoding']}\n" in third.stdout
    assert cli("push", checkpoints.base, bucket, "--bandwidth", "1").code == 2


def test_push_human(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    first = cli("push", checkpoints.base, bucket, "--step", 4)
    assert re.match(r"pushed step 4 as an anchor, [\d.]+ kB\n", first.stdout)
    second = cli("push", checkpoints.result, bucket, "--step", 6)
    assert re.match(r"pushed step 6 as a delta, [\d.]+ kB\n", second.stdout)
    assert "changed  30 of 3,104 elements" in second.stdout


def test_push_quiet(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    ran = cli("push", checkpoints.base, tmp_path / "bucket", "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")


@MODES
def test_push_the_same_step_again(
    flag: str, cli: Cli, checkpoints: Checkpoints, bucket: Path
) -> None:
    ran = cli("push", checkpoints.steps[2], bucket, "--step", 3, *flags(flag))
    assert (ran.code, ran.stderr) == (0, "")
    if flag == "--json":
        assert ran.json["written"] is False
        assert ran.json["bytes"] == 0
    if not flag:
        assert "step 3 is there already with the same content: nothing to do" in ran.stdout


@MODES
def test_push_other_content_conflicts(
    flag: str, cli: Cli, checkpoints: Checkpoints, bucket: Path
) -> None:
    ran = cli("push", checkpoints.base, bucket, "--step", 3, *flags(flag))
    assert ran.code == 11
    assert "the step is there with other content" in ran.stderr
    if flag == "--json":
        assert ran.json["error"]["step"] == 3


@pytest.mark.parametrize("short", ["-n", "--dry-run"])
def test_push_dry_run_writes_nothing(
    short: str, cli: Cli, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    ran = cli("push", checkpoints.base, bucket, short)
    assert ran.stdout.startswith("would push step 1 as an anchor, ")
    assert not bucket.exists()
    found = cli("push", checkpoints.base, bucket, short, "--json").json
    assert (found["dry_run"], found["step"], found["kind"]) == (True, 1, "anchor")
    assert found["written"] is False
    assert found["state"] == state_of(cli, checkpoints.base)


def test_push_a_delta_and_with_a_base(
    cli: Cli, checkpoints: Checkpoints, tmp_path: Path, delta: Path
) -> None:
    bucket = tmp_path / "bucket"
    cli("push", checkpoints.base, bucket)
    found = cli("push", delta, bucket, "--json").json
    assert (found["step"], found["kind"]) == (2, "delta")
    words = ("--base", checkpoints.result, "--encoding", "raw", "--json")
    assert cli("push", checkpoints.steps[2], bucket, *words).json["step"] == 3
    assert [row["encoding"] for row in cli("log", bucket, "--json").json["links"]] == [
        None,
        "ulp",
        "raw",
    ]


# pull


def test_pull_json(cli: Cli, checkpoints: Checkpoints, bucket: Path, tmp_path: Path) -> None:
    dest = tmp_path / "served"
    ran = cli("pull", bucket, dest, "--step", 2, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = ran.json
    assert (found["step"], found["links"], found["from_step"]) == (2, 2, None)
    assert found["state"] == state_of(cli, checkpoints.result)
    assert found["bytes_fetched"] > 0
    assert read_tensors(dest) == read_tensors(checkpoints.result)
    onward = cli("pull", bucket, dest, "--json").json
    assert (onward["step"], onward["from_step"], onward["written"]) == (3, 2, True)
    assert onward["bytes_fetched"] < found["bytes_fetched"]
    again = cli("pull", bucket, dest, "--json").json
    assert (again["written"], again["bytes_fetched"], again["proven"]) == (False, 0, True)


def test_pull_human(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    dest = tmp_path / "served"
    first = cli("pull", bucket, dest, "--step", 2)
    assert re.match(r"pulled step 2: 2 links, [\d.]+ kB\n", first.stdout)
    assert cli("pull", bucket, dest).stdout.startswith("pulled step 3 from step 2: 1 link, ")
    assert "holds step 3 already: nothing to do" in cli("pull", bucket, dest).stdout


def test_pull_quiet(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    ran = cli("pull", bucket, tmp_path / "served", "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")
    assert (tmp_path / "served" / "config.json").exists()


@MODES
def test_pull_no_such_step(flag: str, cli: Cli, bucket: Path, tmp_path: Path) -> None:
    ran = cli("pull", bucket, tmp_path / "served", "--step", 9, *flags(flag))
    assert ran.code == 10
    assert "step 9" in ran.stderr
    assert "hint: deltactl log" in ran.stderr
    if flag == "--json":
        assert ran.json["error"]["step"] == 9


def test_pull_warns_of_newer_steps_that_cannot_be_rebuilt(
    cli: Cli, bucket: Path, tmp_path: Path
) -> None:
    (bucket / "deltas" / "step_000002.safetensors").unlink()
    for name in (bucket / "anchors" / "step_000003").iterdir():
        name.unlink()
    ran = cli("pull", bucket, tmp_path / "served")
    assert ran.code == 0
    assert "pulled step 1" in ran.stdout
    assert ran.stderr.startswith("warning: newer steps cannot be rebuilt: 3")
    (tmp_path / "served2").mkdir()
    quiet = cli("pull", bucket, tmp_path / "served2", "-q")
    assert quiet.code == 0
    assert quiet.err.startswith(b"warning: newer steps cannot be rebuilt: 3")


# log


def test_log_json(cli: Cli, checkpoints: Checkpoints, bucket: Path) -> None:
    ran = cli("log", bucket, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    links = ran.json["links"]
    assert [(link["step"], link["kind"]) for link in links] == [
        (1, "anchor"),
        (2, "delta"),
        (3, "delta"),
        (3, "anchor"),
    ]
    states = [state_of(cli, path) for path in checkpoints.steps]
    assert [link["base_state"] for link in links] == [None, states[0], states[1], None]
    assert [link["result_state"] for link in links] == [*states, states[2]]
    assert [link["changed_elements"] for link in links] == [None, 30, 30, None]
    assert links[1]["sparsity"] == pytest.approx(1 - 30 / 3104)
    assert links[1]["bytes"] == (bucket / links[1]["name"]).stat().st_size
    assert ran.json["tip"] == 3
    assert ran.json["requests"] == 5
    assert 0 < ran.json["bytes_read"] < sum(link["bytes"] for link in links)
    assert ran.json["problems"] == []


def test_log_human(cli: Cli, bucket: Path) -> None:
    lines = cli("log", bucket).stdout.splitlines()
    assert lines[0].split() == ["step", "kind", "size", "changed", "sparsity", "base", "result"]
    assert re.match(r" +1  anchor +[\d.]+ kB +- +- +- +[0-9a-f]{12}$", lines[1])
    assert re.match(r" +2  delta +[\d.]+ kB +30 +99.03%  [0-9a-f]{12}  [0-9a-f]{12}$", lines[2])
    assert re.match(r"4 links, [\d.]+ kB; tip: step 3$", lines[-2])
    assert re.match(r"read [\d.]+ kB in 5 requests$", lines[-1])


def test_log_quiet(cli: Cli, bucket: Path) -> None:
    ran = cli("log", bucket, "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")


@MODES
def test_log_of_nothing(flag: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for bucket in (tmp_path / "empty", tmp_path / "none"):
        ran = cli("log", bucket, *flags(flag))
        assert ran.code == 10
        assert str(bucket) in ran.stderr


@MODES
def test_log_with_a_torn_link(flag: str, cli: Cli, bucket: Path) -> None:
    torn = bucket / "deltas" / "step_000002.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    ran = cli("log", bucket, *flags(flag))
    assert ran.code == 3
    assert "error: step 2, deltas/step_000002.safetensors: " in ran.stderr
    if flag == "--json":
        assert [link["step"] for link in ran.json["links"]] == [1, 3, 3]
        (problem,) = ran.json["problems"]
        assert problem["step"] == 2
        assert set(problem) == {"step", "file", "tensor", "what", "expected", "found"}


# show


def test_show_delta(cli: Cli, delta: Path) -> None:
    found = cli("show", delta, "--json").json
    (link,) = found["links"]
    assert found["requests"] == 0
    assert 8 < found["bytes_read"] < delta.stat().st_size
    assert (link["kind"], link["step"], link["encoding"]) == ("delta", 2, "ulp")
    assert link["bytes"] == delta.stat().st_size
    assert link["changed_elements"] == sum(row["changed"] for row in link["tensors"]) == 30
    assert link["metadata"]["format"] == "sparse_weight_patch"
    assert "deltactl.tensors" not in link["metadata"]
    human = cli("show", delta).stdout
    assert "base state" in human
    assert re.search(r"^model.layers.0.weight  sparse  BF16   \[32, 32\]", human, re.MULTILINE)
    assert cli("show", "-", stdin=delta.read_bytes()).code == 0
    quiet = cli("show", delta, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, b"", b"")


def test_show_step(cli: Cli, bucket: Path) -> None:
    found = cli("show", f"{bucket}@3", "--json").json
    links = found["links"]
    assert (found["requests"], found["bytes_read"] > 0) == (5, True)
    assert [link["kind"] for link in links] == ["delta", "anchor"]
    assert [row["name"] for row in links[1]["tensors"]][-1] == "model.norm.weight"
    assert re.fullmatch("[0-9a-f]{64}", links[1]["tensors"][0]["digest"])
    human = cli("show", f"{bucket}@3").stdout
    assert "kind            delta" in human
    assert "kind          anchor" in human
    assert re.search(r"^read [\d.]+ kB in 5 requests$", human, re.MULTILINE)


@pytest.mark.parametrize(
    ("target", "code"), [("{}@9", 10), ("{}/none@1", 10), ("{}", 2), ("{}/x.safetensors", 10)]
)
def test_show_what_is_not_there(target: str, code: int, cli: Cli, bucket: Path) -> None:
    ran = cli("show", target.format(bucket), "--json")
    assert ran.code == code
    assert ran.json["error"]["exit_code"] == code


# verify


@pytest.mark.parametrize("level", ["links", "data", "rebuild"])
def test_verify_json(level: str, cli: Cli, bucket: Path) -> None:
    ran = cli("verify", bucket, "--level", level, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = ran.json
    assert (found["ok"], found["level"], found["links"], found["steps"]) == (True, level, 4, 3)
    assert found["requests"] == 5
    assert found["errors"] == found["unproven"] == []
    assert found["bytes_read"] > 0


def test_verify_human_and_quiet(cli: Cli, bucket: Path) -> None:
    ran = cli("verify", bucket)
    assert (ran.code, ran.stderr) == (0, "")
    said = r"OK: 4 links, 3 steps verified \(level data, [\d.]+ kB read\)\n"
    assert re.fullmatch(said, ran.stdout)
    read = cli("verify", bucket, "--level", "links").stdout
    assert re.search(r"\(level links, [\d.]+ kB read in 5 requests\)$", read, re.MULTILINE)
    quiet = cli("verify", bucket, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, b"", b"")


@MODES
def test_verify_names_every_fault(flag: str, cli: Cli, bucket: Path) -> None:
    for step in (2, 3):
        path = bucket / "deltas" / f"step_{step:06d}.safetensors"
        flip_bit(path, path.stat().st_size - 1)
    ran = cli("verify", bucket, *flags(flag))
    assert ran.code == 3
    faults = ran.stderr.splitlines()
    assert len(faults) == 2
    for step, fault in zip((2, 3), faults, strict=True):
        assert fault.startswith(f"error: step {step}, deltas/step_{step:06d}.safetensors: ")
    if flag == "--json":
        found = ran.json
        assert found["ok"] is False
        assert [row["step"] for row in found["errors"]] == [2, 3]
        keys = {"step", "file", "tensor", "what", "expected", "found"}
        assert all(set(row) == keys for row in found["errors"])
    elif not flag:
        assert ran.stdout.startswith("FAILED: 2 errors in 4 links, 3 steps (level data, ")
    else:
        assert ran.stdout == ""


@MODES
def test_verify_of_nothing_is_no_pass(flag: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = cli("verify", tmp_path / "empty", *flags(flag))
    assert ran.code == 10
    assert "nothing to verify" in ran.stderr


@pytest.mark.parametrize(
    "command",
    [["log"], ["show"], ["stats"], ["verify"], ["pull", ..., "dest"], ["copy", ..., "dest"]],
    ids=lambda command: command[0],
)
def test_a_directory_without_a_chain_is_not_found_by_any_verb(
    command: list[Any], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    verb, *others = command
    ran = cli(verb, "empty@1" if verb == "show" else "empty", *others[1:])
    assert ran.code == 10, ran.stderr
    assert not (tmp_path / "dest").exists()


@MODES
def test_verify_of_no_bucket(flag: str, cli: Cli, tmp_path: Path) -> None:
    assert cli("verify", tmp_path / "none", *flags(flag)).code == 10


def test_verify_against(cli: Cli, checkpoints: Checkpoints, bucket: Path) -> None:
    assert cli("verify", bucket, "--against", checkpoints.steps[2]).code == 0
    assert cli("verify", bucket, "--against", checkpoints.result, "--step", 2).code == 0
    ran = cli("verify", bucket, "--against", checkpoints.result, "--json")
    assert ran.code == 3
    (first, *_) = ran.json["errors"]
    assert (first["step"], first["tensor"]) == (3, "model.layers.0.weight")
    assert re.search(r"element \d+", first["what"])
    assert first["expected"].startswith("0x")
    assert first["found"].startswith("0x")


def test_verify_delta(cli: Cli, delta: Path) -> None:
    assert cli("verify", delta, "--json").json["ok"] is True
    assert cli("verify", "-", stdin=delta.read_bytes()).code == 0
    assert cli("verify", delta, "--level", "rebuild").code == 2
    flip_bit(delta, delta.stat().st_size - 1)
    ran = cli("verify", delta, "--json")
    assert ran.code == 3
    assert ran.json["ok"] is False
    assert ran.json["errors"][0]["file"] == str(delta)


@pytest.mark.parametrize("kind", ["bucket", "delta"])
def test_verify_level_is_checked_before_anything_else(kind: str, cli: Cli, tmp_path: Path) -> None:
    ran = cli("verify", tmp_path / kind, "--level", "all")
    assert ran.code == 2
    assert "'links', 'data', 'rebuild'" in ran.stderr


# What TRL wrote


@pytest.fixture
def trl_bucket(tmp_path: Path, checkpoints: Checkpoints) -> Path:
    """An anchor and a delta as TRL's second dialect has them: no digest anywhere."""
    bucket = tmp_path / "trl"
    tensors = read_tensors(checkpoints.base)
    common = {"format": "sparse_weight_patch", "version": "1"}
    anchor = {**common, "sparse": "False", "model_version": "1"}
    write_safetensors(bucket / "anchors" / "step_000001.safetensors", tensors, anchor)
    indices = b"".join(n.to_bytes(4, "little") for n in (0, 7, 1023))
    name = "model.layers.1.weight"
    parts = {f"{name}.idx": ("I32", (3,), indices), f"{name}.val": ("BF16", (3,), bytes(6))}
    metadata = {
        **common,
        "sparse": "True",
        "model_version": "2",
        "num_changed_params": "1",
        "total_changed_elements": "3",
        "total_elements": "3104",
        "sparsity": "0.999",
        "encoding": "raw",
    }
    write_safetensors(bucket / "deltas" / "step_000002.safetensors", parts, metadata)
    return bucket


def test_trl_chain_is_unproven_unless_accepted(cli: Cli, trl_bucket: Path) -> None:
    ran = cli("verify", trl_bucket)
    assert ran.code == 3
    assert ran.stderr.count("warning: unproven: ") == 2
    assert ran.stdout.startswith("no errors in 2 links, 2 steps, 2 unproven (level data, ")
    accepted = cli("verify", trl_bucket, "--accept-unproven", "--json")
    assert accepted.code == 0
    assert (accepted.json["ok"], len(accepted.json["unproven"])) == (True, 2)
    assert cli("verify", trl_bucket / "deltas" / "step_000002.safetensors").code == 3


def test_trl_chain_is_listed_shown_and_pulled(
    cli: Cli, trl_bucket: Path, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    links = cli("log", trl_bucket, "--json").json["links"]
    assert [link["result_state"] for link in links] == [None, None]
    assert links[1]["changed_elements"] == 3
    assert cli("log", trl_bucket).stdout.splitlines()[2].split()[-2:] == ["-", "-"]
    (shown,) = cli("show", f"{trl_bucket}@2", "--json").json["links"]
    assert shown["dialect"].startswith("trl")
    assert shown["tensors"][0]["shape"] is None
    assert cli("show", f"{trl_bucket}@2").code == 0
    ran = cli("pull", trl_bucket, tmp_path / "served")
    assert ran.code == 0
    assert ran.stderr == "warning: the links name no digest: nothing proves the result\n"
    expected = read_tensors(checkpoints.base)
    dtype, shape, data = expected["model.layers.1.weight"]
    for n in (0, 7, 1023):
        data = data[: 2 * n] + bytes(2) + data[2 * n + 2 :]
    expected["model.layers.1.weight"] = (dtype, shape, data)
    assert read_tensors(tmp_path / "served") == expected


def test_trl_delta_is_applied_with_a_warning(
    cli: Cli, trl_bucket: Path, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    delta = trl_bucket / "deltas" / "step_000002.safetensors"
    ran = cli("apply", delta, checkpoints.base, "-o", tmp_path / "out", "--json")
    assert ran.code == 0
    assert (ran.json["proven"], ran.json["changed_elements"]) == (False, 3)
    assert ran.stderr == "warning: the delta names no digest: nothing proves the result\n"
