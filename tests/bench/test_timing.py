"""Works are run in turn, and medians taken of what counts."""

from __future__ import annotations

from collections.abc import Iterator

from deltactl.bench.timing import Timed, medians


def test_in_turn_cleared_before_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    now = 0.0
    durations: Iterator[float] = iter([99, 99, 1, 10, 5, 30, 2, 20])

    def run(name: str) -> None:
        nonlocal now
        calls.append(name)
        now += next(durations)

    def clear() -> None:
        nonlocal now
        calls.append("clear")
        now += 1000  # is not timed

    works = {"a": Timed(lambda: run("a")), "b": Timed(lambda: run("b"), clear)}
    found = medians(works, 3, done=lambda: calls.append("done"), clock=lambda: now)
    assert found == {"a": 2, "b": 20}
    assert calls == ["a", "done", "clear", "b", "done"] * 4
