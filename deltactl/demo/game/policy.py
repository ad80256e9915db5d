"""The policy: a tiny Qwen3 that has watched a careless player, and what it gives tokens.

The warm-up is supervised: the next token of games by a player who now and then minds the marks and
else names any word. So the model plays words, and knows what it might mind; that this pays is left
for reinforcement learning to find out.

Needs torch and transformers, imported when they are needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltactl.demo.game import game, tokens

if TYPE_CHECKING:
    import torch

LENGTH = tokens.CONTEXT_MAX - game.LETTERS  # tokens of a session; nobody reads the last marks
CARE = 0.5  # share of the guesses at which the careless player minds the marks
WARM_UP = 150  # steps
_GAMES = 64  # a step
_LR = 2e-3
_RISE = 20  # steps to the full learning rate, which then falls to nothing

Played = Sequence[tuple[Sequence[int], str]]
"""A session: the tokens of each guess, and the marks that it was answered by."""


def new_model(seed: int) -> Any:
    """A Qwen3ForCausalLM of 0.3 million parameters, float32 on the CPU, with random weights."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    generation: Any = GenerationConfig
    config = Qwen3Config(
        vocab_size=tokens.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=tokens.BEGIN_ID,
        eos_token_id=None,
        pad_token_id=None,  # its embedding would be kept at zero
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
    model.generation_config = generation(bos_token_id=tokens.BEGIN_ID)
    return model.float().train()


def packed(sessions: Sequence[Played]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sessions as tokens, int64 [n, LENGTH], and which of them the policy chose, bool, the same
    shape. What is past a session's end is 0 and was not chosen."""
    import torch

    text = torch.zeros(len(sessions), LENGTH, dtype=torch.long)
    chosen = torch.zeros(len(sessions), LENGTH, dtype=torch.bool)
    for row, session in enumerate(sessions):
        line, marked = [tokens.BEGIN_ID], [False]
        for guess, said in session:
            line += [*guess, *tokens.ids(said)]
            marked += [True] * game.LETTERS + [False] * game.LETTERS
        line, marked = line[:LENGTH], marked[:LENGTH]
        text[row, : len(line)] = torch.tensor(line)
        chosen[row, : len(line)] = torch.tensor(marked)
    return text, chosen


def logprobs(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Natural log-probability of each token but the first, given those before: float32
    [n, LENGTH - 1]."""
    import torch

    logits = model(input_ids=text[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits.float(), -1).gather(-1, text[:, 1:, None])[..., 0]


def warm_up(model: Any, seed: int, steps: int = WARM_UP) -> None:
    """Have the model learn from a careless player's games."""
    import torch

    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (step + 1) / _RISE) * max(0.05, 1 - step / steps)
        text, chosen = packed([_careless(draw) for _ in range(_GAMES)])
        chosen = chosen[:, 1:]
        loss = -(logprobs(model, text) * chosen).sum() / chosen.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _careless(draw: random.Random) -> list[tuple[list[int], str]]:
    secret, history = draw.choice(game.WORDS), list[tuple[str, str]]()
    while len(history) < game.GUESSES and (not history or history[-1][0] != secret):
        words = game.fitting(history) if draw.random() < CARE else game.WORDS
        guess = draw.choice(words)
        history.append((guess, game.marks(secret, guess)))
    return [(tokens.ids(guess), said) for guess, said in history]
