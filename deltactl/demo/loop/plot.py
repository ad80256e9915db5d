"""The loop as a picture: the reward by step, and the steps published and served by time."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from deltactl.core.errors import DeltactlError
from deltactl.demo.loop.run import Report
from deltactl.files.atomic import atomic_file

_SMOOTH = 5  # steps in the running mean


def check_installed() -> None:
    """Raise DeltactlError where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise DeltactlError(
            "plots need matplotlib", found="not installed", hint="pip install 'deltactl[plot]'"
        )


def draw(report: Report, path: Path) -> None:
    """Write the picture, a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, rewards = [row.step for row in report.rows], [row.reward for row in report.rows]
    left.plot(steps, rewards, ".", color="tab:gray", label="a batch")
    means = [_mean(rewards[max(0, n + 1 - _SMOOTH) : n + 1]) for n in range(len(rewards))]
    left.plot(steps, means, color="tab:blue", label=f"mean of the last {_SMOOTH}")
    left.set(xlabel="step", ylabel="mean reward", title="reward", ylim=(0, None))
    left.legend()
    times = [seconds for seconds, _, _ in report.moments]
    for number, what in ((1, "published"), (2, "served")):
        held = [moment[number] for moment in report.moments]
        known = [(t, float(step)) for t, step in zip(times, held, strict=True) if step is not None]
        right.step([t for t, _ in known], [step for _, step in known], where="post", label=what)
    right.set(xlabel="seconds", ylabel="step", title="steps published and served")
    right.legend()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
