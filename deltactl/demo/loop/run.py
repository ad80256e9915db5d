"""The whole loop: starts its processes, hears from them, and compares what they hold in the end.

This process starts and watches. The others meet in the bucket (all of them), at the server's API
(player and follower) and at the environment (player) and know nothing of each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.core.errors import Conflict, DeltactlError, NotFound
from deltactl.demo.game.play import Table
from deltactl.demo.loop import vllm_process
from deltactl.demo.loop.equality import Equality, compare
from deltactl.demo.loop.learner import FINAL
from deltactl.demo.loop.processes import Event, Processes, parts
from deltactl.ops.pull import pull

MARGIN = 0.05
"""By how much the mean reward of the last quarter has to be above that of the first."""

_SILENCE = 600.0  # seconds without an event after which the loop is taken for stuck

Heard = Callable[["StepRow"], None]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One trained step, as it was when the trainer had made it.

    ``seconds``: since the first step was begun to be published; ``published``, ``served``: the
    newest step that the bucket had confirmed, and that the server served, None before the first;
    ``reward``: mean of the batch that the step was made of; ``staleness``: steps between the
    trainer and the oldest policy that had a part in the batch; ``drift``, ``clipped`` and
    ``gradient``: see ``grpo.GradientStep``.
    """

    step: int
    seconds: float
    published: int | None
    served: int | None
    reward: float
    staleness: int
    drift: float
    clipped: float
    gradient: float


@dataclass(slots=True)
class Report:
    """What came of the loop. ``links``: of each published step; ``applied``: of each step that the
    server loaded; ``rollouts``: how many each step made; ``sessions``: the environment's counts;
    ``moments``: (seconds, published, served) each time one of the two rose."""

    bucket: str
    steps: int
    rows: list[StepRow] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)
    rollouts: dict[int, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    moments: list[tuple[float, int | None, int | None]] = field(default_factory=list)
    equality: Equality | None = None

    @property
    def first_reward(self) -> float:
        """Mean over the first quarter of the steps."""
        return _mean([row.reward for row in self.rows[: max(1, len(self.rows) // 4)]])

    @property
    def last_reward(self) -> float:
        """Mean over the last quarter."""
        return _mean([row.reward for row in self.rows[-max(1, len(self.rows) // 4) :]])

    @property
    def rises(self) -> bool:
        """Whether the reward rose by more than chance is likely to do."""
        return self.last_reward - self.first_reward > MARGIN

    @property
    def equal(self) -> bool:
        """Whether the server holds the trainer's weights, bit for bit."""
        return self.equality is not None and self.equality.holds


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be run. ``bucket``: a URL, or None for one in ``place``; ``vllm``: the program, or
    None for the one that is found."""

    place: Path
    steps: int
    seed: int
    bucket: str | None = None
    vllm: str | None = None


def run(wish: Wish, heard: Heard, started: Callable[[str], None]) -> Report:
    """Run the loop. ``heard``: is told of each trained step; ``started``: of what is being waited
    for, in words. Raises UsageError, Conflict for a bucket that is not empty, and whatever ends one
    of the processes."""
    program = vllm_process.find_vllm(wish.vllm)
    url = wish.bucket or str((wish.place / "bucket").resolve())
    bucket = open_bucket(url)
    _check_empty(bucket)
    with parts(wish.place / "logs") as running:
        return _Loop(wish, url, bucket, program, running, heard, started).run()


class _Loop:
    def __init__(
        self,
        wish: Wish,
        url: str,
        bucket: Bucket,
        program: Path,
        running: Processes,
        heard: Heard,
        started: Callable[[str], None],
    ) -> None:
        self._wish, self._url, self._bucket, self._program = wish, url, bucket, program
        self._parts, self._heard, self._started = running, heard, started
        self._report = Report(bucket.url, wish.steps)
        self._published: int | None = None
        self._served: int | None = None
        self._begun = time.monotonic()
        self._done: set[str] = set()
        self._environment = ""

    def run(self) -> Report:
        self._started("environment")
        self._parts.start_module("environment", "deltactl.demo.loop.environment", {})
        self._until(lambda: bool(self._environment))
        self._started("trainer: a short supervised warm-up, and step 0")
        own = {"bucket": self._url, "steps": self._wish.steps, "seed": self._wish.seed}
        self._part("trainer", "learner", own)
        self._until(lambda: self._published is not None)
        server = self._start_server()
        self._begun = time.monotonic()
        self._report.moments.clear()
        self._moment()
        self._started("the loop")
        last = {"bucket": self._url, "server": server, "last": self._wish.steps}
        self._part("follower", "follower", last)
        self._part("player", "player", own | {"server": server, "environment": self._environment})
        self._until(lambda: {"trainer", "follower", "player"} <= self._done)
        self._started("the comparison of trainer, bucket and server")
        self._report.equality = compare(
            self._bucket, self._wish.place / "trainer" / FINAL, server, self._wish.place / "pulled"
        )
        self._report.sessions = Table(self._environment).counts()
        return self._report

    def _part(self, name: str, module: str, settings: dict[str, Any]) -> None:
        place = self._wish.place / name
        place.mkdir()
        settings = settings | {"place": str(place)}
        self._parts.start_module(name, f"deltactl.demo.loop.{module}", settings)

    def _start_server(self) -> str:
        """Start vLLM on the first step as it comes out of the bucket, and wait until it answers."""
        self._started("vLLM, on step 0 as pulled from the bucket")
        model, scratch = self._wish.place / "model", self._wish.place / "vllm"
        scratch.mkdir()
        pull(self._bucket, model, step=0)
        port = vllm_process.free_port()
        line = vllm_process.command(self._program, model, port)
        self._parts.start("vllm", line, vllm_process.environment(scratch))
        url = f"http://127.0.0.1:{port}"
        vllm_process.await_ready(url, self._hear)
        return url

    def _until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SILENCE
        while not reached():
            if self._hear(1.0):
                deadline = time.monotonic() + _SILENCE
            elif time.monotonic() > deadline:
                raise DeltactlError(
                    "the loop is stuck: none of its processes has said anything",
                    expected=f"a word within {_SILENCE:g} seconds",
                    hint="deltactl demo --loop DIR keeps the logs",
                )

    def _hear(self, seconds: float) -> bool:
        """Take the next event, if there is one in time."""
        heard = self._parts.hear(seconds)
        if heard is not None:
            name, event = heard
            self._take(name, event)
        return heard is not None

    def _take(self, name: str, event: Event) -> None:
        kind, report = event["event"], self._report
        if kind == "ready":
            self._environment = event["url"]
        elif kind == "published":
            self._published = event["step"]
            self._moment()
        elif kind == "served":
            self._served = event["step"]
            report.applied.append({key: event[key] for key in event if key != "event"})
            self._moment()
        elif kind == "played":
            for step, count in event["by_step"].items():
                report.rollouts[int(step)] = report.rollouts.get(int(step), 0) + count
        elif kind == "trained":
            self._trained(event)
        elif kind == "done":
            report.links = event["links"]
        elif kind == "ended":
            if name in ("vllm", "environment"):
                raise DeltactlError(f"the loop's {name} ended by itself")
            self._done.add(name)

    def _moment(self) -> None:
        seconds = time.monotonic() - self._begun
        self._report.moments.append((seconds, self._published, self._served))

    def _trained(self, event: Event) -> None:
        row = StepRow(
            step=event["step"],
            seconds=time.monotonic() - self._begun,
            published=self._published,
            served=self._served,
            reward=event["reward"],
            staleness=event["staleness"],
            drift=event["drift"],
            clipped=event["clipped"],
            gradient=event["gradient"],
        )
        self._report.rows.append(row)
        self._heard(row)


def _check_empty(bucket: Bucket) -> None:
    """Raise Conflict where the bucket holds something: it is somebody's."""
    try:
        first = next(iter(bucket.list()), None)
    except NotFound:
        return
    if first is not None:
        raise Conflict(
            "the bucket is not empty; the loop begins a chain of its own",
            file=bucket.url,
            found=first.name,
            hint="name a prefix that holds nothing",
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
