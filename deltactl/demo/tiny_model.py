"""A tiny model that really trains: input for the demo and the tests.

A Qwen3-shaped transformers model of about 0.7 million parameters learns the next token of
generated sums. It is trained as large ones are: float32 master weights under AdamW, a forward and
a backward pass, and after each step the weights rounded to bfloat16 and written by
``save_pretrained``. A short pre-training at a high learning rate comes first. Without it every
element would move by the whole learning rate at the first step, since AdamW divides a new first
moment by its own size; with it weights and moments look used, and the low learning rates of
reinforcement learning then change about one bfloat16 weight in a hundred at each step, as in real
runs.

Needs torch, transformers and tokenizers (``pip install 'deltactl[demo]'``), all imported when
``train`` starts; no network, no GPU.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB = 512
CONTEXT_MAX = 512  # tokens
PRETRAIN_STEPS = 40
PRETRAIN_LR = 2e-3
BATCH, CONTEXT = 8, 64  # sequences a step, tokens in each
SHARD_BYTES = 640_000  # three shards, since there are 1.3 to 1.4 MB of weights
_UNITS = ("apples", "bolts", "cups", "doors", "eggs", "forks", "geese", "hats")


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step: its number (from 1), its Hugging Face directory, and the loss in nats a token."""

    step: int
    path: Path
    loss: float


def train(
    out: Path,
    steps: int,
    *,
    lr: float = 2e-6,
    tied: bool = False,
    seed: int = 0,
    shards: bool = True,
) -> Iterator[TrainedStep]:
    """Train ``steps`` steps and yield each once it is written, at ``out/step_000001`` and up.

    Each directory holds bfloat16 weights (in shards, or in one file if not ``shards``), config,
    generation config and tokenizer. With ``tied`` the output layer shares the embedding, and no
    ``lm_head.weight`` is written. On one machine the same arguments give the same bits. The caller
    may stop early; the next step is computed only when it is asked for.

    Raises ImportError where torch or transformers is not installed.
    """
    import torch

    text = _text(seed)
    tokenizer = _tokenizer(text)
    tokens = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    master = _model(tokenizer, tied=tied, seed=seed)
    served = _model(tokenizer, tied=tied, seed=seed).to(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(
        master.parameters(), lr=PRETRAIN_LR, betas=(0.9, 0.999), weight_decay=0.01
    )
    draw = torch.Generator().manual_seed(seed)
    with one_thread():
        for _ in range(PRETRAIN_STEPS):
            _update(master, optimizer, _batch(tokens, draw))
    for group in optimizer.param_groups:
        group["lr"] = lr
    for step in range(1, steps + 1):
        path = out / f"step_{step:06d}"
        with quiet(), one_thread():
            loss = _update(master, optimizer, _batch(tokens, draw))
            for coarse, fine in zip(served.parameters(), master.parameters(), strict=True):
                coarse.data.copy_(fine.data)
            served.save_pretrained(path, max_shard_size=SHARD_BYTES if shards else "1GB")
            tokenizer.save_pretrained(path)
        yield TrainedStep(step, path, loss)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and notes off the terminal meanwhile, and what is logged
    where it imports other libraries: DeepSpeed says which hardware it has not found."""
    from transformers import utils

    of_theirs: Any = utils.logging
    bars, level = of_theirs.is_progress_bar_enabled(), of_theirs.get_verbosity()
    of_theirs.disable_progress_bar()
    of_theirs.set_verbosity_error()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        of_theirs.set_verbosity(level)
        if bars:
            of_theirs.enable_progress_bar()


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread meanwhile.

    More gain nothing on matrices this small. Where other processes want the cores they cost much:
    torch's threads wait for each other at every operation.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _text(seed: int, sums: int = 1500) -> str:
    """Lines such as ``12 cups and 30 cups are 42 cups.``: something there is to learn."""
    draw = random.Random(seed)
    lines = []
    for _ in range(sums):
        a, b, unit = draw.randrange(100), draw.randrange(100), draw.choice(_UNITS)
        lines.append(f"{a} {unit} and {b} {unit} are {a + b} {unit}.")
    return "\n".join(lines)


def _tokenizer(text: str) -> Any:
    """A byte-level BPE made from ``text``: encodes any string, with ids below ``VOCAB``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast  # transformers leaves its constructors untyped
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(), trainer)
    end = "<|endoftext|>"
    return fast(tokenizer_object=bpe, eos_token=end, pad_token=end, model_max_length=CONTEXT_MAX)


def _model(tokenizer: Any, *, tied: bool, seed: int) -> Any:
    """A new Qwen3ForCausalLM on the CPU: float32, grouped-query attention and all."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    generation: Any = GenerationConfig
    end = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_MAX,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
    model.generation_config = generation(
        do_sample=True, temperature=0.7, top_p=0.9, eos_token_id=end, pad_token_id=end
    )
    return model.float().train()


def _batch(tokens: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """``BATCH`` stretches of ``CONTEXT`` tokens from random places, int64 [BATCH, CONTEXT]."""
    import torch

    starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=draw)
    return tokens[starts + torch.arange(CONTEXT)]


def _update(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """One step of AdamW on the loss of the next token; returns that loss."""
    import torch

    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
