"""The gate of a chain: which models are another, why, and what is only said."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.chain.admission import (
    Admitted,
    Architecture,
    Model,
    check_first,
    check_same_model,
)
from deltactl.core.errors import Conflict

WAY = "push into another bucket"


@dataclass(frozen=True)
class Spec:
    dtype: str
    shape: tuple[int, ...]


def llama(layers: int = 4, dtype: str = "BF16") -> dict[str, Spec]:
    tensors = {"model.embed_tokens.weight": Spec(dtype, (64, 16))}
    for n in range(layers):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"model.layers.{n}.self_attn.{part}.weight"] = Spec(dtype, (16, 16))
        tensors[f"model.layers.{n}.norm.weight"] = Spec(dtype, (16,))
    return tensors | {"lm_head.weight": Spec(dtype, (64, 16))}


def adapter(layers: int = 4, front: str = "base_model.model.") -> dict[str, Spec]:
    return {
        f"{front}model.layers.{n}.self_attn.{part}.{side}.weight": Spec("F32", (4, 16))
        for n in range(layers)
        for part in ("q_proj", "v_proj")
        for side in ("lora_A", "lora_B")
    }


def renamed(tensors: dict[str, Spec], front: str) -> dict[str, Spec]:
    return {front + name: spec for name, spec in tensors.items()}


def inside(tensors: dict[str, Spec], mark: str) -> dict[str, Spec]:
    """A mark after each layer's number, as where every layer is wrapped."""
    return {re.sub(r"\.\d+\.", rf"\g<0>{mark}", name): spec for name, spec in tensors.items()}


def refusal(chain: Model, new: Model) -> Conflict:
    with pytest.raises(Conflict, match="another model than the chain's tip, step 6: ") as caught:
        check_same_model(chain, new, way=WAY, file="step_7", tip=6)
    error = caught.value
    assert (error.file, error.step) == ("step_7", None)
    assert error.expected
    assert error.found
    assert error.hint is not None
    assert error.hint.endswith(WAY)
    allowed = check_same_model(chain, new, way=WAY, allow=True)
    assert allowed.other
    assert allowed.notes
    return error


def admitted(chain: Model, new: Model) -> Admitted:
    found = check_same_model(chain, new, way=WAY)
    assert not found.other
    assert check_same_model(chain, new, way=WAY, allow=True) == found
    return found


MODEL = Model(llama(), Architecture("llama", ("LlamaForCausalLM",)))


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (renamed(llama(), "_orig_mod."), "torch.compile"),
        (renamed(llama(), "module."), "DistributedDataParallel"),
        (renamed(llama(), "module._orig_mod."), "torch.compile"),
        (renamed(llama(), "_orig_mod.module."), "torch.compile"),
        (inside(llama(), "_orig_mod."), "torch.compile"),
        (inside(llama(), "_checkpoint_wrapped_module."), "activation checkpointing"),
        (inside(llama(), "_fsdp_wrapped_module."), "FSDP"),
        (renamed(llama(), "base_model.model."), "PEFT"),
        (renamed(llama(), "policy."), "'policy.'"),
        (renamed(llama(), "actor.model."), "'actor.model.'"),
        ({n.replace("_proj.", "_proj.base_layer."): s for n, s in llama().items()}, "PEFT"),
        (adapter(), "LoRA adapter: merge it"),
        (adapter(front=""), "LoRA adapter: merge it"),
        (llama(dtype="F32"), "as the chain has it, BF16"),
        ({name: Spec("BF16", (0,)) for name in llama()}, "ZeRO-3"),
        ({"_flat_param": Spec("BF16", (4096,))}, "FSDP"),
        ({}, ""),
    ],
)
def test_the_likely_reason(tensors: dict[str, Spec], word: str) -> None:
    assert word in str(refusal(MODEL, Model(tensors)).hint)


@pytest.mark.parametrize("front", ["_orig_mod.", "module.", "policy."])
def test_the_likely_reason_where_the_chain_began_with_it(front: str) -> None:
    error = refusal(Model(renamed(llama(), front)), MODEL)
    assert repr(front) in str(error.hint)
    assert "chain's" in str(error.hint)


def test_part_of_the_names_in_a_wrapper_is_a_rename() -> None:
    tensors = llama()
    for name in ("q_proj", "k_proj"):
        weight = f"self_attn.{name}.weight"
        tensors[f"model.layers.0._orig_mod.{weight}"] = tensors.pop(f"model.layers.0.{weight}")
    assert "2 of 22 names are gone" in refusal(MODEL, Model(tensors)).what


def test_another_architecture_with_the_same_tensors() -> None:
    qwen = Architecture("qwen2", ("Qwen2ForCausalLM",))
    error = refusal(MODEL, Model(llama(), qwen))
    assert "LlamaForCausalLM llama became Qwen2ForCausalLM qwen2" in error.what
    refusal(MODEL, Model(llama(), Architecture("qwen2")))
    refusal(MODEL, Model(llama(), Architecture(None, ("LlamaForSequenceClassification",))))
    for silent in (Architecture(), Architecture("llama"), MODEL.architecture):
        assert admitted(MODEL, Model(llama(), silent)).notes == ()
        assert admitted(Model(llama(), silent), MODEL).notes == ()


def test_a_directory_that_says_it_is_an_adapter() -> None:
    error = refusal(MODEL, Model({"vera.weight": Spec("F32", (4,))}, is_adapter=True))
    assert "LoRA adapter" in str(error.hint)


def test_one_tensor_without_elements_is_enough() -> None:
    tensors = llama() | {"lm_head.weight": Spec("BF16", (0,))}
    assert "no elements any more: lm_head.weight" in refusal(MODEL, Model(tensors)).what
    error = refusal(Model(tensors), MODEL)
    assert "had no elements before: lm_head.weight" in error.what


def test_most_elements_of_another_dtype_though_few_tensors() -> None:
    before = {f"bias.{n}": Spec("BF16", (8,)) for n in range(9)} | {"w": Spec("BF16", (64, 64))}
    assert "1 of 10 tensors" in refusal(
        Model(before), Model(before | {"w": Spec("F8_E4M3", (64, 64))})
    ).what  # fmt: skip


@given(st.sets(st.sampled_from(sorted(llama()))), st.integers(0, 30))
def test_tensors_that_come_and_go(gone: set[str], added: int) -> None:
    """Refused where more than half are gone, whatever comes; else all of it is said."""
    tensors = {name: spec for name, spec in llama().items() if name not in gone}
    tensors |= {f"value_head.{n}.weight": Spec("F32", (4,)) for n in range(added)}
    if 2 * len(gone) > len(llama()):
        assert f"{len(gone)} of {len(llama())} names are gone" in (
            refusal(MODEL, Model(tensors)).what
        )
        return
    notes = admitted(MODEL, Model(tensors)).notes
    assert len(notes) == bool(gone) + bool(added)
    assert any(f"{added} tensor" in note and "new" in note for note in notes) == bool(added)
    assert any(f"{len(gone)} tensor" in note and "gone" in note for note in notes) == bool(gone)


@given(st.sets(st.sampled_from(sorted(llama()))), st.sampled_from(["dtype", "shape"]))
def test_tensors_of_another_dtype_or_shape(names: set[str], what: str) -> None:
    other = Spec("F32", (16, 16)) if what == "dtype" else Spec("BF16", (3, 5, 7))
    tensors = dict(llama())
    for name in names:
        shape = tensors[name].shape if what == "dtype" else other.shape
        tensors[name] = Spec(other.dtype, shape)
    total = sum(_size(spec) for spec in llama().values())
    most = 2 * len(names) > len(tensors) or (
        what == "dtype" and 2 * sum(_size(llama()[name]) for name in names) > total
    )
    if most:
        assert f"{len(names)} of {len(tensors)} tensors have another {what}" in (
            refusal(MODEL, Model(tensors)).what
        )
    else:
        assert len(admitted(MODEL, Model(tensors)).notes) == bool(names)


def _size(spec: Spec) -> int:
    size = 1
    for length in spec.shape:
        size *= length
    return size


def test_the_same_model_is_nothing_to_talk_of() -> None:
    assert admitted(MODEL, Model(llama())).notes == ()
    assert admitted(Model({}), MODEL).notes == ("22 tensors are new: lm_head.weight, "
        "model.embed_tokens.weight, model.layers.0.norm.weight and 19 more",)  # fmt: skip


def test_names_of_any_length_stay_readable() -> None:
    long = {"x" * 5000 + str(n): Spec("U8", (1,)) for n in range(5000)}
    error = refusal(MODEL, Model(long))
    assert len(str(error)) + len(str(error.hint)) < 2000


# The first step.


@pytest.mark.parametrize(
    ("model", "found", "fix"),
    [
        (Model(adapter()), "a LoRA adapter", "merge"),
        (Model({"x": Spec("F32", (2,))}, is_adapter=True), "a LoRA adapter", "merge"),
        (Model({n: Spec("BF16", (0,)) for n in llama()}), "22 of 22 tensors", "ZeRO-3"),
    ],
)
def test_what_cannot_begin_a_chain(model: Model, found: str, fix: str) -> None:
    with pytest.raises(Conflict, match="no whole model") as caught:
        check_first(model, way=WAY, file="step_1")
    assert found in str(caught.value.found)
    assert fix in str(caught.value.hint)
    assert str(caught.value.hint).endswith(WAY)
    assert any(found in note for note in check_first(model, way=WAY, allow=True))


@pytest.mark.parametrize(
    ("tensors", "who"),
    [
        (renamed(llama(), "_orig_mod."), "torch.compile"),
        (inside(llama(), "_orig_mod."), "torch.compile"),
        (renamed(llama(), "module."), "DistributedDataParallel"),
        (renamed(llama(), "base_model.model.") | adapter(), "PEFT"),
        ({"layers.0._flat_param": Spec("BF16", (4096,))}, "FSDP"),
    ],
)
def test_a_wrappers_names_are_warned_of_at_the_first_step(
    tensors: dict[str, Spec], who: str
) -> None:
    (note,) = check_first(Model(tensors), way=WAY)
    assert who in note


@pytest.mark.parametrize("tensors", [llama(), {"module": Spec("F32", (2,))}, {},
    llama() | {"module.extra": Spec("F32", (2,)), "nothing": Spec("F32", (0,))}])  # fmt: skip
def test_a_whole_model_begins_a_chain_without_a_word(tensors: dict[str, Spec]) -> None:
    assert check_first(Model(tensors), way=WAY) == ()
