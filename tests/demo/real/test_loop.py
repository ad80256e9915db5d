"""The whole loop in one command, with a real vLLM and a real S3 server.

Minutes of two cores, so it runs once and is looked at from all sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from deltactl.bucket import open_bucket
from deltactl.ops.verify import verify_bucket
from tests.support.connections import opened, with_children
from tests.support.s3_server import S3Server, use_s3

STEPS = 40
LOOK = 0.1  # seconds between two looks at the connections

Peers = dict[str, set[tuple[str, int]]]


class Ran:
    """A loop that has run: its JSON, its stderr, and whom each part was seen connected to."""

    def __init__(self, bucket: str, endpoint: str, out: str, err: str) -> None:
        self.bucket, self.endpoint, self.err = bucket, endpoint, err
        self.found: dict[str, Any] = json.loads(out)
        self.peers: Peers = {}
        self.server = self.environment = ""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[Ran]:
    place, bucket = tmp_path_factory.mktemp("loop"), s3_server.new_url()
    command = [sys.executable, "-m", "deltactl", "demo", "--loop"]
    command += ["--steps", str(STEPS), "--bucket", bucket, "--json"]
    with (
        pytest.MonkeyPatch.context() as patch,
        open(place / "out", "w") as out,
        open(place / "err", "w") as err,
    ):
        use_s3(patch, s3_server.endpoint)
        with subprocess.Popen(command, stdout=out, stderr=err) as process:
            peers: Peers = defaultdict(set)
            settings: dict[str, Any] = {}
            while process.poll() is None:
                for name, (pids, words) in parts_of(process.pid).items():
                    peers[name] |= opened(pids)
                    settings |= json.loads(words[3]) if name == "player" else {}
                try:
                    process.wait(LOOK)
                except subprocess.TimeoutExpired:
                    continue
        told = (place / "err").read_text()
        assert process.returncode == 0, told
        ran = Ran(bucket, s3_server.endpoint, (place / "out").read_text(), told)
        ran.peers = peers
        ran.server, ran.environment = settings["server"], settings["environment"]
        yield ran


def parts_of(pid: int) -> dict[str, tuple[set[int], list[str]]]:
    """The loop's processes by the part that they are, and the command line, which tells it."""
    found = {}
    for child in with_children(pid) - {pid}:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[1:2] == ["-m"] and words[2].startswith("deltactl.demo.loop."):
            name = words[2].removeprefix("deltactl.demo.loop.")
            found["vllm" if name == "processes" else name] = with_children(child), words
    return found


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def test_server_and_trainer_hold_the_same_bits_in_the_end(ran: Ran) -> None:
    equality = ran.found["equality"]
    states = {equality[who] for who in ("trainer", "bucket", "pulled")}
    states.add(equality["audit"]["state"])
    assert ran.found["ok"] is True
    assert len(states) == 1
    assert states == {ran.found["links"][-1]["state"]}
    assert equality["step"] == equality["audit"]["step"] == STEPS
    assert equality["unlike_pulled"] == equality["unlike_served"] == []
    assert equality["parameters"] == 19
    assert equality["audit"]["checked"] > 0
    assert equality["audit"]["differing"] == equality["audit"]["unaudited"] == []


def test_reward_rises(ran: Ran) -> None:
    assert ran.found["rises"] is True
    assert ran.found["last_reward"] > ran.found["first_reward"] + 0.05


def test_every_step_is_published_and_verified(ran: Ran) -> None:
    assert {link["step"] for link in ran.found["links"]} == set(range(STEPS + 1))
    report = verify_bucket(open_bucket(ran.bucket), level="rebuild")
    assert report.ok
    assert not report.errors


def test_served_steps_follow_the_published_ones(ran: Ran) -> None:
    served = [row["step"] for row in ran.found["applied"]]
    assert served == sorted(set(served))
    assert served[-1] == STEPS
    for row in ran.found["rows"]:
        assert row["served"] <= row["published"] <= row["step"]


def test_rollouts_are_stamped_with_the_steps_that_made_them(ran: Ran) -> None:
    """By many steps, each of which was served; and none older than is allowed."""
    made = {row["step"]: row["count"] for row in ran.found["rollouts"]}
    assert set(made) <= {row["step"] for row in ran.found["applied"]}
    assert len(made) > STEPS // 4
    assert sum(made.values()) == ran.found["sessions"]["done"]
    assert all(0 <= row["staleness"] <= 2 for row in ran.found["rows"])
    assert ran.found["sessions"]["most"] > 8


def test_nobody_is_connected_to_another_but_to_bucket_server_and_environment(ran: Ran) -> None:
    bucket, server, environment = map(address, (ran.endpoint, ran.server, ran.environment))
    allowed: Peers = {
        "environment": set(),
        "learner": {bucket},
        "follower": {bucket, server},
        "player": {bucket, server, environment},
        "vllm": {bucket},
    }
    assert set(ran.peers) == set(allowed)
    for name, peers in ran.peers.items():
        assert peers <= allowed[name], name
    assert server in ran.peers["follower"] & ran.peers["player"]
    assert environment in ran.peers["player"]
    assert bucket in ran.peers["learner"]


def test_steps_are_told_against_time(ran: Ran) -> None:
    rows = [line.split() for line in ran.err.splitlines() if line.lstrip()[:1].isdigit()]
    assert [int(row[2]) for row in rows] == list(range(1, STEPS + 1))
    times = [float(row[0]) for row in rows]
    assert times == sorted(times)
