"""Playing sessions: the policy's guesses go to the environment, and its marks come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import local
from typing import Any, Protocol

import requests

from deltactl.core.errors import DeltactlError, Malformed, Transient
from deltactl.core.threads import map_settled
from deltactl.demo.game import game, tokens
from deltactl.demo.game.rollouts import Batch, Rollout, Turn

GROUPS, GROUP = 16, 16  # games of a batch, and rollouts of each
_AT_ONCE = 16  # requests to the environment
_ANSWER = 30.0  # seconds that it may take to answer


class Sampler(Protocol):
    """The policy, as a server serves it."""

    def sample(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """``game.LETTERS`` tokens to go on from each prompt, and their log-probabilities."""
        ...

    def served(self) -> int:
        """The step that is served now."""
        ...


class Table:
    """The environment's client. From many threads at once, each with a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url, self._own = url, local()

    def begin(self, seed: int) -> str:
        """A new session's name."""
        found = self._post("/sessions", {"seed": seed}, 201).get("session")
        if not isinstance(found, str):
            raise Malformed("the environment names no session", file=self.url, found=found)
        return found

    def guess(self, session: str, word: str) -> tuple[str, float | None]:
        """The marks, and the reward if the session is over."""
        found = self._post(f"/sessions/{session}/guess", {"word": word}, 200)
        marks, reward = found.get("marks"), found.get("reward")
        if not isinstance(marks, str) or not isinstance(reward, float | None):
            raise Malformed("the environment's answer is none", file=self.url, found=found)
        return marks, reward

    def counts(self) -> dict[str, int]:
        """How many sessions there are and were: open, most at once, begun, done."""
        return dict(self._ask("GET", "/", None, 200))

    def _post(self, path: str, body: dict[str, Any], expected: int) -> dict[str, Any]:
        return self._ask("POST", path, body, expected)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, expected: int
    ) -> dict[str, Any]:
        if not hasattr(self._own, "session"):
            self._own.session = requests.Session()
            self._own.session.trust_env = False  # no proxy, no .netrc
        try:
            reply = self._own.session.request(method, self.url + path, json=body, timeout=_ANSWER)
            found = reply.json()
        except requests.RequestException as error:
            what = "the environment does not answer"
            raise Transient(what, file=self.url, found=type(error).__name__) from None
        if reply.status_code != expected or not isinstance(found, dict):
            what = "the environment refuses a request"
            raise DeltactlError(what, file=self.url + path, found=str(found)[:200])
        return found


@dataclass(slots=True)
class _Session:
    seed: int
    name: str
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None

    @property
    def prompt(self) -> list[int]:
        return tokens.prompt([(turn.tokens, turn.marks) for turn in self.turns])


class Player:
    """Plays batches. ``seed``: of the games; what the policy says is drawn by the server."""

    def __init__(self, sampler: Sampler, table: Table, seed: int) -> None:
        self._sampler, self._table, self._seed = sampler, table, seed
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="play")

    def close(self) -> None:
        self._pool.shutdown()

    def play(self, number: int, shapes: tuple[int, int] = (GROUPS, GROUP)) -> Batch:
        """Play a batch, all of its sessions at once, turn by turn. ``shapes``: how many games, and
        how often each."""
        draw = random.Random(f"{self._seed}/{number}")
        seeds = [draw.randrange(1 << 62) for _ in range(shapes[0])]
        each = [seed for seed in seeds for _ in range(shapes[1])]
        names = map_settled(self._pool, self._table.begin, each)
        sessions = [_Session(seed, name) for seed, name in zip(each, names, strict=True)]
        while going := [session for session in sessions if session.reward is None]:
            self._turn(going)
        rollouts = [Rollout(s.seed, tuple(s.turns), s.reward or 0.0) for s in sessions]
        return Batch(number, tuple(rollouts))

    def _turn(self, sessions: Sequence[_Session]) -> None:
        before = self._sampler.served()
        said = self._sampler.sample([session.prompt for session in sessions])
        steps = before, self._sampler.served()

        def answer(item: tuple[_Session, tuple[list[int], list[float]]]) -> None:
            session, (chosen, logprobs) = item
            marks, session.reward = self._table.guess(session.name, tokens.word(chosen))
            session.turns.append(Turn(tuple(chosen), tuple(logprobs), marks, steps))

        map_settled(self._pool, answer, zip(sessions, said, strict=True))
        if len(sessions[0].turns) > game.GUESSES:
            raise Malformed("the environment goes on past the last guess", file=self._table.url)
