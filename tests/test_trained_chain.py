"""A trained chain through the command line; what is pulled, against the trainer's own files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import deltactl
from deltactl.demo.tiny_model import one_thread, quiet
from tests.support.trained import STEPS, assert_same_bits, load_bits

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(deltactl.__file__).parents[1])}
TRAVELLING = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def run(*args: object, status: int = 0) -> dict[str, Any]:
    """Run ``deltactl … --json`` as a process of its own; returns its one object.

    What succeeds has nothing to say on stderr.
    """
    command = [sys.executable, "-m", "deltactl", *map(str, args), "--json"]
    environment = ENVIRONMENT | {"DELTACTL_CACHE": os.environ["DELTACTL_CACHE"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done
    assert bool(done.stderr) is bool(status), done
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Published:
    steps: list[Path]  # the trainer's directories, step 1 first
    bucket: Path
    pushed: list[dict[str, Any]]

    def trainers(self, step: int) -> Path:
        return self.steps[step - 1]


@pytest.fixture(scope="module", params=["trained_chain", "trained_chain_tied"])
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    steps = request.getfixturevalue(request.param)
    bucket = tmp_path_factory.mktemp("chain") / "bucket"
    return Published(steps, bucket, [run("push", path, bucket) for path in steps])


@pytest.fixture(scope="module")
def changed(published: Published) -> list[int | None]:
    """Elements that each step changed, counted by other means; None for the first."""
    bits = [load_bits(path) for path in published.steps]
    counts = [
        sum(int((after[name] != before[name]).sum()) for name in after)
        for before, after in pairwise(bits)
    ]
    return [None, *counts]


def assert_is_the_trainers(pulled: Path, trainers: Path) -> None:
    """The files hold the trainer's bits, and so does the model that transformers makes of them."""
    assert_same_bits(pulled, trainers)
    for name in TRAVELLING:
        assert (pulled / name).read_bytes() == (trainers / name).read_bytes()
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(pulled).bfloat16()
        tokenizer = AutoTokenizer.from_pretrained(pulled)
    served = model.state_dict()
    for name, bits in load_bits(trainers).items():
        assert torch.equal(served[name].view(torch.int16), bits), name
    ids = tokenizer("12 cups and 30 cups are", return_tensors="pt")["input_ids"]
    with one_thread():
        assert model.generate(ids, max_new_tokens=2).shape == (1, ids.shape[1] + 2)


def test_each_step_is_pushed_as_anchor_every_says(
    published: Published, changed: list[int | None]
) -> None:
    rows = published.pushed
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["kind"] == "anchor"] == [1, 10]
    assert all(row["written"] for row in rows)
    assert [row["changed_elements"] for row in rows] == changed
    size = 2 * rows[0]["total_elements"]
    assert all(row["bytes"] < size / 20 for row in rows if row["kind"] == "delta")


def test_diff_says_what_push_said(published: Published) -> None:
    for step in (2, STEPS):
        report = run("diff", published.trainers(step - 1), published.trainers(step))
        before, after = published.pushed[step - 2 : step]
        assert (report["base_state"], report["result_state"]) == (before["state"], after["state"])
        assert report["changed_elements"] == after["changed_elements"]
        assert report["total_elements"] == after["total_elements"]
        assert 0.90 < report["sparsity"] < 0.9995


def test_log_lists_a_chain_of_states(published: Published, changed: list[int | None]) -> None:
    links = run("log", published.bucket)["links"]
    deltas = [link for link in links if link["kind"] == "delta"]
    assert [link["step"] for link in deltas] == list(range(2, STEPS + 1))
    assert [link["step"] for link in links if link["kind"] == "anchor"] == [1, 10]
    assert [link["changed_elements"] for link in deltas] == changed[1:]
    states = [row["state"] for row in published.pushed]
    assert [(link["base_state"], link["result_state"]) for link in deltas] == [*pairwise(states)]


def test_verify_rebuilds_every_step(published: Published) -> None:
    report = run("verify", published.bucket, "--level", "rebuild")
    assert report["ok"]
    assert report["level"] == "rebuild"
    assert report["links"] == STEPS + 1  # step 10 has its delta and an anchor
    assert report["errors"] == []


def test_verify_against_the_trainers_checkpoints(published: Published) -> None:
    against = ["verify", published.bucket, "--level", "links", "--against"]
    assert run(*against, published.trainers(STEPS))["ok"]
    report = run(*against, published.trainers(6), "--step", 7, status=3)
    assert not report["ok"]
    assert {row["step"] for row in report["errors"]} == {7}


def test_last_step_comes_back_bit_for_bit(published: Published, tmp_path: Path) -> None:
    report = run("pull", published.bucket, tmp_path / "new")
    assert report["step"] == STEPS
    assert report["state"] == published.pushed[-1]["state"]
    assert report["bytes_fetched"] > 0
    assert_is_the_trainers(tmp_path / "new", published.trainers(STEPS))


def test_step_in_the_midst_comes_back_and_catches_up_in_place(
    published: Published, tmp_path: Path
) -> None:
    dest = tmp_path / "served"
    first = run("pull", published.bucket, dest, "--step", 7)
    assert first["step"] == 7
    assert_is_the_trainers(dest, published.trainers(7))
    second = run("pull", published.bucket, dest, "--step", STEPS)
    assert (second["from_step"], second["step"]) == (7, STEPS)
    assert second["bytes_fetched"] < first["bytes_fetched"] / 10
    assert_is_the_trainers(dest, published.trainers(STEPS))


def test_pushing_a_step_again_changes_nothing(published: Published) -> None:
    before = {path: path.stat().st_mtime_ns for path in published.bucket.rglob("*")}
    for step in (1, 7, STEPS):
        report = run("push", published.trainers(step), published.bucket, "--step", step)
        assert not report["written"]
        assert report["state"] == published.pushed[step - 1]["state"]
    assert before == {path: path.stat().st_mtime_ns for path in published.bucket.rglob("*")}


def test_tied_model_travels_without_an_output_layer(published: Published, tmp_path: Path) -> None:
    run("pull", published.bucket, tmp_path / "new")
    tied = json.loads((published.trainers(1) / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in load_bits(tmp_path / "new")) is not tied
