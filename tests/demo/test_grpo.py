"""The update: its ratios are those of the tokens, and it goes where the reward is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deltactl.demo.game import game, policy, tokens
from deltactl.demo.game.grpo import LR, RISE, Learner, advantages
from deltactl.demo.game.play import Player, Table
from deltactl.demo.game.rollouts import Batch, Rollout, Turn
from deltactl.demo.loop.environment import Environment
from tests.support.lagging_policy import LaggingPolicy


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rollout(seed: int, words: list[str], reward: float, logprob: float = -1.0) -> Rollout:
    turns = [
        Turn(tuple(tokens.ids(word)), (logprob,) * game.LETTERS, game.marks("bat", word), (0, 0))
        for word in words
    ]
    return Rollout(seed, tuple(turns), reward)


def test_advantages_are_those_within_a_group() -> None:
    rows = [rollout(1, ["bad"], r) for r in (0.0, 1.0)] + [rollout(2, ["bad"], 0.5)] * 3
    assert advantages(rows).tolist() == pytest.approx([-1, 1, 0, 0, 0], abs=1e-3)


def test_packed_sessions_say_which_tokens_were_chosen() -> None:
    text, chosen = policy.packed([[(tokens.ids("bad"), "BA."), (tokens.ids("bat"), "BAT")]])
    line = tokens.ids("badBA.batBAT")
    assert text.tolist()[0] == [tokens.BEGIN_ID, *line, *[0] * (policy.LENGTH - 13)]
    assert chosen[0].nonzero()[:, 0].tolist() == [1, 2, 3, 7, 8, 9]


def test_longest_session_loses_its_last_marks_alone() -> None:
    played = [(tokens.ids("bad"), "BA.")] * game.GUESSES
    text, chosen = policy.packed([played])
    assert text.shape == (1, policy.LENGTH) == (1, tokens.CONTEXT_MAX - game.LETTERS)
    assert int(chosen.sum()) == game.GUESSES * game.LETTERS


def played_on_policy(environment: Environment, model: Any, seed: int = 0) -> Batch:
    served = LaggingPolicy(0, seed)
    served.publish(0, model)
    player = Player(served, Table(environment.url), seed)
    try:
        return player.play(0, (4, 8))
    finally:
        player.close()


def test_rollouts_of_the_policy_itself_have_a_ratio_of_one(environment: Environment) -> None:
    """Whatever was generated, in whichever turn: only bfloat16's rounding is between the two."""
    model = policy.new_model(1)
    batch = played_on_policy(environment, model)
    assert {len(r.turns) for r in batch.rollouts} == {game.GUESSES}  # it knows no word yet
    update = Learner(model).update(batch.rollouts)
    assert update.drift < 0.03
    assert update.clipped == 0


def test_an_update_makes_likelier_what_was_rewarded() -> None:
    model = policy.new_model(2)
    good, bad = ["tan", "bat"], ["pig", "hug"]
    text, chosen = policy.packed([[(tokens.ids(w), game.marks("bat", w)) for w in good]])
    with torch.no_grad():
        before = policy.logprobs(model, text)[chosen[:, 1:]]
    sure = float(before.mean())
    rows = [rollout(1, good, 1.0, sure), rollout(1, bad, 0.0, sure)]
    learner = Learner(model)
    for _ in range(3):
        learner.update(rows)
    with torch.no_grad():
        after = policy.logprobs(model, text)[chosen[:, 1:]]
    assert float((after - before).mean()) > 0.05


def test_a_group_without_differences_changes_nothing() -> None:
    model = policy.new_model(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Learner(model).update([rollout(1, ["bad"], 0.25)] * 4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), before[name].view(torch.int32)), name


def test_what_is_past_the_bounds_has_no_say() -> None:
    """A rewarded token that is likelier already than the clip allows gives no gradient."""
    model = policy.new_model(4)
    rows = [rollout(1, ["bad"], 1.0, -60.0), rollout(1, ["bad"], 0.0, -1e-9)]
    update = Learner(model).update(rows)
    assert update.clipped == 1
    assert update.gradient == 0


def test_learning_rate_rises_to_its_full() -> None:
    learner = Learner(policy.new_model(0))
    rates = []
    for _ in range(RISE + 2):
        rates.append(learner.optimizer.param_groups[0]["lr"])
        learner.update([rollout(1, ["bad"], 0.25)])
    assert rates[0] == pytest.approx(LR / RISE)
    assert rates == sorted(rates)
    assert rates[-3:] == pytest.approx([LR] * 3)


def test_reward_rises_from_rollouts_of_an_older_policy(environment: Environment) -> None:
    """One secret, so that there is little to learn: a dozen stale batches show it."""
    model = policy.new_model(0)
    policy.warm_up(model, 0, steps=40)
    served = LaggingPolicy(2, 0)
    served.publish(0, model)
    player, learner = Player(served, Table(environment.url), 0), Learner(model)
    rewards = []
    for number in range(14):
        batch = player.play(0, (1, 64))
        batch = Batch(number, batch.rollouts)
        assert batch.staleness == min(number, 2)
        learner.update(batch.rollouts)
        served.publish(number + 1, model)
        rewards.append(batch.reward)
    player.close()
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert all(math.isfinite(reward) for reward in rewards)
