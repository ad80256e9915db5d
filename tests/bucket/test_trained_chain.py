"""A trained chain at every kind of bucket, through the command line, against the trainer's bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltactl.cli.app import app
from tests.bucket.conftest import OpenBucket
from tests.support.trained import STEPS, assert_same_bits


def run(*args: object) -> dict[str, Any]:
    """Run ``deltactl … --json``; returns its one object."""
    result = CliRunner().invoke(app, [*map(str, args), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_trained_chain(
    open_at: OpenBucket,
    trained_chain: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))
    url = open_at().url
    pushed = [run("push", step, url) for step in trained_chain]
    assert all(report["written"] for report in pushed)
    assert [report["step"] for report in pushed] == list(range(1, STEPS + 1))
    links = run("log", url)["links"]
    assert [link["step"] for link in links if link["kind"] == "delta"] == list(range(2, STEPS + 1))
    for level in ("links", "data", "rebuild"):
        report = run("verify", url, "--level", level)
        assert (report["ok"], report["links"], report["errors"]) == (True, STEPS + 1, [])
    for step in (7, STEPS):
        report = run("pull", url, tmp_path / "served", "--step", step)
        assert report["state"] == pushed[step - 1]["state"]
        assert_same_bits(tmp_path / "served", trained_chain[step - 1])
    assert run("verify", url, "--against", trained_chain[-1])["ok"]
    copied = run("copy", url, tmp_path / "copy")
    assert (copied["links"], copied["copied"], copied["tip"]) == (STEPS + 1, STEPS + 1, STEPS)
    run("pull", tmp_path / "copy", tmp_path / "of_copy")
    assert_same_bits(tmp_path / "of_copy", trained_chain[-1])
