"""The README's three commands that have a server load a step, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deltactl.demo.tiny_model import train
from tests.support.s3_server import free_ports
from tests.support.vllm_server import ROOT, started

HEADING = "## Load a step into running vLLM servers"
PORT = 8000  # in the README; here a free one


def _block() -> tuple[list[str], list[str]]:
    """The section's first block: its commands, and what they print."""
    section = (ROOT / "README.md").read_text().partition(f"{HEADING}\n")[2]
    lines = section.split("```\n")[1].splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return commands, [line for line in lines if not line.startswith("$ ")]


def _masked(line: str) -> str:
    """A line without what differs from run to run: ports, counts and times."""
    return re.sub(r"\d[\d,.]*( ms| s\b)?", "N", line).strip()


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM for the CPU runs on Linux")
def test_the_three_commands(tmp_path: Path) -> None:
    commands, printed = _block()
    assert len(commands) == 3
    assert printed
    steps = list(train(tmp_path / "run/trainer", 2))
    port = free_ports(1)[0]
    serve, *rest = (line.replace(f":{PORT}", f":{port}") for line in commands)
    words = shlex.split(serve.removesuffix("&"))
    words[words.index(str(PORT))] = str(port)
    variables = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    where = {"DELTACTL_CACHE": str(tmp_path / "cache")}
    found = []
    with started(
        words[words.index("vllm") :],
        port,
        steps[0].path,
        tmp_path / "scratch",
        environment=variables | where,
        cwd=tmp_path,
    ):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for line in rest:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                env=os.environ | where | {"PATH": path, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (line, done.stderr)
            found += done.stdout.splitlines()
    assert list(map(_masked, found)) == list(map(_masked, printed))
