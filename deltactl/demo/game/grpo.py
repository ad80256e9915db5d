"""One update of the policy from rollouts that somewhat older policies made.

Group-relative policy optimization (Shao et al. 2024, "DeepSeekMath", eq. 3, without the penalty on
divergence): the advantage of a rollout is its reward less its group's mean, over the group's
deviation; each token's share of the objective is that, times the ratio of its probability now to
what it was where it was generated, clipped (Schulman et al. 2017, "Proximal Policy Optimization",
eq. 7). The older probabilities are those that the server gave, so that a rollout may be stale, and
made by two steps in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltactl.demo.game.policy import LENGTH, logprobs, packed
from deltactl.demo.game.rollouts import Rollout, groups

if TYPE_CHECKING:
    import torch

LR = 1e-3
RISE = 5  # updates to the full learning rate
LOW, HIGH = 0.8, 1.28  # what the ratio is clipped to; higher above, as DAPO (Yu et al. 2025) has it


@dataclass(frozen=True, slots=True)
class GradientStep:
    """Of one update.

    ``drift``: how far the policy had moved since the rollouts, the mean over all tokens of the
    ratio less one, absolute; ``clipped``: the share of them whose ratio was past the bounds;
    ``gradient``: its norm, before that was clipped to 1.
    """

    drift: float
    clipped: float
    gradient: float


class Learner:
    """The model, and AdamW without decay on it.

    The learning rate rises over the first updates: AdamW divides by moments that it has hardly seen
    anything for, and would move every element by the whole rate at the first of them.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0
        )
        self._rates = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / RISE, 1, RISE - 1)

    def update(self, rollouts: Sequence[Rollout]) -> GradientStep:
        """One step of the optimizer."""
        found = _update(self.model, self.optimizer, rollouts)
        self._rates.step()
        return found


def _update(
    model: Any, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout]
) -> GradientStep:
    import torch

    text, chosen = packed([[(turn.tokens, turn.marks) for turn in r.turns] for r in rollouts])
    chosen, old = chosen[:, 1:], _behaviour(rollouts)
    advantage = advantages(rollouts)[:, None]
    ratio = (logprobs(model, text) - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)
    loss = -(gain * chosen).sum() / chosen.sum()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    moved = ratio.detach()[chosen]
    past = (moved < LOW) | (moved > HIGH)
    return GradientStep(float((moved - 1).abs().mean()), float(past.float().mean()), float(norm))


def advantages(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Of each rollout in its group, float32 [n]; 0 in a group in which all rewards are the same."""
    import torch

    found = []
    for group in groups(rollouts):
        reward = torch.tensor([rollout.reward for rollout in group])
        centred = reward - reward.mean()
        found.append(centred / (reward.std(correction=0) + 1e-4))
    return torch.cat(found)


def _behaviour(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The server's log-probabilities where ``logprobs`` has the model's: [n, LENGTH - 1]."""
    import torch

    old = torch.zeros(len(rollouts), LENGTH - 1)
    for row, rollout in enumerate(rollouts):
        line: list[float] = []
        for turn in rollout.turns:
            line += [*turn.logprobs, *(0.0 for _ in turn.marks)]
        line = line[: LENGTH - 1]
        old[row, : len(line)] = torch.tensor(line)
    return old
