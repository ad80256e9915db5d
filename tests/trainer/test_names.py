"""Tensors under the names that a checkpoint has, whatever the model is wrapped in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import UsageError
from deltactl.trainer import Publisher
from deltactl.trainer.model.names import Naming, unwrapped
from tests.support.publishing import adamw, assert_chain, bits_of, small, update


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


def qwen(*, tied: bool) -> Any:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def mixtral() -> Any:
    """Its experts are one tensor in memory and many in the checkpoint."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


MODELS = {"tied": lambda: qwen(tied=True), "untied": lambda: qwen(tied=False), "experts": mixtral}


@pytest.mark.parametrize("kind", MODELS)
def test_names_are_those_that_save_pretrained_writes(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind]()
    naming = Naming(model, None)
    for step in range(3):  # the plan of the first time is good for later ones
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        model.save_pretrained(tmp_path / str(step))
        saved = load_file(tmp_path / str(step) / "model.safetensors")
        assert bits_of(naming.tensors()) == bits_of(saved)
    assert ("lm_head.weight" in saved) == (kind != "tied")


def test_tensors_are_views_of_the_model_and_no_copies() -> None:
    model = qwen(tied=True)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for tensor in Naming(model, None).tensors().values():
        assert tensor.untyped_storage().data_ptr() in storages


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_do_not_enter_the_names(tmp_path: Path, one_rank: None) -> None:
    model = small()
    plain = bits_of(model.state_dict())
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    assert unwrapped(wrapped) is model
    assert bits_of(Naming(wrapped, None).tensors()) == plain
    model[0] = torch.compile(model[0], backend="eager")  # a part of it
    assert bits_of(Naming(wrapped, None).tensors()) == plain


def test_wrappers_of_parts_do_not_enter_the_names(one_rank: None) -> None:
    inner = torch.nn.ModuleDict({"layers": small(), "head": torch.nn.Linear(24, 2)})
    plain = bits_of(inner.state_dict())
    inner["layers"][1] = DistributedDataParallel(inner["layers"][1])
    inner["layers"] = torch.compile(DistributedDataParallel(inner["layers"]), backend="eager")
    inner["head"] = torch.nn.DataParallel(inner["head"])
    assert "layers._orig_mod.module.1.module.weight" in inner.state_dict()
    assert bits_of(Naming(inner, None).tensors()) == plain


def test_an_average_of_the_model_has_its_names(tmp_path: Path) -> None:
    model = small()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        model[0].weight.mul_(2)
    average.update_parameters(model)
    with Publisher(average, tmp_path / "bucket") as publisher:
        publisher.publish()
    expected = bits_of(average.module.state_dict())
    assert expected.keys() == model.state_dict().keys()
    assert_chain(LocalBucket(tmp_path / "bucket"), {1: expected}, tmp_path)


def test_a_module_of_the_users_with_such_a_name_is_no_wrapper() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = small()

    assert "module.0.weight" in Naming(Mine(), None).tensors()


@pytest.mark.parametrize("name", ["nonexistent", "0", "0.weights", "_orig_mod.0.weight", "", 0])
@pytest.mark.parametrize("given", [None, "other"])
def test_a_name_that_no_tensor_has_is_refused(tmp_path: Path, name: Any, given: str | None) -> None:
    names = {"0.weight": "a", name: given}
    model = torch.compile(small(), backend="eager")
    with pytest.raises(UsageError, match="no tensor of the model") as caught:
        Publisher(model, tmp_path / "bucket", names=names)  # type: ignore[arg-type]
    assert caught.value.found == str(name)
    assert "0.weight, 0.bias" in str(caught.value.expected)
    assert not (tmp_path / "bucket").exists()


def test_a_name_may_be_of_a_tensor_that_is_not_published(tmp_path: Path) -> None:
    """Tied, without a shape yet, or gone later."""
    tied = qwen(tied=True)
    assert "lm_head.weight" not in Naming(tied, {"lm_head.weight": None}).tensors()
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 3))
    assert sorted(Naming(lazy, {"0.weight": "x"}).tensors()) == ["1.bias", "1.weight"]
    model = torch.nn.Sequential(*small(), torch.nn.Linear(2, 2))
    naming = Naming(model, {"2.weight": "head"})
    assert "head" in naming.tensors()
    del model[2]
    assert "head" not in naming.tensors()


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ("0.weight", "a dict of names, or a function"),
        ([("0.weight", "a")], "a dict of names, or a function"),
        ({"0.weight": 3}, "what is no name"),
        (lambda name: name.encode(), "what is no name"),
        (lambda name: "one", "two tensors of the model get one name"),
    ],
)
def test_what_gives_no_names_is_refused(tmp_path: Path, names: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Publisher(small(), tmp_path / "bucket", names=names)
    assert not (tmp_path / "bucket").exists()


def test_parameters_without_a_shape_yet_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 3))
    assert sorted(Naming(model, None).tensors()) == ["1.bias", "1.weight"]
    model(torch.ones(1, 5))
    assert len(Naming(model, None).tensors()) == 4


def test_under_ddp_and_compile_training_is_published(tmp_path: Path, one_rank: None) -> None:
    model = small()
    wrapped: Any = torch.compile(DistributedDataParallel(model), backend="eager")
    optimizer = adamw(wrapped)
    expected = {}
    with Publisher(wrapped, tmp_path / "bucket", optimizer=optimizer):
        for step in (1, 2):
            update(wrapped, optimizer, step)
            expected[step] = bits_of(model.state_dict())
    assert_chain(LocalBucket(tmp_path / "bucket"), expected, tmp_path)


def test_other_ranks_publish_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model = small()
    optimizer = adamw(model)
    with Publisher(model, tmp_path / "bucket", optimizer=optimizer) as publisher:
        update(model, optimizer)
        publisher.publish(2)
    assert publisher.history == ()
    assert publisher.error is None
    assert not (tmp_path / "bucket").exists()


def test_accelerates_optimizer_steps_when_gradients_are_whole(tmp_path: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = small()
    wrapped, optimizer = accelerator.prepare(model, adamw(model))
    expected = {}
    with Publisher(wrapped, tmp_path / "bucket", optimizer=optimizer):
        for batch in range(4):
            with accelerator.accumulate(wrapped):
                loss = wrapped(torch.full((2, 24), 0.1 * batch).bfloat16()).float().sum()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if batch % 2:
                expected[batch // 2 + 1] = bits_of(model.state_dict())
    assert_chain(LocalBucket(tmp_path / "bucket"), expected, tmp_path)


def test_a_name_for_a_tied_twin_that_is_not_saved_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, False))
    model[1].weight = model[0].weight
    naming = Naming(model, {"1.weight": "x"})
    assert naming.tensors().keys() == {"0.weight"}
    naming.tensors()
    said = "names= has no effect for 1.weight: tied to, and saved under the name of, another tensor"
    assert caplog.messages == [said]
    Naming(model, {"0.weight": "x", "1.weight": None}).tensors()
    assert caplog.messages == [said]
