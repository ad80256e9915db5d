"""``--verbose`` and ``--log-file``: what is done, and what is asked of whom."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Checkpoints, Cli
from tests.cli.test_help import VERBS
from tests.cli.test_servers import SECRET, start
from tests.support.vllm_standin import StandIn

__all__ = ["start"]


def test_every_command_has_both() -> None:
    for verb, command in VERBS.items():
        options = {word for param in command.params for word in param.opts}
        assert {"-v", "--verbose", "--log-file"} <= options, verb


def test_nothing_is_said_unasked(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    assert cli("pull", bucket, tmp_path / "out").stderr == ""


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_what_is_done(flag: str, cli: Cli, bucket: Path, tmp_path: Path) -> None:
    ran = cli("pull", bucket, tmp_path / "out", flag, "--json")
    assert ran.json["step"] == 3
    said = r"info: .*: 4 links, headers read in \d+ requests\n"
    assert re.fullmatch(said, ran.stderr)
    assert not logging.getLogger("deltactl.chain").isEnabledFor(logging.INFO)
    again = cli("pull", bucket, tmp_path / "out")
    assert again.stderr == "", "only this command was asked to"


def test_what_is_asked_of_a_server(
    cli: Cli, bucket: Path, start: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    server = start()
    some = cli("apply", bucket, "--server", server.url, "-v").stderr
    everything = cli("apply", f"{bucket}@2", "--server", server.url, "-vv").stderr
    for said in (some, everything):
        assert f"info: {server.url}: pause\n" in said
        assert f"info: {server.url}: write the weights\n" in said
        assert SECRET not in said
    assert "debug: " not in some
    assert re.search(rf"debug: POST {server.url}/pause: 200, \d+ ms\n", everything)


def test_a_log_file_has_all_of_it_and_is_added_to(
    cli: Cli, bucket: Path, start: type[StandIn], tmp_path: Path
) -> None:
    file = tmp_path / "log"
    for step in (2, 3):
        words = ("--server", start().url, "--log-file", file)
        ran = cli("apply", f"{bucket}@{step}", *words)
        assert (ran.code, ran.stderr) == (0, "")
    lines = file.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|DEBUG) deltactl\.\w+: ", x) for x in lines)
    assert sum("/pause: 200" in line for line in lines) == 2
    assert logging.getLogger("deltactl").handlers == []


def test_a_log_file_that_cannot_be_written(cli: Cli, bucket: Path, tmp_path: Path) -> None:
    ran = cli("log", bucket, "--log-file", tmp_path / "none" / "log")
    assert (ran.code, ran.stdout) == (10, "")
    assert "no such file or directory" in ran.stderr


def test_warnings_go_to_both(cli: Cli, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """With -v they are warnings still."""
    cli("push", checkpoints.base, tmp_path / "bucket")
    ran = cli("push", checkpoints.result, tmp_path / "bucket", "-v")
    assert ran.code == 0
    assert ran.stderr.startswith("info: ")
