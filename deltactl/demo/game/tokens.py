"""What the model reads and writes: a token a letter and a mark, and one to begin with.

A session is the begin token, then for each guess its letters and its marks, as ``bat.A.``.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

from deltactl.demo.game.game import ABSENT, GUESSES, LETTERS, REFUSED

BEGIN = "<begin>"
VOCAB = (BEGIN, *string.ascii_lowercase, *string.ascii_uppercase, ABSENT, REFUSED)
VOCAB_SIZE = 64  # rows of the embedding; those past VOCAB are never used
CONTEXT_MAX = 1 + 2 * LETTERS * GUESSES

_IDS = {token: number for number, token in enumerate(VOCAB)}
BEGIN_ID = _IDS[BEGIN]


def ids(text: str) -> list[int]:
    """The tokens of letters and marks. Raises KeyError for anything else."""
    return [_IDS[character] for character in text]


def prompt(history: Iterable[tuple[Sequence[int], str]]) -> list[int]:
    """What the model is asked to go on from: the tokens of all guesses so far, and their marks."""
    found = [BEGIN_ID]
    for guess, said in history:
        found += [*guess, *ids(said)]
    return found


def word(tokens: Sequence[int]) -> str:
    """The text of generated tokens; ``#`` for each that is no letter, which makes it no word."""
    letters = (VOCAB[token] if 0 < token <= 26 else "#" for token in tokens)
    return "".join(letters)


def tokenizer() -> Any:
    """The same for transformers and for a server: a token for each character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast  # transformers leaves its constructors untyped
    vocab = _IDS | {f"<unused{n}>": n for n in range(len(VOCAB), VOCAB_SIZE)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=f"<unused{VOCAB_SIZE - 1}>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return fast(
        tokenizer_object=made,
        bos_token=BEGIN,
        pad_token=BEGIN,
        eos_token=f"<unused{VOCAB_SIZE - 2}>",
        model_max_length=CONTEXT_MAX,
    )
