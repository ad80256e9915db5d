"""What the shared options take, and that it reaches the bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

import deltactl.bucket
from deltactl.chain.store import Bucket
from deltactl.cli.interface.options import rate
from tests.cli.conftest import Checkpoints, Cli

RATES = {
    "1": 1,
    "1000": 1000,
    "500k": 500_000,
    "10M": 10_000_000,
    "1.5G": 1_500_000_000,
    "0.5k": 500,
}


@pytest.mark.parametrize(("text", "expected"), RATES.items())
def test_rates(text: str, expected: int) -> None:
    assert rate(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "0", "0.0001", "-1", "1K", "1m", "1KiB", "M", "1.M", ".5M", "1e3", "1 M", "inf", "٣"],
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        rate(text)


@pytest.mark.parametrize("verb", ["push", "pull", "copy", "verify"])
@pytest.mark.parametrize("option", [("--limit-rate", "10X"), ("--jobs", "0"), ("--jobs", "many")])
def test_what_makes_no_sense_is_told(verb: str, option: tuple[str, str], cli: Cli) -> None:
    words = ("b",) if verb == "verify" else ("a", "b")
    ran = cli(verb, *words, *option)
    assert ran.code == 2
    assert option[0] in ran.stderr


@pytest.mark.parametrize("verb", ["push", "pull", "copy", "verify", "log", "show"])
def test_they_reach_the_bucket(
    verb: str,
    cli: Cli,
    bucket: Path,
    tmp_path: Path,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []
    opened = deltactl.bucket.open_bucket

    def watched(url: str, **options: Any) -> Bucket:
        seen.append(options)
        return opened(url, **options)

    monkeypatch.setattr(deltactl.bucket, "open_bucket", watched)
    words: dict[str, tuple[object, ...]] = {
        "push": (checkpoints.steps[2], bucket, "--step", 3),
        "pull": (bucket, tmp_path / "dest"),
        "copy": (bucket, tmp_path / "copied"),
        "verify": (bucket,),
        "log": (bucket,),
        "show": (f"{bucket}@2",),
    }
    rated = () if verb in ("log", "show") else ("--limit-rate", "1G")
    assert cli(verb, *words[verb], "--jobs", 3, *rated).code == 0
    assert len(seen) == (2 if verb == "copy" else 1)
    for options in seen:
        assert options["jobs"] == 3
        assert options.get("limit_rate") == (1_000_000_000 if rated else None)
