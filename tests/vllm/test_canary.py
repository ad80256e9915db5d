"""What a model answers once its own loader has loaded it, and what comes of a bad answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltactl.core.errors import DeltactlError, Unsupported
from deltactl.vllm.layout.proven import RESTART
from deltactl.vllm.update.canary import Answer, Canary, weights_sum
from tests.support.ranks import thread_peers, together
from tests.vllm.test_serving import Ranks, all_of, hex_of

GOOD = Answer(np.linspace(-3, 4, 40, dtype=np.float32).reshape(8, 5), 17)
NOISE = replace(GOOD, logits=GOOD.logits + np.float32(0.01))
OTHER = replace(GOOD, logits=GOOD.logits[::-1].copy())
NAN = replace(GOOD, logits=np.full((8, 5), np.nan, np.float32))
INFINITE = replace(GOOD, logits=np.full((8, 5), np.inf, np.float32))
FLAT = replace(GOOD, logits=np.zeros((8, 5), np.float32))
NEW = replace(OTHER, weights=18)
NONE = Answer(np.empty(0, np.float32), 17)
"""Of a rank that vLLM gives no logits."""


class Voice:
    """What one rank answers, one after the other; an exception is raised."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.left = list(answers)

    def __call__(self) -> Answer:
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def canaries(voices: list[Voice]) -> list[Canary]:
    peers = thread_peers(len(voices))
    return [Canary(voice, peers[n]) for n, voice in enumerate(voices)]


def raised(birds: list[Canary], act: Callable[[Canary], None]) -> list[DeltactlError | None]:
    def one(bird: Canary) -> DeltactlError | None:
        try:
            act(bird)
        except DeltactlError as error:
            return error
        return None

    return together(birds, one)


@pytest.mark.parametrize(("before", "after", "found"), [
    (GOOD, GOOD, None),
    (GOOD, NOISE, None),
    (GOOD, NEW, None),
    (NAN, GOOD, None),  # it has been mended
    (FLAT, GOOD, None),
    (GOOD, FLAT, "the same logit for every token"),
    (GOOD, OTHER, "other logits, though no parameter has changed"),
    (GOOD, NAN, "logits that are no numbers"),
    (GOOD, INFINITE, "logits that are no numbers"),
    (NAN, NAN, "logits that are no numbers"),
    (GOOD, RuntimeError("no such kernel"), "RuntimeError: no such kernel"),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_a_good_answer(
    ranks: int, before: Answer, after: Answer | Exception, found: str | None
) -> None:
    voices = [Voice(before, after), *(Voice(NONE, NONE) for _ in range(1, ranks))]
    birds = canaries(voices)
    assert raised(birds, Canary.before) == [None] * ranks
    for error in raised(birds, Canary.after):
        assert (error and error.found) == found
        assert error is None or error.hint == RESTART


def test_parameters_that_changed_on_one_rank_may_change_the_answer() -> None:
    birds = canaries([Voice(GOOD, OTHER), Voice(NONE, replace(NONE, weights=18))])
    together(birds, Canary.before)
    assert raised(birds, Canary.after) == [None, None]


def test_a_model_that_cannot_be_asked_is_told_before_anything_is_written() -> None:
    birds = canaries([Voice(GOOD), Voice(NotImplementedError("two models in one"))])
    for error in raised(birds, Canary.before):
        assert isinstance(error, Unsupported)
        assert error.found == "NotImplementedError: two models in one"
        assert error.hint == RESTART


def test_other_weights_are_known_by_their_sum() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(6), requires_grad=False)
    model.b = nn.Parameter(torch.zeros(3, 2, dtype=torch.int8).t(), requires_grad=False)
    model.register_buffer("c", torch.empty(0))
    model.d = nn.Parameter(torch.empty(4, device="meta"))
    before = weights_sum(model)
    assert weights_sum(model) == before
    model.b.data[1, 2] = 1
    assert weights_sum(model) != before


def ranks_with(*voices: Voice) -> Ranks:
    server = Ranks(len(voices))
    for rank, voice in zip(server.ranks, voices, strict=True):
        rank._canary = Canary(voice, rank._peers)
    for toy in server.toys:
        toy.loads = True
    server.ready()
    return server


def test_an_update_with_a_good_answer_is_taken_over() -> None:
    server = ranks_with(Voice(GOOD, NEW), Voice(NONE, NONE))
    server.stage()
    assert server.seal() == all_of(server, "ready")
    assert server.commit() == all_of(server, "committed")
    assert server.serves() == 2


@pytest.mark.parametrize("voices", [
    (Voice(GOOD, NAN), Voice(NONE, NONE)),
    (Voice(GOOD, GOOD), Voice(NONE, RuntimeError("no"))),
])  # fmt: skip
def test_after_a_bad_answer_nobody_knows_the_weights(voices: Any) -> None:
    """What a loader has loaded cannot be taken back, although a toy could."""
    server = ranks_with(*voices)
    for toy in server.toys:
        toy.breaks.add("roll_back")
    server.stage()
    server.seal()
    assert server.commit() == all_of(server, "failed")
    for state in server.states():
        assert state["poisoned"]["hint"] == RESTART
        assert "does not answer as it should" in state["poisoned"]["found"]
        assert (state["step"], state["state"]) == (None, None)


def test_a_model_whose_cache_sleeps_is_not_asked() -> None:
    """There is nowhere to compute in; a trainer on the same device wakes it last."""
    server = ranks_with(Voice(RuntimeError("no memory")), Voice(RuntimeError("no memory")))
    for rank in server.ranks:
        rank.asleep = lambda: ("kv_cache",)
    server.stage()
    assert server.seal() == all_of(server, "ready")
    assert server.commit() == all_of(server, "committed")
    assert [state["update"]["unasked"] for state in server.states()] == [True, True]


def test_a_model_that_cannot_be_asked_refuses_the_update() -> None:
    server = ranks_with(Voice(ValueError("no attention")), Voice(NONE))
    server.stage()
    assert server.seal() == all_of(server, "refused")
    for state in server.states():
        assert state["update"]["error"]["hint"] == RESTART
        assert (state["poisoned"], state["state"]) == (None, hex_of(1))
    assert server.serves() == 1
