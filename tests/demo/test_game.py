"""The rules of the game, against a second way to state them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.demo.game import game, tokens

words = st.sampled_from(game.WORDS)


@given(words, words)
def test_marks_say_for_each_letter_what_is_known_of_it(secret: str, guess: str) -> None:
    said = game.marks(secret, guess)
    for place, (letter, mark) in enumerate(zip(guess, said, strict=True)):
        assert mark in (letter.upper(), letter, game.ABSENT)
        assert mark.isupper() == (secret[place] == letter)
    for letter in set(guess):
        told = said.lower().count(letter)
        assert told == min(guess.count(letter), secret.count(letter))


@pytest.mark.parametrize(
    ("secret", "guess", "said"),
    [
        ("bat", "bat", "BAT"),
        ("bat", "tab", "!!!"),  # no word of the list
        ("bat", "tot", "..T"),  # the first t is one too many
        ("tot", "ten", "T.."),
        ("ten", "tot", "T.."),  # the second t is one too many
        ("hat", "tad", "tA."),
        ("bat", "", "!!!"),
        ("bat", "bats", "!!!"),
        ("bat", "BAT", "!!!"),
    ],
)
def test_marks_by_example(secret: str, guess: str, said: str) -> None:
    assert game.marks(secret, guess) == said


def test_words_are_distinct_and_of_one_length() -> None:
    assert len(set(game.WORDS)) == len(game.WORDS) == 48
    assert {len(word) for word in game.WORDS} == {game.LETTERS}


@given(st.lists(words, min_size=1, max_size=game.GUESSES), words)
def test_rewards_are_between_none_and_all(guesses: list[str], secret: str) -> None:
    history = [(guess, game.marks(secret, guess)) for guess in guesses]
    reward = game.reward(history)
    assert 0 <= reward <= 1
    solved = guesses[-1] == secret
    assert (reward > 0.5) == solved
    assert (reward == 1) == (solved and len(guesses) == 1)


@given(st.lists(words, max_size=game.GUESSES), words)
def test_the_secret_fits_whatever_was_said_of_it(guesses: list[str], secret: str) -> None:
    history = [(guess, game.marks(secret, guess)) for guess in guesses]
    assert secret in game.fitting(history)


def test_secrets_depend_on_the_seed_alone_and_all_come_up() -> None:
    found = [game.secret_of(seed) for seed in range(1000)]
    assert found == [game.secret_of(seed) for seed in range(1000)]
    assert set(found) == set(game.WORDS)


@given(st.lists(st.integers(0, tokens.VOCAB_SIZE - 1), min_size=3, max_size=3))
def test_only_letters_make_a_word(drawn: list[int]) -> None:
    text = tokens.word(drawn)
    letters = all(1 <= token <= 26 for token in drawn)
    assert text.isalpha() == letters
    assert not letters or tokens.ids(text) == drawn


def test_prompt_is_begin_then_guesses_and_marks() -> None:
    text = tokens.prompt([(tokens.ids("bat"), "B.t"), ((60, 61, 62), "!!!")])
    assert text == [tokens.BEGIN_ID, *tokens.ids("batB.t"), 60, 61, 62, *tokens.ids("!!!")]


def test_tokenizer_is_that_of_the_prompts() -> None:
    made = tokens.tokenizer()
    assert made("batB.t!").input_ids == tokens.ids("batB.t!")
    assert len(made) == tokens.VOCAB_SIZE
    assert made.bos_token_id == tokens.BEGIN_ID
