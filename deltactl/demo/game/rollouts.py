"""Rollouts: sessions that were played, and by which steps; how they travel through the bucket.

A batch is one object, ``rollouts/batch_000012.json``: what the trainer makes step 13 of. Of every
turn it has the tokens that the server generated, the log-probabilities that the server gave them,
and the step that it served, before the request and after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltactl.chain.store import Bucket
from deltactl.core.errors import Malformed, NotFound
from deltactl.demo.game.game import GUESSES, LETTERS
from deltactl.demo.game.tokens import VOCAB, VOCAB_SIZE
from deltactl.files.untrusted import parse_json

_LARGEST = 1 << 24  # bytes of a batch


@dataclass(frozen=True, slots=True)
class Turn:
    """A guess: tokens, their natural log-probabilities under the policy that made them, the marks
    that it was answered by, and the steps that the server served before and after."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    marks: str
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A session from its begin to its reward, in [0, 1]. ``seed``: of the session; rollouts of one
    seed are a group."""

    seed: int
    turns: tuple[Turn, ...]
    reward: float

    @property
    def step(self) -> int:
        """The oldest step that had a part in it."""
        return min(turn.steps[0] for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts that step ``number + 1`` is made of, those of one group side by side."""

    number: int
    rollouts: tuple[Rollout, ...]

    @property
    def reward(self) -> float:
        """The mean."""
        return sum(rollout.reward for rollout in self.rollouts) / len(self.rollouts)

    @property
    def staleness(self) -> int:
        """How many steps the trainer is ahead of the oldest one that had a part in it."""
        return self.number - min(rollout.step for rollout in self.rollouts)

    def by_step(self) -> dict[int, int]:
        """How many rollouts each step made."""
        found: dict[int, int] = {}
        for rollout in self.rollouts:
            found[rollout.step] = found.get(rollout.step, 0) + 1
        return found


def batch_name(number: int) -> str:
    """The object of a batch."""
    return f"rollouts/batch_{number:06d}.json"


def put_batch(bucket: Bucket, batch: Batch, scratch: Path) -> None:
    """Write a batch for good. ``scratch``: a file's place to write it to before."""
    scratch.write_text(json.dumps(asdict(batch), allow_nan=False))
    bucket.put(batch_name(batch.number), scratch)


def read_batch(bucket: Bucket, number: int) -> Batch | None:
    """A batch; None if it is not there yet. Raises Malformed for what is none."""
    name = batch_name(number)
    try:
        raw = bucket.read(name, 0, _LARGEST + 1)
    except NotFound:
        return None
    if len(raw) > _LARGEST:
        raise Malformed("a batch of rollouts is too large", file=name, expected=_LARGEST)
    document = parse_json(bytes(raw), name, what="a batch of rollouts")
    try:
        batch = Batch(_whole(document["number"]), tuple(map(_rollout, document["rollouts"])))
    except (KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise Malformed("this is no batch of rollouts", file=name, found=found) from None
    if batch.number != number or not batch.rollouts:
        raise Malformed("this is another batch of rollouts", file=name, found=batch.number)
    return batch


def _rollout(row: Any) -> Rollout:
    turns, reward = tuple(map(_turn, row["turns"])), _real(row["reward"])
    if not 1 <= len(turns) <= GUESSES or not 0 <= reward <= 1:
        raise ValueError("turns or reward out of range")
    return Rollout(_whole(row["seed"]), turns, reward)


def _turn(row: Any) -> Turn:
    tokens = tuple(map(_whole, row["tokens"]))
    logprobs = tuple(map(_real, row["logprobs"]))
    first, last = map(_whole, row["steps"])
    marks = row["marks"]
    if not len(tokens) == len(logprobs) == len(marks) == LETTERS or first > last:
        raise ValueError("a turn of another length, or of steps that fall")
    if max(tokens) >= VOCAB_SIZE or max(logprobs) > 0 or not set(marks) <= set(VOCAB[1:]):
        raise ValueError("a token, log-probability or mark that cannot be")
    return Turn(tokens, logprobs, marks, (first, last))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no number of anything")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts side by side of one seed, together."""
    found: list[list[Rollout]] = []
    for rollout in rollouts:
        if not found or found[-1][0].seed != rollout.seed:
            found.append([])
        found[-1].append(rollout)
    return found
