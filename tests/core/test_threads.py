"""Many tasks at once; errors and interruptions end them, and nobody waits for what hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from deltactl.core import threads
from deltactl.core.threads import TaskQueue, map_requests, map_settled, start


def test_results_are_in_order_however_work_ends() -> None:
    barrier = threading.Barrier(4)

    def work(number: int) -> int:
        barrier.wait(30)  # ends only if four are at it at once
        return number * number

    assert map_requests(work, range(8), 4) == [n * n for n in range(8)]


def test_nothing_to_do() -> None:
    assert map_requests(lambda n: n, [], 4) == []


def test_no_more_at_once_than_threads() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def work(number: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        with lock:
            now -= 1

    map_requests(work, range(200), 3)
    assert 1 <= most <= 3


def test_tasks_add_tasks_that_come_first() -> None:
    done: list[str] = []
    one = TaskQueue(1)

    def parent(name: str) -> None:
        done.append(name)
        one.add(partial(done.append, f"{name}{n}") for n in range(3))

    one.add(partial(parent, name) for name in "ab")
    one.run()
    assert done == ["a", "a0", "a1", "a2", "b", "b0", "b1", "b2"]


def test_an_idle_thread_wakes_up_for_what_is_added() -> None:
    """Two threads, one first task that adds two which have to run at once."""
    barrier = threading.Barrier(2)
    two = TaskQueue(2)
    two.add([lambda: two.add([lambda: barrier.wait(30), lambda: barrier.wait(30)])])  # type: ignore[func-returns-value]
    two.run()


def test_the_first_error_is_raised_and_nothing_new_begins() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        map_requests(work, range(100), 1)
    assert begun == [0, 1, 2]


def test_an_error_does_not_wait_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_GRACE", 0.01)
    hangs, release = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number == 0:
            hangs.set()
            release.wait(60)
        else:
            hangs.wait(60)
            raise ValueError

    try:
        with pytest.raises(ValueError):  # noqa: PT011 - any
            map_requests(work, [0, 1], 2)
        assert not release.is_set()
    finally:
        release.set()


PROGRAM = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
from deltactl.core.threads import map_requests
def hang(_):
    print("hangs", flush=True)
    threading.Event().wait()
map_requests(hang, [1], 2)
"""


def test_an_interrupted_process_ends_though_a_request_hangs() -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=-1, stderr=-1)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    try:
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert b"KeyboardInterrupt" in err
    assert child.returncode == -signal.SIGINT


def test_what_was_begun_has_ended_when_an_error_of_a_pools_work_is_raised() -> None:
    begun, failing, ended = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        if number == 0:
            begun.wait(30)
            failing.set()
            raise ValueError("first")
        begun.set()
        failing.wait(30)
        ended.append(number)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="first"):
            map_settled(pool, work, [0, 1])
        assert ended == [1]
        assert map_settled(pool, lambda n: n * n, iter(range(9))) == [n * n for n in range(9)]
        assert map_settled(pool, work, []) == []


def test_what_becomes_of_work_that_was_started_is_told() -> None:
    told = start(lambda: threading.current_thread().name, "deltactl-some")
    assert told.result(30) == "deltactl-some"

    def fail() -> None:
        raise KeyboardInterrupt

    assert isinstance(start(fail, "x").exception(30), KeyboardInterrupt)
