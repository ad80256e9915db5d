"""Where vLLM is looked for, and what is said where it is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from deltactl import __version__
from deltactl.core.errors import DeltactlError, Unsupported
from deltactl.demo.loop import vllm_process
from deltactl.demo.loop.vllm_process import command, environment, find_vllm

PIP = "-m venv VENV && VENV/bin/pip install vllm"


def program(place: Path, python: str) -> Path:
    """An environment with a ``vllm`` and a Python that answers as the shell text ``python``."""
    place.mkdir()
    for name, text in (("vllm", "exit 1"), ("python", python)):
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    return place / "vllm"


def test_a_vllm_with_this_deltactl_is_taken(tmp_path: Path) -> None:
    found = program(tmp_path / "bin", f"echo {__version__} other deltactl")
    assert find_vllm(str(found)) == found


def test_one_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path / "bin", f"echo {__version__} deltactl")
    monkeypatch.setattr(vllm_process.sys, "executable", str(tmp_path / "elsewhere/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert find_vllm(None) == found


def test_none_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for given in (None, str(tmp_path / "vllm")):
        with pytest.raises(DeltactlError, match="needs a vLLM server") as missing:
            find_vllm(given)
        assert PIP in str(missing.value.hint)


@pytest.mark.parametrize("words", ["0.0.1 deltactl", f"{__version__}", f"{__version__} other"])
def test_another_deltactl_is_refused(tmp_path: Path, words: str) -> None:
    found = program(tmp_path / "bin", f"echo {words}")
    with pytest.raises(Unsupported) as refused:
        find_vllm(str(found))
    assert refused.value.found == words
    assert "pip install" in str(refused.value.hint)


def test_an_environment_without_deltactl_is_told(tmp_path: Path) -> None:
    error = "ModuleNotFoundError: No module named 'deltactl'"
    found = program(tmp_path / "bin", f'echo "{error}" >&2; exit 1')
    with pytest.raises(DeltactlError, match="lacks vllm or deltactl") as refused:
        find_vllm(str(found))
    assert refused.value.found == error


def test_a_vllm_without_a_python_is_told(tmp_path: Path) -> None:
    found = program(tmp_path / "bin", "exit 0")
    (tmp_path / "bin/python").unlink()
    with pytest.raises(DeltactlError, match="does not run"):
        find_vllm(str(found))


def test_the_server_is_on_a_leash_and_has_our_engine(tmp_path: Path) -> None:
    line = command(Path("/v/bin/vllm"), tmp_path, 8100)
    assert line[:3] == [sys.executable, "-m", "deltactl.demo.loop.processes"]
    assert line[3:6] == ["/v/bin/vllm", "serve", str(tmp_path)]
    assert line[line.index("--weight-transfer-config") + 1] == '{"backend":"deltactl"}'
    assert line[line.index("--host") + 1] == "127.0.0.1"


def test_nothing_of_the_users_steers_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = environment(tmp_path)
    assert "VLLM_PLUGINS" not in found
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["HF_HUB_OFFLINE"] == "1"
