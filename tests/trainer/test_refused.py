"""Models whose weights are not in their tensors, or not under a checkpoint's names: refused by all
ranks alike, with the way out, and nothing of them gets into a bucket."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import Unsupported
from deltactl.demo.tiny_model import quiet
from deltactl.ops.verify import verify_bucket
from deltactl.trainer import DeltaCallback, Publisher
from tests.support import sharded
from tests.support.publishing import assert_chain, bits_of, small


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


# Two ranks, of DeepSpeed and of FSDP1.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(place: Path) -> list[dict[str, dict[str, Any]]]:
    return sharded.run(place)


WAYS_OUT = {"fsdp1": ("(FSDP1)", "fully_shard (FSDP2)"), "zero3": ("ZeRO stage 3", "ZeRO stage 2")}


def kind(case: str) -> str:
    return case.partition(":")[0].partition(" ")[0]


REFUSED = [case for case in sharded.CASES if kind(case) in WAYS_OUT and "much" not in case]


@pytest.mark.parametrize("case", REFUSED)
def test_sharded_models_are_refused_by_all_ranks_alike(
    ranks: list[dict[str, dict[str, Any]]], case: str
) -> None:
    first, second = (rows[case] for rows in ranks)
    assert first == second
    assert first["error"] == "Unsupported"
    says, hint = WAYS_OUT[kind(case)]
    assert says in first["says"] and hint in first["hint"]
    assert first["published"] == []


def test_a_model_that_is_wrapped_in_the_middle_of_training_stops_neither_rank(
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    first, second = (rows["fsdp1 much later: Publisher"] for rows in ranks)
    assert first["says"].startswith("trained, Unsupported: a model that FullySharded")
    assert second["says"] == "trained"
    assert first["published"] == ["anchors"]  # nothing after it


def test_a_parameter_that_was_emptied_is_refused_by_all_ranks(
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    first, second = (rows["emptied: Publisher"] for rows in ranks)
    assert first == second
    assert first["error"] == "Unsupported"
    assert "tensor '1.weight'" in first["says"]
    assert first["published"] == []


def test_names_of_no_tensor_on_one_rank_are_refused_by_all(
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    first, second = (rows["names of no tensor: RanksPublisher"] for rows in ranks)
    assert first == second
    assert first["error"] == "UsageError"
    assert "found nonexistent" in first["says"]
    assert first["published"] == []


def test_a_dtype_that_changes_in_a_run_is_told_of_once_by_each_rank(
    ranks: list[dict[str, dict[str, Any]]],
) -> None:
    for rows in ranks:
        row = rows["another dtype later: RanksPublisher"]
        said = [text for text in row["says"] if "BF16" in text]
        assert len(said) == 1, row
        assert said[0].startswith("nothing more is published of this run")
        assert "close the publisher, and make another" in said[0]
        assert row["published"] == ["anchors"]


def test_what_zero_leaves_whole_is_published(
    ranks: list[dict[str, dict[str, Any]]], place: Path, tmp_path: Path
) -> None:
    case = "zero2: Publisher"
    assert [rows[case]["error"] for rows in ranks] == [None, None]
    there = place / str(list(sharded.CASES).index(case))
    expected = {n: pickle.loads((there / f"expected-{n}").read_bytes()) for n in (1, 2, 3)}
    assert sorted(expected[1]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert expected[1] != expected[2]
    assert_chain(LocalBucket(there / "bucket"), expected, tmp_path)


def test_ranks_that_end_without_closing_put_what_they_have(
    ranks: list[dict[str, dict[str, Any]]], place: Path, tmp_path: Path
) -> None:
    case = "never closed: RanksPublisher"
    assert [rows[case]["error"] for rows in ranks] == [None, None]
    there = place / str(list(sharded.CASES).index(case))
    expected = {n: pickle.loads((there / f"expected-{n}").read_bytes()) for n in (1, 2, 3)}
    assert_chain(LocalBucket(there / "bucket"), expected, tmp_path)


def test_a_trainer_with_zero_stage_2_is_published(
    ranks: list[dict[str, dict[str, Any]]], place: Path
) -> None:
    case = "zero2 of a Trainer: DeltaCallback"
    assert [rows[case]["says"] for rows in ranks] == [{"1": "anchor", "2": "delta"}, {}]
    bucket = LocalBucket(place / str(list(sharded.CASES).index(case)) / "bucket")
    assert verify_bucket(bucket, level="rebuild").ok


@pytest.mark.parametrize("case", ["zero2's optimizer", "zero2's inner optimizer"])
def test_an_optimizer_of_zeros_copies_is_refused_by_all_ranks(
    ranks: list[dict[str, dict[str, Any]]], case: str
) -> None:
    first, second = (rows[f"{case}: Publisher"] for rows in ranks)
    assert first == second
    assert first["error"] == "UsageError"
    assert "publisher.publish(step)" in first["hint"]
    assert first["published"] == []


# One process.


def no_storage(model: torch.nn.Module) -> None:
    model[1].weight.untyped_storage().resize_(0)


def on_meta(model: torch.nn.Module) -> None:
    model[1].to("meta")


def emptied(model: torch.nn.Module) -> None:
    model[1].weight.data = torch.empty(0)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [(no_storage, "freed"), (on_meta, "meta device"), (emptied, "no elements")],
)
def test_weights_that_are_not_there_are_refused(tmp_path: Path, spoil: Any, found: str) -> None:
    model = small()
    spoil(model)
    with pytest.raises(Unsupported, match=found) as caught:
        Publisher(model, tmp_path / "bucket")
    assert caught.value.tensor == "1.weight"
    assert not (tmp_path / "bucket").exists()
    names = dict.fromkeys(("1.weight", "1.bias"))
    with Publisher(model, tmp_path / "bucket", names=names) as publisher:  # the way out
        publisher.publish()
    expected = bits_of(model[0].state_dict(prefix="0."))
    assert_chain(LocalBucket(tmp_path / "bucket"), {1: expected}, tmp_path)


@pytest.mark.parametrize("model", [torch.nn.Tanh(), torch.nn.Embedding(0, 8)])
def test_a_model_without_any_elements_is_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    with pytest.raises(Unsupported, match="no elements"):
        Publisher(model, tmp_path / "bucket")
    assert not (tmp_path / "bucket").exists()


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def prompt_tuning(model: Any) -> Any:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    return get_peft_model(model, config)


def inside(model: Any) -> Any:
    return torch.nn.ModuleDict({"policy": lora(model)})


def base_of(model: Any) -> Any:
    """The model that PEFT has changed in place."""
    lora(model)
    return model


@pytest.mark.parametrize("adapt", [lora, prompt_tuning, inside, base_of])
def test_adapters_are_refused(tmp_path: Path, trained_chain: list[Path], adapt: Any) -> None:
    model = adapt(AutoModelForCausalLM.from_pretrained(trained_chain[0]))
    with pytest.raises(Unsupported, match="adapters of PEFT") as caught:
        Publisher(model, tmp_path / "bucket")
    assert "merge_and_unload" in str(caught.value.hint)
    assert not (tmp_path / "bucket").exists()


def test_adapters_that_come_after_the_publisher_are_refused_at_the_first_step(
    tmp_path: Path, trained_chain: list[Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained_chain[0])
    with Publisher(model, tmp_path / "bucket") as publisher:
        lora(model)
        with pytest.raises(Unsupported, match="adapters of PEFT"):
            publisher.publish()
    assert publisher.history == ()


def test_the_merged_model_is_published(tmp_path: Path, trained_chain: list[Path]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(trained_chain[0])
    names = plain.state_dict().keys()
    merged = lora(plain).merge_and_unload()
    with Publisher(merged, tmp_path / "bucket") as publisher:
        publisher.publish()
    expected = bits_of(merged.state_dict())
    assert expected.keys() == names
    assert_chain(LocalBucket(tmp_path / "bucket"), {1: expected}, tmp_path)


def test_a_trainer_with_adapters_is_told_before_it_trains(
    tmp_path: Path, trained_chain: list[Path]
) -> None:
    model = lora(AutoModelForCausalLM.from_pretrained(trained_chain[0]))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    ids = [{"input_ids": [n + 1] * 8, "labels": [n + 2] * 8} for n in range(32)]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=ids,
        processing_class=AutoTokenizer.from_pretrained(trained_chain[0]),
        callbacks=[DeltaCallback(tmp_path / "bucket")],
    )  # fmt: skip
    with quiet(), pytest.raises(Unsupported, match="adapters of PEFT"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "bucket").exists()
