"""``deltactl demo --loop``: what it asks for, and what it tells."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.exits import UNSOUND
from deltactl.cli.interface.output import Output
from deltactl.core.errors import DeltactlError, UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.demo.loop.run import Report, StepRow

LOOP_STEPS = 40
"""Steps of a loop, unless it is said: so many show that the reward rises."""

Loop = Annotated[
    bool, typer.Option("--loop", help="Reinforcement learning with a vLLM server that follows.")
]
LoopBucket = Annotated[
    str | None,
    typer.Option(
        "--bucket",
        metavar="BUCKET",
        help="With --loop: an empty bucket to publish to; by default a directory.",
        show_default=False,
    ),
]
LoopSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        help="With --loop: of the model and the games. Default: 0.",
        show_default=False,
    ),
]
LoopVllm = Annotated[
    str | None,
    typer.Option(
        "--vllm",
        metavar="PROGRAM",
        help="With --loop: the vllm of an environment that has deltactl too; by default the one "
        "beside this Python, or on PATH.",
        show_default=False,
    ),
]
LoopPlot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        readable=False,
        metavar="FILE",
        help="With --loop: draw the reward, and the steps published and served, into a PNG.",
        show_default=False,
    ),
]

LOOP_KEYS = {
    "ok": "whether trainer, bucket and server held the same weights in the end, bit for bit",
    "bucket": "its address; of one that was removed, where it was",
    "rows": "of each trained step: step, seconds (since the loop began), published and served (the "
    "newest steps then; null before the first), reward (mean of the batch it was made of), "
    "staleness (steps to the oldest policy in the batch), drift, clipped, gradient (of the update)",
    "first_reward": "mean over the first quarter of the steps",
    "last_reward": "mean over the last quarter",
    "rises": "whether the last is well above the first",
    "links": "of each published link: step, kind, bytes, changed_elements, total_elements, "
    "seconds, blocked_seconds (in which training waited), state",
    "applied": "of each step that the server loaded: step, deltas, elements, seconds_staging, "
    "seconds_paused (null where the step was there already)",
    "rollouts": "how many rollouts each step made: step, count",
    "sessions": "of the environment: open, most (at once), begun, done",
    "equality": "step, elements; trainer, bucket, pulled (state digests); unlike_pulled (tensors); "
    "parameters, unlike_served (of vLLM, by its own checksums); audit: of the server by its "
    "engine, as a replica of deltactl verify --server",
    "directory": "where all was kept; null if it was removed",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that only the loop has."""

    bucket: str | None
    seed: int | None
    vllm: str | None
    plot: Path | None

    def refuse(self) -> None:
        """Raise UsageError for one that was given without ``--loop``."""
        for name in ("bucket", "seed", "vllm", "plot"):
            if getattr(self, name) is not None:
                raise UsageError(f"--{name} is for --loop", found=getattr(self, name))


def check(asked: Asked) -> None:
    """Raise DeltactlError for what is missing, before anything is begun."""
    if asked.plot is not None:
        from deltactl.demo.loop.plot import check_installed

        check_installed()


def run_loop(
    screen: Output, place: Path, steps: int | None, asked: Asked, kept: Path | None
) -> None:
    """Run the loop in ``place`` and tell of it. ``kept``: ``place``, where it stays."""
    from deltactl.demo.loop.run import Wish, run

    table = _Table(silent=screen.mode == "quiet")
    wish = Wish(place, steps or LOOP_STEPS, asked.seed or 0, asked.bucket, asked.vllm)
    report = run(wish, table.row, table.say)
    if asked.plot is not None:
        from deltactl.demo.loop.plot import draw

        draw(report, asked.plot)
    screen.result(_document(report, kept), lambda: _lines(report, asked.plot))
    if not report.equal:
        for error in _faults(report):
            screen.fault(error)
        raise typer.Exit(UNSOUND)
    if not report.rises:
        screen.warn(
            f"the mean reward did not rise: {report.first_reward:.3f} at first, "
            f"{report.last_reward:.3f} at last; a few dozen steps are needed"
        )


class _Table:
    """Lines on stderr while the loop runs: a run takes minutes, and a log is read afterwards."""

    def __init__(self, *, silent: bool) -> None:
        self._silent, self._begun = silent, False

    def say(self, what: str) -> None:
        self._print(f"starting: {what}")

    def row(self, row: StepRow) -> None:
        if not self._begun:
            self._print("   time   step  published  served  staleness  reward")
            self._begun = True
        self._print(
            f"{row.seconds:6.1f} s {row.step:>6} {text.count(row.published):>10} "
            f"{text.count(row.served):>7} {row.staleness:>10} {row.reward:>7.3f}"
        )

    def _print(self, line: str) -> None:
        if not self._silent:
            print(line, file=sys.stderr, flush=True)


def _document(report: Report, kept: Path | None) -> dict[str, Any]:
    return facts_of(
        report,
        *("ok", "bucket", "rows", "first_reward", "last_reward", "rises", "links", "applied"),
        *("rollouts", "sessions", "equality"),
        ok=report.equal,
        rollouts=[{"step": s, "count": n} for s, n in sorted(report.rollouts.items())],
        directory=kept,
    )


def _lines(report: Report, plot: Path | None) -> Iterable[str]:
    made = sum(report.rollouts.values())
    oldest = max(row.staleness for row in report.rows)
    pauses = [row["seconds_paused"] for row in report.applied if row["seconds_paused"] is not None]
    deltas = [row for row in report.links if row["changed_elements"] is not None]
    shares = [1 - row["changed_elements"] / row["total_elements"] for row in deltas]
    yield f"trained {text.plural(len(report.rows), 'step')} from {text.plural(made, 'rollout')}"
    yield ""
    yield from text.table((">made by step", ">rollouts"), sorted(report.rollouts.items()))
    yield ""
    published = {row["step"] for row in report.links}
    rows = [
        ("reward", f"{report.first_reward:.3f} at first, {report.last_reward:.3f} at last"),
        ("staleness", f"{text.plural(oldest, 'step')} at most"),
        ("published", f"{text.plural(len(published), 'step')}, {_sizes(report)}"),
        ("sparsity", f"{text.share(min(shares))} to {text.share(max(shares))}" if shares else "-"),
        ("served", f"{text.plural(len(report.applied), 'step')} by the server"),
        ("paused", f"{text.seconds(max(pauses))} at most" if pauses else "-"),
        ("environment", f"{text.plural(report.sessions['most'], 'session')} at once"),
    ]
    yield from text.pairs(rows)
    if plot is not None:
        yield f"drew {plot}"
    if report.equal and report.equality is not None:
        yield (
            f"ok: step {report.equality.step}: trainer, bucket and server hold the same "
            f"{text.plural(report.equality.elements, 'element')}, bit for bit"
        )


def _sizes(report: Report) -> str:
    sizes = [row["bytes"] for row in report.links if row["kind"] == "delta"]
    return f"deltas of {text.size(sum(sizes) / len(sizes))}" if sizes else "an anchor"


def _faults(report: Report) -> Iterator[DeltactlError]:
    found = report.equality
    if found is None:
        return
    holders = {"bucket": found.bucket, "pulled step": found.pulled, "server": found.audit.state}
    for who, state in holders.items():
        if state != found.trainer:
            yield DeltactlError(
                f"the {who} is not the trainer's weights",
                step=found.step,
                expected=f"state {found.trainer}",
                found=f"state {state}",
            )
    if found.audit.error is not None:
        yield found.audit.error
    for name in found.unlike_pulled:
        what = "the pulled tensor's bits are not the trainer's"
        yield DeltactlError(what, step=found.step, tensor=name)
    for name in found.unlike_served:
        what = "the live parameter's bits are not the trainer's, by vLLM's checksum"
        yield DeltactlError(what, step=found.step, tensor=name)
    for name in (*found.audit.differing, *found.audit.unaudited):
        what = "the live tensor is not the chain's, by the engine's audit"
        yield DeltactlError(what, step=found.step, tensor=name)
    if found.step != found.audit.step:
        what = "the server serves another step"
        yield DeltactlError(what, expected=found.step, found=found.audit.step)
