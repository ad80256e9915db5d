"""Stands in for a server: the policy of some steps ago, in bfloat16, in this process."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from deltactl.demo.game.game import LETTERS


class LaggingPolicy:
    """Serves what was published ``lag`` times before the last; draws by ``seed``."""

    def __init__(self, lag: int, seed: int) -> None:
        self._lag, self._kept = lag, deque[tuple[int, Any]]()
        self._draw = torch.Generator().manual_seed(seed)

    def publish(self, step: int, model: Any) -> None:
        self._kept.append((step, copy.deepcopy(model).bfloat16().eval()))
        while len(self._kept) > self._lag + 1:
            self._kept.popleft()

    def served(self) -> int:
        return self._kept[0][0]

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Of prompts of one length, as those of one turn are."""
        model, feed, cache = self._kept[0][1], torch.tensor(prompts), None
        chosen, logprobs = [], []
        for _ in range(LETTERS):
            out = model(input_ids=feed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            scores = torch.log_softmax(out.logits[:, -1].float(), -1)
            feed = torch.multinomial(scores.exp(), 1, generator=self._draw)
            chosen.append(feed)
            logprobs.append(scores.gather(1, feed))
        pairs = zip(torch.cat(chosen, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return list(pairs)
