"""``deltactl clean`` in each of its modes, and the word about it in ``deltactl log``."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import NotAllowed, Unsupported
from tests.cli.conftest import Cli
from tests.support.chains import content

DAY = 86400.0
NAME = "deltas/.step_000002.safetensors.0badcafe.12345678.new.tmp"


@pytest.fixture
def old(bucket: Path) -> Path:
    """What another host left in the bucket three days ago; the tip is 3."""
    path = bucket / NAME
    path.write_bytes(b"x" * 1500)
    touch(path, 3)
    return path


def touch(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_json(cli: Cli, bucket: Path, old: Path) -> None:
    ran = cli("clean", bucket, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    (item,) = ran.json["items"]
    assert abs(item.pop("age") - 3 * DAY) < 600
    assert item == {
        "kind": "temporary", "name": str(old), "step": 2, "bytes": 1500, "action": "remove",
        "why": None,
    }  # fmt: skip
    assert {key: value for key, value in ran.json.items() if key != "items"} == {
        "place": str(bucket.resolve()), "older_than": 86400, "cleaned": 1, "bytes": 1500, "kept": 0,
        "errors": [], "dry_run": False,
    }  # fmt: skip
    assert not old.exists()
    assert cli("clean", bucket, "--json").json["items"] == []


def test_human_quiet_and_dry_run(cli: Cli, bucket: Path, old: Path) -> None:
    before = content(bucket)
    dry = cli("clean", bucket, "-n").stdout.splitlines()
    assert dry == [
        f"would remove temporary {old} (1.50 kB, 72 h old)",
        "would clean 1 left-over, 1.50 kB",
    ]
    assert content(bucket) == before
    kept = cli("clean", bucket, "--older-than", "7d").stdout.splitlines()
    assert kept == [
        f"kept temporary {old} (1.50 kB, 72 h old): it was touched within the age",
        "cleaned 0 left-overs, 0 B; 1 kept",
    ]
    assert content(bucket) == before
    ran = cli("clean", bucket, "-q")
    assert (ran.code, ran.out, ran.err) == (0, b"", b"")
    assert content(bucket).keys() == before.keys() - {NAME}
    done = cli("clean", bucket)
    assert (done.code, done.stdout) == (0, f"{bucket.resolve()}: nothing is left behind\n")


@pytest.mark.parametrize(
    ("age", "seconds"),
    [("0s", 0), ("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2w", 1209600)],
)
def test_ages(cli: Cli, bucket: Path, age: str, seconds: int) -> None:
    assert cli("clean", bucket, "--older-than", age, "--json").json["older_than"] == seconds


@pytest.mark.parametrize("age", ["", "1", "d", "-1d", "1.5h", "1y", "1d2h", "99999999999d", "1 d"])
def test_what_is_no_age(cli: Cli, bucket: Path, age: str, old: Path) -> None:
    ran = cli("clean", bucket, f"--older-than={age}")
    assert ran.code == 2
    assert "30m" in ran.stderr
    assert old.exists()


def test_exit_statuses(
    cli: Cli, bucket: Path, tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("clean").code == 2
    assert cli("clean", bucket, "--cache").code == 2
    assert cli("clean", tmp_path / "nothing").code == 10
    assert cli("clean", "gopher://host").code == 2

    def closed(error: Exception) -> Any:
        def discard(*_: object) -> None:
            raise error

        return discard

    refused = NotAllowed("it may not be removed", file=NAME)
    monkeypatch.setattr(LocalBucket, "discard", closed(refused))
    ran = cli("clean", bucket)
    assert (ran.code, ran.stderr.splitlines()[0]) == (4, f"error: {NAME}: it may not be removed")
    assert "kept temporary" in ran.stdout
    monkeypatch.setattr(LocalBucket, "unfinished", closed(Unsupported("501")))
    ran = cli("clean", bucket)
    assert (ran.code, ran.stderr) == (0, "warning: not looked at: 501\n")
    assert old.exists()


def test_the_cache(cli: Cli, bucket: Path, tmp_path: Path, checkpoints: Any) -> None:
    tips = tmp_path / "cache/tips"
    (tips / "0123/tip").mkdir(parents=True)
    (tips / "0123/tip/model.safetensors").write_bytes(b"x" * 1000)
    (tips / "0123/lock").touch()
    assert cli("clean", "--cache", "--json").json["kept"] >= 1
    for path in (*tips.rglob("*"), tips):
        touch(path, 3)
    ran = cli("clean", "--cache")
    assert ran.code == 0
    assert re.search(rf"^removed cache {re.escape(str(tips / '0123'))} ", ran.stdout, re.MULTILINE)
    assert not (tips / "0123/tip").exists()
    assert (tips / "0123/lock").exists()


def test_log_has_a_word(cli: Cli, bucket: Path, old: Path) -> None:
    ran = cli("log", bucket)
    word = f"1 left-over, 1.50 kB, of commands that died: deltactl clean {bucket.resolve()}"
    assert (ran.code, ran.stderr) == (0, f"warning: {word}\n")
    assert cli("log", bucket, "--json").json["leftovers"] == {"count": 1, "bytes": 1500}
    touch(old, 0.5)
    assert cli("log", bucket).stderr == ""
    assert cli("log", bucket, "--json").json["leftovers"] == {"count": 0, "bytes": 0}
