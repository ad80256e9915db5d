"""Completion in real shells: keys are typed, and what the line becomes is looked at."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import Cli
from tests.support.generate import ROOT
from tests.support.tools import need

COMPLETIONS = ROOT / "completions"
SETUP = {
    "bash": f"source {shlex.quote(str(COMPLETIONS / 'deltactl.bash'))}",
    "zsh": f"fpath=({shlex.quote(str(COMPLETIONS))} $fpath); autoload -U compinit; compinit -u -D",
    "fish": f"source {shlex.quote(str(COMPLETIONS / 'deltactl.fish'))}",
}
START = {
    "bash": ["--norc", "--noprofile"],
    "zsh": ["-f", "-i"],
    "fish": ["--no-config", "--interactive"],
}

Complete = Callable[[str], str]


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest, tmp_path: Path) -> Complete:
    """What a command line becomes by TAB: its words, as the shell then passes them on.

    A script has the program's name. It answers completions as the program does; called otherwise it
    writes its words to a file.
    """
    return _Shell(request.param, tmp_path).complete


class _Shell:
    def __init__(self, name: str, directory: Path) -> None:
        self._name, self._program = name, need(name)
        self._record = directory / "words"
        self._directory = directory / "home"
        self._directory.mkdir()
        (self._directory / "step_1.safetensors").touch()
        binaries = directory / "bin"
        binaries.mkdir()
        script = binaries / "deltactl"
        script.write_text(
            "#!/bin/sh\n"
            f'[ -n "$_DELTACTL_COMPLETE" ] && exec {shlex.quote(sys.executable)} -m deltactl\n'
            f'printf "%s\\n" "$@" > {shlex.quote(str(self._record))}\n'
        )
        script.chmod(0o755)
        self._env = {
            **os.environ,
            "HOME": str(self._directory),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm",
        }

    def complete(self, line: str) -> str:
        shell = pexpect.spawn(
            self._program,
            START[self._name],
            cwd=str(self._directory),
            env=self._env,
            encoding="utf-8",
            timeout=120,
            dimensions=(40, 200),
        )
        try:
            shell.sendline(f"{SETUP[self._name]}; echo rea''dy")
            shell.expect("ready")
            shell.send(line + "\t")
            return self._finish(shell)
        finally:
            shell.close(force=True)

    def _finish(self, shell: pexpect.spawn) -> str:
        """Enter, and wait for what the program was given."""
        shell.sendline("; echo do''ne")
        shell.expect("done")
        return " ".join(self._record.read_text().split("\n")).strip()


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("deltactl ver", "verify"),
        ("deltactl verify --lev", "verify --level"),
        ("deltactl verify --level reb", "verify --level rebuild"),
        ("deltactl pull s3://bucket/run:1 out --st", "pull s3://bucket/run:1 out --step"),
        ("deltactl show bucket@3 --js", "show bucket@3 --json"),
        ("deltactl diff step_1.saf", "diff step_1.safetensors"),
        ("deltactl push x s3://b", "push x s3://b"),
        ("deltactl push 'a b' --dry", "push a b --dry-run"),
    ],
)
def test_a_tab(typed: str, becomes: str, complete: Complete) -> None:
    assert complete(typed) == becomes


@pytest.mark.parametrize(
    ("shell", "file"), [("bash", "deltactl.bash"), ("zsh", "_deltactl"), ("fish", "deltactl.fish")]
)
def test_the_command_prints_the_script(shell: str, file: str, cli: Cli) -> None:
    ran = cli("--show-completion", shell)
    assert ran.code == 0
    assert ran.stdout == (COMPLETIONS / file).read_text()


def test_bash_asks_the_command_that_was_typed() -> None:
    assert '"$1"' in (COMPLETIONS / "deltactl.bash").read_text()
