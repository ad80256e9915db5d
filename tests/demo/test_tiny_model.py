"""The tiny trainer: what it writes looks like the checkpoints of a real run."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltactl.demo import tiny_model
from tests.support.trained import STEPS, load_bits


@pytest.fixture(params=["trained_chain", "trained_chain_tied"])
def chain(request: pytest.FixtureRequest) -> list[Path]:
    return request.getfixturevalue(request.param)


def weights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_steps_are_numbered_from_one(chain: list[Path]) -> None:
    assert [path.name for path in chain] == [f"step_{step:06d}" for step in range(1, STEPS + 1)]


def test_every_step_has_two_shards_or_more_and_an_index_that_covers_them(chain: list[Path]) -> None:
    for path in chain:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert {file.name for file in weights(path)} == set(index["weight_map"].values())
        assert len(weights(path)) >= 2
        assert load_bits(path).keys() == index["weight_map"].keys()


def test_weights_on_disk_are_bfloat16(chain: list[Path]) -> None:
    for file in weights(chain[-1]):
        with safe_open(file, "pt") as opened:
            assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((chain[-1] / "config.json").read_text())
    assert (
        config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    )  # the key's later name first


def test_size_is_that_of_a_tiny_model(chain: list[Path]) -> None:
    assert 500_000 < sum(bits.numel() for bits in load_bits(chain[0]).values()) < 2_000_000


def test_each_step_changes_about_one_element_in_a_hundred(chain: list[Path]) -> None:
    for before, after in pairwise(load_bits(path) for path in chain):
        changed = sum(int((after[name] != before[name]).sum()) for name in after)
        share = changed / sum(bits.numel() for bits in after.values())
        assert 0.0005 < share < 0.10


def test_tied_model_stores_no_output_layer(
    trained_chain: list[Path], trained_chain_tied: list[Path]
) -> None:
    untied, tied = load_bits(trained_chain[-1]), load_bits(trained_chain_tied[-1])
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert not torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])


def test_transformers_loads_model_and_tokenizer(chain: list[Path]) -> None:
    with tiny_model.quiet():
        model = AutoModelForCausalLM.from_pretrained(chain[-1])
        tokenizer = AutoTokenizer.from_pretrained(chain[-1])
    assert model.generation_config.do_sample
    text = "7 cups and 30 cups are 37 cups. \N{SNOWMAN}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) <= model.config.vocab_size


def test_same_seed_same_files_other_seed_others(tmp_path: Path, trained_chain: list[Path]) -> None:
    again = [done.path for done in tiny_model.train(tmp_path / "again", 2)]
    for path, first in zip(again, trained_chain, strict=False):
        names = sorted(file.name for file in first.iterdir())
        assert names == sorted(file.name for file in path.iterdir())
        assert all((path / name).read_bytes() == (first / name).read_bytes() for name in names)
    (other,) = tiny_model.train(tmp_path / "other", 1, seed=1)
    ours, theirs = load_bits(again[0]), load_bits(other.path)
    assert not torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])


def test_masters_are_float32_under_adamw_at_the_rate_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.optim.AdamW] = []

    class Spy(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    (done,) = tiny_model.train(tmp_path, 1, lr=3e-6)
    (optimizer,) = made
    (group,) = optimizer.param_groups
    assert group["lr"] == 3e-6
    assert {weight.dtype for weight in group["params"]} == {torch.float32}
    moments = [optimizer.state[weight]["exp_avg_sq"] for weight in group["params"]]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert all(moment.count_nonzero() for moment in moments)
    with tiny_model.quiet():
        served = AutoModelForCausalLM.from_pretrained(done.path)
    for coarse, fine in zip(served.parameters(), group["params"], strict=True):
        assert torch.equal(coarse.bfloat16(), fine.bfloat16())


def test_one_file_where_shards_are_not_wanted_and_a_real_loss(tmp_path: Path) -> None:
    (done,) = tiny_model.train(tmp_path, 1, shards=False)
    assert [file.name for file in weights(done.path)] == ["model.safetensors"]
    assert not (done.path / "model.safetensors.index.json").exists()
    guessing = math.log(tiny_model.VOCAB)
    assert 0 < done.loss < guessing / 2


def test_says_nothing_and_leaves_the_callers_random_state_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.random.get_rng_state()
    for _ in tiny_model.train(tmp_path, 2):
        pass
    assert capfd.readouterr() == ("", "")
    assert torch.equal(before, torch.random.get_rng_state())
