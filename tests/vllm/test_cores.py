"""Processors: a thread that is bound to one does not bind those that work in a pause."""

from __future__ import annotations

import os
import threading

import pytest

from deltactl.vllm.staging import cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the platform binds no threads"
)


def test_a_bound_thread_spreads_again() -> None:
    here = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def work() -> None:
        os.sched_setaffinity(0, {min(here)})
        found.append(os.sched_getaffinity(0))
        assert cores.usable() >= here
        cores.spread()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == {min(here)}
    assert found[1] >= here
    assert os.sched_getaffinity(0) == here


def test_without_a_word_from_the_platform_nothing_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "sched_setaffinity", None)
    assert cores.usable() == frozenset()
    cores.spread()


def test_threads_that_end_meanwhile_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_entries", lambda path: ["99999999"])
    assert cores.usable() >= os.sched_getaffinity(0)
