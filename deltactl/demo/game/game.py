"""The game: find a three-letter word in four guesses, told after each which letters were right.

As in Wordle, a guess is answered by a mark for each letter. The words are few and much alike, so
that a guess tells something about all of them and a tiny model can learn to use it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

WORDS = (
    *("bad", "bag", "ban", "bat", "bed", "beg", "bet", "bid", "big", "bin", "bit", "bog"),
    *("bud", "bug", "bun", "but", "had", "hag", "hat", "hen", "hid", "hit", "hog", "hot"),
    *("hug", "hut", "pad", "pan", "pat", "peg", "pen", "pet", "pig", "pin", "pit", "pod"),
    *("pot", "pun", "put", "tad", "tag", "tan", "ten", "tin", "tog", "tot", "tug", "tun"),
)
LETTERS = 3  # of a word
GUESSES = 4  # of a session

ABSENT, REFUSED = ".", "!"
"""Marks: a letter that is not (or not so often) in the word; and, for each letter of a guess that
is no word, nothing said. A letter that is right where it stands is marked by its capital, one that
belongs elsewhere by itself."""

_LEGAL = frozenset(WORDS)


def secret_of(seed: int) -> str:
    """The word that a session of this seed is about: the same for everybody, at any time."""
    return random.Random(seed).choice(WORDS)


def is_legal(guess: str) -> bool:
    """Whether a guess is one of the words."""
    return guess in _LEGAL


def marks(secret: str, guess: str) -> str:
    """The answer to a guess, a mark for each letter.

    A letter is marked present as often as the secret has it beyond the places that are right, from
    the left.
    """
    if guess not in _LEGAL:
        return REFUSED * LETTERS
    spare = Counter(s for s, g in zip(secret, guess, strict=True) if s != g)
    found = []
    for wanted, letter in zip(secret, guess, strict=True):
        if wanted == letter:
            found.append(letter.upper())
        elif spare[letter] > 0:
            spare[letter] -= 1
            found.append(letter)
        else:
            found.append(ABSENT)
    return "".join(found)


def reward(history: Sequence[tuple[str, str]]) -> float:
    """Of a session that is over: 1 where the first guess was the word, an eighth less for each
    guess more; where none was, an eighth for each letter that the last guess had in its place."""
    placed = sum(mark.isupper() for mark in history[-1][1])
    return 1 - (len(history) - 1) / 8 if placed == LETTERS else placed / 8


def fitting(history: Sequence[tuple[str, str]]) -> list[str]:
    """The words that would have been answered as ``history``: pairs of guess and marks."""
    return [word for word in WORDS if all(marks(word, guess) == said for guess, said in history)]
