"""How many changes lie decoded at once, over all threads."""

from __future__ import annotations

import threading
from queue import Queue

import pytest

from deltactl.codec import room
from deltactl.codec.base import BLOCK
from deltactl.codec.room import room_for


@pytest.mark.parametrize("held", [1, BLOCK, 3 * BLOCK])
def test_who_asks_for_more_than_is_left_waits(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Queue[str] = Queue()
    wait = room._freed.wait

    def noted(timeout: float | None = None) -> bool:
        done.put("waits")
        return wait(timeout)

    def enter() -> None:
        with room_for(BLOCK):
            done.put("enters")

    monkeypatch.setattr(room._freed, "wait", noted)
    thread = threading.Thread(target=enter, daemon=True)
    with room_for(held):
        thread.start()
        assert done.get(timeout=60) == "waits"
        assert done.empty()
    thread.join(60)
    assert done.get(timeout=60) == "enters"


def test_what_fits_waits_for_nobody() -> None:
    with room_for(BLOCK // 2):
        thread = threading.Thread(target=_enter, args=(BLOCK // 2,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def _enter(changes: int) -> None:
    with room_for(changes):
        pass


def test_room_comes_back_after_a_failure() -> None:
    with pytest.raises(ValueError, match="torn"), room_for(BLOCK):
        raise ValueError("torn")
    _enter(BLOCK)
