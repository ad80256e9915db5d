"""The policy as a vLLM server has it: tokens, their log-probabilities, and the step served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltactl.core.errors import Malformed
from deltactl.demo.game.game import LETTERS
from deltactl.demo.game.tokens import VOCAB_SIZE
from deltactl.server.http.routes import Server
from deltactl.server.http.wire import Wire

MODEL = "policy"
"""The name that the server serves it under."""

_ANSWER = 120.0  # seconds; while the server is paused an answer waits


class ServedPolicy:
    """A ``play.Sampler``. Raises what the wire raises, and Malformed."""

    def __init__(self, url: str) -> None:
        self._server, self._wire = Server(url, _ANSWER), Wire(url, _ANSWER)

    def close(self) -> None:
        self._server.close()
        self._wire.close()

    def served(self) -> int:
        step = self.known()
        if step is None:
            raise Malformed("the server no longer knows which step it serves", file=self._wire.url)
        return step

    def known(self) -> int | None:
        """The step that is served; None while the server has not been told, or is not sound."""
        engine = self._server.engine("deltactl_state")
        return engine.step if engine.sound else None

    def sample(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        body = {
            "model": MODEL,
            "prompt": list(prompts),
            "max_tokens": LETTERS,
            "min_tokens": LETTERS,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,  # of the chosen token alone
            "return_token_ids": True,
        }
        choices = self._wire.post("/v1/completions", body).get("choices")
        try:
            found = {choice["index"]: _completion(choice) for choice in choices or ()}
            return [found[number] for number in range(len(prompts))]
        except (KeyError, TypeError, ValueError) as error:
            what, why = "the server's completions make no sense", f"{type(error).__name__}: {error}"
            raise Malformed(what, file=self._wire.url, found=why) from None


def _completion(choice: Any) -> tuple[list[int], list[float]]:
    chosen, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if not len(chosen) == len(logprobs) == LETTERS:
        raise ValueError(f"{len(chosen)} tokens, {len(logprobs)} log-probabilities")
    if not all(type(token) is int and 0 <= token < VOCAB_SIZE for token in chosen):
        raise ValueError(f"tokens {chosen}")
    return chosen, [float(value) for value in logprobs]
