"""Parts of the loop as processes: what is heard of them, and that none outlives its starter."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from deltactl.core.errors import Conflict, DeltactlError
from deltactl.demo.loop.processes import Event, Processes, parts

MODULE = "tests.support.loop_parts"
WAIT = 60.0


def all_events(running: Processes) -> list[Event]:
    found: list[Event] = []
    while not found or found[-1]["event"] != "ended":
        heard = running.hear(WAIT)
        assert heard is not None, found
        found.append(heard[1])
    return found[:-1]


def start(running: Processes, act: str) -> None:
    running.start_module("part", MODULE, {"act": act})


def test_events_are_heard_in_order_and_other_words_go_to_the_log(tmp_path: Path) -> None:
    with parts(tmp_path / "logs") as running:
        start(running, "tell")
        assert all_events(running) == [
            {"event": "first", "text": "a\nb"},
            {"event": "last", "n": 1},
        ]
    log = (tmp_path / "logs/part.log").read_text()
    assert "a library's own words" in log
    assert "and more" in log


def test_events_of_many_threads_and_a_full_log_do_not_mix(tmp_path: Path) -> None:
    with parts(tmp_path / "logs") as running:
        start(running, "shout")
        found = all_events(running)
    assert Counter(event["number"] for event in found) == dict.fromkeys(range(8), 100)
    for number in range(8):
        assert [event["n"] for event in found if event["number"] == number] == list(range(100))


def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    with parts(tmp_path / "logs") as running:
        start(running, "fail")
        with pytest.raises(Conflict) as failed:
            all_events(running)
    error = failed.value
    assert (error.what, error.file, error.step, error.hint) == ("it is another", "x", 3, "try")
    assert (error.expected, error.found) == (1, 2)


def test_a_part_that_crashes_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with parts(tmp_path / "logs") as running:
        start(running, "crash")
        with pytest.raises(DeltactlError, match="part ended by itself, with status 1") as failed:
            all_events(running)
    assert failed.value.found == "RuntimeError: no reason at all"
    assert failed.value.file == str(tmp_path / "logs/part.log")


def test_a_part_that_is_killed_is_told(tmp_path: Path) -> None:
    with parts(tmp_path / "logs") as running:
        start(running, "hang")
        heard = running.hear(WAIT)
        assert heard is not None
        os.kill(heard[1]["pid"], signal.SIGKILL)
        with pytest.raises(DeltactlError, match="with status -9"):
            all_events(running)


def test_parts_end_with_the_block(tmp_path: Path) -> None:
    with parts(tmp_path / "logs") as running:
        start(running, "hang")
        heard = running.hear(WAIT)
        assert heard is not None
        pid = heard[1]["pid"]
        assert running.hear(0) is None
        assert is_alive(pid)
    assert not is_alive(pid)


STARTER = """
import sys, threading
from pathlib import Path
from deltactl.demo.loop.processes import parts
with parts(Path(sys.argv[1])) as running:
    running.start_module("part", "tests.support.loop_parts", {"act": "hang"})
    line = [sys.executable, "-m", "deltactl.demo.loop.processes"]
    running.start("leash", [*line, sys.executable, "-m", "tests.support.loop_parts", "family"])
    print(running.hear(60)[1]["pid"], flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_starter_that_is_killed(tmp_path: Path, end: signal.Signals) -> None:
    """Nor what a command that knows of no leash has started, in a session of its own even."""
    logs = tmp_path / "logs"
    command = [sys.executable, "-c", STARTER, str(logs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as starter:
        assert starter.stdout is not None
        pids = [int(starter.stdout.readline())]
        while len(words := (logs / "leash.log").read_text().split()) < 3:
            assert starter.poll() is None
        pids += map(int, words)
        fds = [os.pidfd_open(pid) for pid in pids]
        starter.send_signal(end)
        for fd in fds:
            assert select.select([fd], [], [], WAIT)[0], f"one of {pids} is still there"
            os.close(fd)


def is_alive(pid: int) -> bool:
    """Zombies, which their parent has not looked at, are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
