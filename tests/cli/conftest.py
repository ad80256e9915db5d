"""The command line in this process and in one of its own, and small input for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltactl.cli.app import app
from tests.support.checkpoints import changed, random_weights, write_hf_directory
from tests.support.fixtures import unprivileged

__all__ = ["unprivileged"]

COMMAND = (sys.executable, "-m", "deltactl")
_FORCING = ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")


@dataclass(frozen=True)
class Ran:
    """One command's end: exit status, and both streams as bytes and as text."""

    code: int
    out: bytes
    err: bytes

    @property
    def stdout(self) -> str:
        return self.out.decode()

    @property
    def stderr(self) -> str:
        return self.err.decode()

    @property
    def json(self) -> dict[str, Any]:
        """What stands on stdout, which has to be one JSON object and a line's end."""
        assert self.stdout.count("\n") == 1, self.stdout
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document


Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def plain_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of whoever runs the tests, and a cache of the test's own."""
    for name in _FORCING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def cli() -> Cli:
    """Run a command line in this process. Unexpected exceptions come through."""

    def run(*args: object, stdin: bytes = b"") -> Ran:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout_bytes, result.stderr_bytes)

    return run


def state_of(cli: Cli, checkpoint: Path) -> Any:
    """A checkpoint's state, as diff says it."""
    return cli("diff", checkpoint, checkpoint, "--json").json["base_state"]


@pytest.fixture
def process() -> Cli:
    """Run a command line in a process of its own."""

    def run(*args: object, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Ran:
        command = [*COMMAND, *(str(arg) for arg in args)]
        done = subprocess.run(
            command, input=stdin, capture_output=True, env={**os.environ, **(env or {})}
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@dataclass(frozen=True)
class Checkpoints:
    """Three steps of a tiny model, each a Hugging Face directory of two shards."""

    steps: tuple[Path, Path, Path]

    @property
    def base(self) -> Path:
        return self.steps[0]

    @property
    def result(self) -> Path:
        return self.steps[1]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Three steps; 1 % of the elements change at each, and one tensor never does. Read only."""
    root = tmp_path_factory.mktemp("checkpoints")
    tensors = {
        f"model.layers.{n}.weight": random_weights("BF16", (32, 32), seed=n) for n in range(3)
    }
    tensors["model.norm.weight"] = random_weights("F32", (32,), seed=9)
    paths = []
    for step in (1, 2, 3):
        path = root / f"step_{step}"
        write_hf_directory(path, tensors, shards=2, aux={"config.json": '{"model_type": "tiny"}'})
        paths.append(path)
        tensors = {
            name: spec if "norm" in name else changed(spec, 0.01, seed=step)
            for name, spec in tensors.items()
        }
    return Checkpoints((paths[0], paths[1], paths[2]))


@pytest.fixture
def delta(tmp_path: Path, cli: Cli, checkpoints: Checkpoints) -> Path:
    """The delta from the first step to the second."""
    path = tmp_path / "step_2.delta"
    assert cli("diff", checkpoints.base, checkpoints.result, "-o", path, "--step", 2).code == 0
    return path


@pytest.fixture
def bucket(tmp_path: Path, cli: Cli, checkpoints: Checkpoints) -> Path:
    """A chain of the three steps: an anchor, a delta, and a delta with an anchor."""
    path = tmp_path / "bucket"
    for checkpoint in checkpoints.steps:
        assert cli("push", checkpoint, path, "--anchor-every", 3).code == 0
    return path
