"""What reaches a real terminal, and what a pipe: progress, colour, cursor."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from deltactl.cli.interface.output import Output
from deltactl.core.progress import silent
from tests.cli.conftest import COMMAND, Checkpoints, Cli

STYLED = re.compile(r"\x1b\[[\d;]*m")

Terminal = Callable[..., str]


@pytest.fixture
def terminal() -> Terminal:
    """Run a command line on a terminal; all that the terminal got. ``to``: a file for stdout."""

    def run(*args: object, to: Path | None = None, **env: str) -> str:
        command = shlex.join([*COMMAND, *(str(arg) for arg in args)])
        command += f" > {shlex.quote(str(to))}" if to else ""
        environment = {**os.environ, "TERM": "xterm-256color", **env}
        output, _ = pexpect.run(
            shlex.join(["sh", "-c", command]), env=environment, withexitstatus=True, timeout=60
        )
        return str(output.decode())

    return run


def test_progress_on_a_terminal(terminal: Terminal, checkpoints: Checkpoints) -> None:
    seen = terminal("diff", checkpoints.base, checkpoints.result)
    assert "comparing" in seen
    assert STYLED.search(seen)
    assert "sparsity      99.03%" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h")  # the cursor is back


def test_progress_on_a_narrow_terminal(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is longer than the terminal, which would leave a copy of each behind."""
    command = [*COMMAND, "diff", str(checkpoints.base), str(checkpoints.result)]
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    environment = {**os.environ, "TERM": "xterm-256color"}
    child = pexpect.spawn(
        command[0], command[1:], env=environment, encoding="utf-8", timeout=60, dimensions=(24, 40)
    )
    seen = child.read()
    bars = [line for line in re.split(r"[\r\n]+", STYLED.sub("", seen)) if "comparing" in line]
    assert bars
    assert max(len(re.sub(r"\x1b\S*?[A-Za-z]", "", line)) for line in bars) <= 40


def test_progress_is_no_data(terminal: Terminal, checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "stdout"
    seen = terminal("diff", checkpoints.base, checkpoints.result, "--json", to=out)
    assert "comparing" in seen
    assert "\x1b" not in out.read_text()
    assert out.read_text().startswith('{"changed_elements": 30')


def test_no_progress_when_quiet(terminal: Terminal, checkpoints: Checkpoints) -> None:
    assert terminal("diff", checkpoints.base, checkpoints.result, "-q") == ""


def test_no_progress_on_a_dumb_terminal(terminal: Terminal, checkpoints: Checkpoints) -> None:
    seen = terminal("diff", checkpoints.base, checkpoints.result, TERM="dumb")
    assert "comparing" not in seen
    assert "\x1b" not in seen


@pytest.mark.parametrize("name", ["GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE"])
def test_no_progress_and_no_colour_in_a_pipe(
    name: str, process: Cli, checkpoints: Checkpoints
) -> None:
    ran = process("diff", checkpoints.base, checkpoints.result, env={name: "1"})
    assert ran.stderr == ""
    assert "\x1b" not in ran.stdout
    failed = process("diff", checkpoints.base, "nope", env={name: "1"})
    assert failed.stderr.startswith("error: ")
    assert "\x1b" not in process("diff", "--help", env={name: "1"}).stdout


def test_errors_are_coloured_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    seen = terminal("log", tmp_path / "none")
    assert STYLED.sub("", seen).startswith("error: ")
    assert STYLED.search(seen)


def test_no_color_leaves_neither_colour_nor_bold(
    terminal: Terminal, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    seen = terminal("diff", checkpoints.base, checkpoints.result, NO_COLOR="1")
    assert "comparing" in seen
    assert not STYLED.search(seen)
    assert terminal("log", tmp_path / "none", NO_COLOR="1").startswith("error: ")
    assert STYLED.search(terminal("log", tmp_path / "none", NO_COLOR=""))  # empty is not set


def test_a_delta_is_not_written_to_a_terminal(terminal: Terminal, checkpoints: Checkpoints) -> None:
    seen = terminal("diff", checkpoints.base, checkpoints.result, "-o", "-")
    assert "a delta is no text for a terminal" in seen


def test_progress_is_silent_without_a_terminal() -> None:
    with Output().progress() as progress:
        assert progress is silent
