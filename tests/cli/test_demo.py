"""``deltactl demo``: a real run, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deltactl.cli import demo
from deltactl.cli.app import app

Captured = pytest.CaptureFixture[str]


def run(*args: object, status: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        app(list(map(str, args)))
    assert end.value.code == status


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for temporary directories, so that a test can see whether one is left."""
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def left(temporary: Path) -> list[Path]:
    return list(temporary.glob("deltactl*"))  # importing torch may leave something of its own


def test_json_tells_of_every_step_and_nothing_is_left(temporary: Path, capfd: Captured) -> None:
    before = os.environ["DELTACTL_CACHE"]
    run("demo", "--steps", 3, "--json")
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["ok"], found["equal"], found["differing"]) == (True, True, [])
    steps = found["steps"]
    assert [(row["step"], row["kind"]) for row in steps] == [
        (1, "anchor"),
        (2, "delta"),
        (3, "delta"),
    ]
    assert steps[0]["changed_elements"] is steps[0]["sparsity"] is None
    for row in steps[1:]:
        assert 0.9 < row["sparsity"] < 1
        assert row["times_smaller"] == found["checkpoint_bytes"] / row["bytes"] > 20
    assert found["verify"] == {"ok": True, "level": "rebuild", "links": 3, "errors": []}
    assert found["pull"]["step"] == 3
    assert found["pull"]["state"] == found["trainer_state"] == steps[-1]["state"]
    assert found["directory"] is found["bucket"] is None
    assert left(temporary) == []
    assert os.environ["DELTACTL_CACHE"] == before


def test_account_ends_with_commands_that_work(tmp_path: Path, capfd: Captured) -> None:
    kept = tmp_path / "kept here"
    run("demo", kept)
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert [row[0] for row in rows] == [str(step) for step in range(1, 13)]
    done = r"ok: step 12 pulled from the chain equals the trainer's, [\d,]+ elements, bit for bit"
    assert any(re.fullmatch(done, line) for line in lines)
    commands = [shlex.split(line) for line in lines[lines.index("try next:") + 1 :]]
    assert [command[:2] for command in commands] == [
        ["deltactl", verb] for verb in ("log", "show", "verify")
    ]
    for command in commands:
        run(*command[1:])
    assert sorted(path.name for path in kept.iterdir()) == ["bucket", "pulled", "trainer"]


def test_quiet_says_nothing(temporary: Path, capfd: Captured) -> None:
    run("demo", "--steps", 1, "-q")
    assert capfd.readouterr() == ("", "")
    assert left(temporary) == []


def test_directory_that_holds_something_is_left_alone(tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "mine").write_text("x")
    run("demo", tmp_path, status=11)
    assert "not empty" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_file_is_no_directory(tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "mine").write_text("x")
    run("demo", tmp_path / "mine", status=2)
    assert "is a file" in capfd.readouterr().err


def test_no_steps_are_no_demo() -> None:
    run("demo", "--steps", 0, status=2)


def test_missing_library_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setattr(
        demo, "find_spec", lambda name: None if name == "transformers" else object()
    )
    run("demo", status=1)
    err = capfd.readouterr().err
    assert "transformers" in err
    assert "pip install 'deltactl[demo]'" in err


def test_one_wrong_bit_in_what_was_pulled_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    from deltactl.ops import pull

    sound = pull.pull

    def unsound(bucket: Any, dest: Path, **options: Any) -> Any:
        report = sound(bucket, dest, **options)
        file = min(dest.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        return report

    monkeypatch.setattr(pull, "pull", unsound)
    run("demo", "--steps", 2, "--json", status=3)
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (found["ok"], found["equal"], len(found["differing"])) == (False, False, 1)
    assert found["differing"][0] in err


def test_fault_in_the_chain_is_found(monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    from deltactl.core.errors import Malformed
    from deltactl.ops import verify

    sound = verify.verify_bucket

    def unsound(bucket: Any, **options: Any) -> Any:
        report = sound(bucket, **options)
        report.errors.append(Malformed("torn", file="deltas/x", step=2).facts())
        return report

    monkeypatch.setattr(verify, "verify_bucket", unsound)
    run("demo", "--steps", 2, status=3)
    out, err = capfd.readouterr()
    assert "1 fault" in out
    assert "ok:" not in out
    assert "deltas/x: torn" in err
