"""From errors to exit statuses, and what is printed with each."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltactl.bucket.local import LocalBucket
from deltactl.bucket.retrying import RetryingBucket
from deltactl.chain.reading import read_chain
from deltactl.cli.app import app
from deltactl.cli.interface import exits
from deltactl.core import errors
from tests.cli.conftest import COMMAND, Checkpoints, Cli

LIBRARY = [
    (errors.DeltactlError("w"), 1),
    (errors.Unsupported("w"), 1),
    (errors.UsageError("w"), 2),
    (errors.Malformed("w"), 3),
    (errors.Unproven("w"), 3),
    (errors.NotAllowed("w"), 4),
    (errors.Transient("w"), 5),
    (errors.NotFound("w"), 10),
    (errors.Conflict("w"), 11),
]

SYSTEM: list[tuple[BaseException, int]] = [
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "f"), 10),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "f"), 10),
    (PermissionError(errno.EACCES, "Permission denied", "f"), 4),
    (PermissionError(errno.EPERM, "Operation not permitted", "f"), 4),
    (OSError(errno.EROFS, "Read-only file system", "f"), 4),
    (OSError(errno.ENOSPC, "No space left on device", "f"), 1),
    (OSError(errno.EIO, "Input/output error", "f"), 1),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 5),
    (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), 5),
    (MemoryError(), 1),
]


def raising(error: BaseException) -> Any:
    def function(*_args: object, **_options: object) -> None:
        raise error

    return function


def test_every_error_of_the_library_has_a_case_here() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    kinds = {kind for kind in kinds if issubclass(kind, errors.DeltactlError)}
    assert {type(error) for error, _ in LIBRARY} == kinds


@pytest.mark.parametrize(("error", "code"), [*LIBRARY, *SYSTEM], ids=lambda x: repr(x))
def test_an_error_gives_its_status_and_one_message(
    error: BaseException, code: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltactl.chain.reading.read_chain", raising(error))
    ran = cli("log", "bucket")
    assert ran.code == code
    assert code in exits.MEANINGS
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: ")


@pytest.mark.parametrize("option", [None, "--quiet", "--json"])
def test_that_a_bucket_is_waited_for_is_a_warning(
    option: str | None, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the library logs; nothing of it stays when the command has ended."""
    now, handlers = [0.0], list(logging.getLogger("deltactl").handlers)
    bucket = RetryingBucket(
        LocalBucket(tmp_path),
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
        draw=lambda: 1.0,
    )
    monkeypatch.setattr(LocalBucket, "list", raising(errors.Transient("away", file="s3://b")))
    monkeypatch.setattr("deltactl.bucket.open_bucket", lambda *_, **__: bucket)
    ran = cli("log", "s3://b", *([] if option is None else [option]))
    assert ran.code == 5
    warning = "warning: waiting for the bucket, for up to 57 s more: s3://b: away\n"
    assert ran.stderr.startswith(warning + "error: s3://b: away (tried ")
    assert option != "--json" or json.loads(ran.stdout)["error"]["exit_code"] == 5
    assert logging.getLogger("deltactl").handlers == handlers


def test_all_facts_are_printed_and_are_in_the_json(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = errors.Malformed(
        "the digest differs",
        file="deltas/step_000007.safetensors",
        tensor="lm_head.weight",
        step=7,
        expected="aa",
        found="bb",
        hint="deltactl verify b",
    )
    monkeypatch.setattr("deltactl.chain.reading.read_chain", raising(error))
    human, quiet, made = cli("log", "b"), cli("log", "b", "-q"), cli("log", "b", "--json")
    message, hint = human.stderr.splitlines()
    assert message.startswith("error: step 7, deltas/step_000007.safetensors, tensor 'lm_head.wei")
    assert message.endswith("the digest differs; expected aa, found bb")
    assert hint == "hint: deltactl verify b"
    assert quiet.stderr == made.stderr == human.stderr
    assert quiet.stdout == ""
    assert made.json == {
        "error": {
            "what": "the digest differs",
            "file": "deltas/step_000007.safetensors",
            "tensor": "lm_head.weight",
            "step": 7,
            "expected": "aa",
            "found": "bb",
            "hint": "deltactl verify b",
            "exit_code": 3,
        }
    }


def test_an_unexpected_exception_keeps_its_traceback_and_the_json_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltactl.chain.reading.read_chain", raising(KeyError("x")))
    result = CliRunner().invoke(app, ["log", "b", "--json"])
    assert isinstance(result.exception, KeyError)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["what"] == "internal error: KeyError: 'x'"


@pytest.mark.parametrize("fails", [False, True])
def test_json_stands_alone_on_stdout_whatever_libraries_print(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def noisy(*args: Any) -> Any:
        print("no accelerator found")
        if fails:
            raise errors.Transient("away")
        return read_chain(*args)

    monkeypatch.setattr("deltactl.chain.reading.read_chain", noisy)
    result = CliRunner().invoke(app, ["log", str(bucket), "--json"])
    assert ("error" in json.loads(result.stdout)) == fails
    assert "no accelerator found" in result.stderr
    assert "no accelerator" in CliRunner().invoke(app, ["log", str(bucket)]).stdout


def test_a_full_disk_is_told_with_the_file_and_a_way_out(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/mnt/chain/x")
    monkeypatch.setattr("deltactl.chain.reading.read_chain", raising(error))
    ran = cli("log", "b")
    assert "/mnt/chain/x: no space left on device" in ran.stderr
    assert "hint: free some space" in ran.stderr


@pytest.mark.parametrize("flag", [(), ("--json",), ("-q",)], ids=["human", "json", "quiet"])
@pytest.mark.parametrize(
    "words",
    [
        ("dif",),
        ("diff",),
        ("diff", "a", "b", "c"),
        ("diff", "a", "b", "--encoding", "zip"),
        ("diff", "a", "b", "--no-such-option"),
        ("push", "a", "b", "--step", "-1"),
        ("push", "a", "b", "--step", "seven"),
        ("log", "gopher://bucket"),
        ("apply", "a", "b"),
        ("apply", "a", "b", "-o", "c", "--in-place"),
        ("apply", "a", "b", "-o", "-"),
        ("show", "bucket-without-a-step"),
        ("verify", "d.safetensors", "--against", "c"),
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense(words: tuple[str, ...], flag: Any, cli: Cli) -> None:
    ran = cli(*words, *flag)
    assert ran.code == 2
    assert ran.stderr.startswith("error: ")
    assert "hint: " in ran.stderr
    if flag == ("--json",):
        assert ran.json["error"]["exit_code"] == 2
    else:
        assert ran.stdout == ""


def test_an_unknown_scheme_is_no_directory_with_a_colon(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("push", checkpoints.base, "gopher://host/x")
    assert ran.code == 2
    assert "gopher://" in ran.stderr
    assert "a directory" in ran.stderr
    assert not list(tmp_path.glob("gopher*"))


def test_no_command_prints_the_help_on_stderr(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 2
    assert ran.stdout == ""
    assert "Usage: deltactl" in ran.stderr


def test_permission_denied(
    cli: Cli, tmp_path: Path, unprivileged: AbstractContextManager[None]
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0)
    with unprivileged:
        ran = cli("diff", locked / "a", locked / "b")
    assert ran.code == 4
    assert "permission denied" in ran.stderr


def test_a_reader_that_has_left_is_no_error(bucket: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "log", bucket], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == b""


def test_ctrl_c(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """An apply that waits for its delta on stdin is interrupted, and leaves nothing behind."""
    out = tmp_path / "out"
    child = subprocess.Popen(
        [*COMMAND, "apply", "-", str(checkpoints.base), "-o", str(out)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("*/stdin")):  # until it waits for its input
        assert time.monotonic() < deadline
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == 130
    assert b"Traceback" not in err
    assert list(tmp_path.iterdir()) == []
