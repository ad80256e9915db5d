"""The recorded map against the loader itself: what a patched checkpoint loads to, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltactl.codec.bits import touch_sum
from deltactl.vllm.layout import weight_map
from deltactl.vllm.layout.ownership import owners
from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import WeightMap, record
from deltactl.vllm.staging import live_weights, totals
from tests.support.toy_models import (
    ToyModel,
    ToyShape,
    bits_of,
    checkpoint,
    checkpoint_specs,
    data_of,
)

BF16 = torch.bfloat16


@st.composite
def shapes(draw: st.DrawFn) -> ToyShape:
    ranks = draw(st.sampled_from((1, 2, 4)))
    vocab = draw(st.integers(4, 20))
    return ToyShape(
        hidden=draw(st.integers(1, 7)),
        head=draw(st.integers(1, 3)),
        heads=ranks * draw(st.integers(1, 2)),
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if n % ranks == 0 or ranks % n == 0])),
        inner=ranks * draw(st.integers(1, 3)),
        vocab=vocab,
        padded=-(-vocab // 8) * 8,
        experts=ranks * draw(st.integers(1, 2)),
        tied=draw(st.booleans()),
        ranks=ranks,
        spread_experts=draw(st.booleans()),
    )


def settled(models: list[ToyModel], specs: list[TensorSpec]) -> list[WeightMap]:
    """The maps of all ranks, agreed on."""
    maps = [record(model, specs, ranks=len(models)) for model in models]
    agreed = owners([found.summary() for found in maps])
    for rank, found in enumerate(maps):
        found.settle(agreed, rank)
    return maps


def elements_of(tensor: Tensor) -> Any:
    return np.frombuffer(data_of(tensor), f"<u{tensor.dtype.itemsize}")


def changed(tensors: dict[str, Tensor], random: np.random.Generator) -> dict[str, Any]:
    """Positions in each tensor and new bits there, applied to ``tensors`` too."""
    found = {}
    for name, tensor in tensors.items():
        bits = elements_of(tensor).copy()
        at = np.flatnonzero(random.random(bits.size) < random.choice((0.0, 0.1, 0.6, 1.0)))
        bits[at] ^= random.integers(1, 1 << 8 * bits.itemsize, at.size, dtype=bits.dtype)
        tensors[name] = torch.from_numpy(bits).view(tensor.dtype).view(tensor.shape)
        found[name] = at, bits[at]
    return found


@settings(max_examples=60)
@given(shape=shapes(), seed=st.integers(0, 1 << 20))
def test_a_patch_through_the_map_is_what_the_loader_makes_of_the_patched_checkpoint(
    shape: ToyShape, seed: int
) -> None:
    random = np.random.default_rng(seed)
    tensors = checkpoint(shape, seed)
    models = [ToyModel(shape, rank) for rank in range(shape.ranks)]
    for model in models:
        model.load_weights(tensors.items())
    before = [bits_of(model) for model in models]
    maps = settled(models, checkpoint_specs(shape))
    assert [bits_of(model) for model in models] == before
    assert set(maps[0].unmapped) == {"wide.weight"}
    assert "float32 to bfloat16" in maps[0].unmapped["wide.weight"]
    skipped = {"rotary.inv_freq", "head.weight"} if shape.tied else {"rotary.inv_freq"}
    assert set(maps[0].ignored) == skipped

    del tensors["wide.weight"]
    _check_sums(maps, tensors)
    old = {name: elements_of(tensor) for name, tensor in tensors.items()}
    for name, (at, new) in changed(tensors, random).items():
        assert sum(_patch(found, name, at, old[name][at], new) for found in maps) >= (
            at.size if name in maps[0].tensors else 0
        )
    _check_sums(maps, tensors)
    for rank, model in enumerate(models):
        fresh = ToyModel(shape, rank)
        fresh.load_weights(checkpoint(shape, seed).items())  # what is unmapped stays as it was
        fresh.load_weights(tensors.items())
        assert bits_of(model) == bits_of(fresh)


def _patch(found: WeightMap, name: str, at: Any, old: Any, new: Any) -> int:
    """Write new bits through the map, where the old ones are; how many elements it writes."""
    written = 0
    mapped = found.tensors.get(name)
    for located in mapped.locate(at) if mapped else ():
        storage = found.storages[located.storage]
        positions = live_weights.positions_in(storage, located.positions)
        one = live_weights.Patch(
            storage,
            positions,
            live_weights.to_device(storage, old[located.chosen]),
            live_weights.to_device(storage, new[located.chosen]),
        )
        patches = live_weights.Patches([one])
        assert patches.replace()
        assert patches.is_new()
        written += patches.elements
    return written


def _check_sums(maps: list[WeightMap], tensors: dict[str, Tensor]) -> None:
    """Owned sums of all ranks add up to those of the checkpoint; regions read as it does."""
    whole = {
        name: touch_sum(np.arange(tensor.numel()), elements_of(tensor))
        for name, tensor in tensors.items()
    }
    sums = [totals.owned_sums(found) for found in maps]
    for name in {name for found in maps for name in found.tensors}:
        assert sum(found.get(name, 0) for found in sums) % (1 << 64) == whole[name], name
    for found in maps:
        for name, mapped in found.tensors.items():
            expected = elements_of(tensors[name])
            out = expected ^ expected.dtype.type(1)
            for region in mapped.regions:
                live_weights.read_region(found.storages[region.storage], region, out)
            assert np.count_nonzero(out == expected) == len(_covered(mapped))


def _covered(mapped: Any) -> set[int]:
    every = np.arange(mapped.spec.elements)
    return {int(i) for located in mapped.locate(every) for i in every[located.chosen]}


# Loaders that do what cannot be followed, one thing each.


class Loader(nn.Module):
    """``p``: 4 by 4, bf16; ``q``: its like."""

    def __init__(self, load: Callable[[Loader, str, Tensor], object]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 4).to(BF16), requires_grad=False)
        self.q = nn.Parameter(torch.randn(4, 4).to(BF16), requires_grad=False)
        self.kept: list[Tensor] = []
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self._load(self, name, weight)


W = TensorSpec("w", "BF16", (4, 4))
V = TensorSpec("v", "BF16", (4, 4))


def _fail(model: Loader, name: str, w: Tensor) -> None:
    model.p.data[:1].copy_(w[:1])
    raise ValueError(f"cannot place {name}")


def _composed(model: Loader, name: str, w: Tensor) -> None:
    model.p.data.copy_(w)
    model.p.data.copy_(-torch.exp(model.p.data))


def _replace_module_parameter(model: Loader, name: str, w: Tensor) -> None:
    model.p = nn.Parameter(w.detach(), requires_grad=False)


def _set_data(model: Loader, name: str, w: Tensor) -> None:
    model.p.data = w


def _swap_then_flatten(model: Loader, name: str, w: Tensor) -> None:
    model.p.data.view(-1)[1:11].copy_(w.t().contiguous().view(-1)[3:13])


def _swap_then_cut_across(model: Loader, name: str, w: Tensor) -> None:
    """Each axis alone stays within a row, both together do not."""
    model.p.data[:2, :2].copy_(w.t().contiguous().view(-1)[1:5].view(2, 2))


def _through_memory_of_its_own(model: Loader, name: str, w: Tensor) -> None:
    stage = torch.empty(4, 4, dtype=BF16)
    stage.copy_(w)
    model.p.data.copy_(stage)


UNMAPPED: dict[str, tuple[Callable[[Loader, str, Tensor], object], str]] = {
    "cast": (lambda m, n, w: m.p.data.copy_(w.float()), "casts it from bfloat16 to float32"),
    "computed": (lambda m, n, w: m.p.data.copy_(w + 1), "computes with it (aten.add"),
    "joined": (lambda m, n, w: m.p.data.copy_(torch.cat([w[:2], w[2:]])), "computes with it"),
    "asked": (lambda m, n, w: m.p.data.copy_(w) if w[0, 0].item() == 0 else 0, "computes with it"),
    "in place": (lambda m, n, w: m.p.data.copy_(w.mul_(2)), "computes with it (aten.mul_"),
    "added": (lambda m, n, w: m.p.data.add_(w), "writes what it computes of it (aten.add_"),
    "scattered": (
        lambda m, n, w: m.p.data.index_copy_(0, torch.tensor([3, 1, 0, 2]), w),
        "writes what it computes of it",
    ),
    "spread": (lambda m, n, w: m.p.data.copy_(w[0]), "copies one element of it to many"),
    "spread by hand": (lambda m, n, w: m.p.data.copy_(w[0].expand(4, 4)), "one element of it to"),
    "half": (lambda m, n, w: m.p.data[:2].copy_(w[:2]), "leaves 8 of its 16 elements out"),
    "part twice": (
        lambda m, n, w: (m.p.data.copy_(w), m.q.data[:3].copy_(w[:3])),
        "parts of it overlap",
    ),
    "onto itself": (
        lambda m, n, w: (m.p.data[:2].copy_(w[:2]), m.p.data[1:3].copy_(w[2:])),
        "shares live elements with itself",
    ),
    "bytes": (
        lambda m, n, w: m.p.data.view(torch.uint8).copy_(w.view(torch.uint8)),
        "elements of another width",
    ),
    "composed": (_composed, "goes on to change what it has copied"),
    "zeroed": (lambda m, n, w: (m.p.data.copy_(w), m.p.data[1:].zero_()), "goes on to change"),
    "kept": (lambda m, n, w: m.kept.append(w[1:]), "keeps it"),
    "replaced": (_replace_module_parameter, "puts other parameters into the model"),
    "set": (_set_data, "puts another tensor in the parameter's place"),
    "reshaped": (_swap_then_flatten, "across dimensions that it has swapped"),
    "cut across": (_swap_then_cut_across, "across dimensions that it has swapped"),
    "staged": (_through_memory_of_its_own, "computes with it"),
    "failed": (_fail, "ValueError: cannot place w"),
    "failed silently": (lambda m, n, w: next(iter([])), "StopIteration: test_weight_map.py, line"),
}


@pytest.mark.parametrize("case", UNMAPPED)
def test_what_cannot_be_followed_is_unmapped_with_the_reason(case: str) -> None:
    load, why = UNMAPPED[case]
    model = Loader(load)
    before, had = bits_of(model), dict(model.named_parameters())
    found = record(model, [W])
    assert not found.tensors
    assert not found.ignored
    assert why in found.unmapped["w"]
    assert bits_of(model) == before
    assert all(parameter is had[name] for name, parameter in model.named_parameters())


MAPPED: dict[str, tuple[Callable[[Loader, str, Tensor], object], int]] = {
    "item": (lambda m, n, w: m.p.__setitem__(slice(None), w), 1),
    "moved": (lambda m, n, w: m.p.data.copy_(w.to("cpu", copy=True)), 1),
    "swapped": (lambda m, n, w: m.p.data.copy_(w.t().contiguous()), 1),
    "swapped twice": (lambda m, n, w: m.p.data.copy_(w.t().clone().t().contiguous()), 1),
    "flattened": (lambda m, n, w: m.p.data.copy_(w.t().contiguous().view(-1).view(4, 4)), 1),
    "unflattened": (lambda m, n, w: m.p.data.view(-1).copy_(w.t().contiguous().view(-1)), 1),
    "row by row": (lambda m, n, w: [m.p.data[i].copy_(r) for i, r in enumerate(w.unbind())], 4),
    "split": (lambda m, n, w: [m.p.data[:, i : i + 2].copy_(w[:, i : i + 2]) for i in (0, 2)], 2),
    "every other": (
        lambda m, n, w: [m.p.data[i::2].copy_(w[2 * i : 2 * i + 2]) for i in (0, 1)],
        2,
    ),
    "twice to one place": (lambda m, n, w: (m.p.data.copy_(w), m.p.data.copy_(w.clone())), 1),
    "to two places": (lambda m, n, w: (m.p.data.copy_(w), m.q.data.copy_(w)), 2),
    "over a filling": (lambda m, n, w: (m.p.data.fill_(0), m.p.data.copy_(w)), 1),
    "padded beside": (lambda m, n, w: (m.p.data.copy_(w), m.q.data.fill_(0)), 1),
    "out of order": (lambda m, n, w: m.p.data.flip(0) is None or m.p.data.copy_(w), 1),
    "as bytes": (lambda m, n, w: m.p.data.copy_(w.view(torch.uint8).view(BF16)), 1),
    "nothing of it": (lambda m, n, w: (m.p.data[:0].copy_(w[:0]), m.p.data.copy_(w)), 1),
}


@pytest.mark.parametrize("case", MAPPED)
@pytest.mark.parametrize("inference", [False, True])
def test_what_only_moves_elements_is_mapped(case: str, inference: bool) -> None:
    load, count = MAPPED[case]
    with torch.inference_mode(inference):
        model = Loader(load)
        before = bits_of(model)
        found = record(model, [W])
    assert not found.unmapped
    assert bits_of(model) == before
    mapped = found.tensors["w"]
    assert len(mapped.regions) == count
    w = checkpoint(ToyShape(), 3)["attn.q.weight"][:4, :4].contiguous()
    for region in mapped.regions:
        live_weights.write_region(found.storages[region.storage], region, elements_of(w))
    fresh = Loader(load)
    fresh.load_state_dict(model.state_dict())
    fresh.p.data.copy_(torch.full((4, 4), 3.0))
    fresh.load_weights([("w", w)])
    assert data_of(fresh.p.data) == data_of(model.p.data)


def test_a_loader_in_inference_mode_of_its_own_is_followed() -> None:
    @torch.inference_mode()
    def load(model: Loader, name: str, w: Tensor) -> None:
        model.p.data.copy_(w.reshape(2, 8).narrow(0, 0, 2).reshape(4, 4).contiguous().to("cpu"))

    assert not record(Loader(load), [W]).unmapped


def test_a_failure_leaves_the_other_tensors_mapped() -> None:
    def load(model: Loader, name: str, w: Tensor) -> None:
        if name in ("a", "c"):
            raise RuntimeError(f"no {name}")
        if name == "w":
            model.p.data.copy_(w)

    names = ("a", "w", "b", "c", "d")
    found = record(Loader(load), [TensorSpec(name, "BF16", (4, 4)) for name in names])
    assert list(found.tensors) == ["w"]
    assert found.ignored == ("b", "d")
    assert {name: why[-4:] for name, why in found.unmapped.items()} == {"a": "no a", "c": "no c"}


class TakesAllFirst(Loader):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(sorted(weights, key=lambda pair: pair[0]))


def test_a_loader_that_takes_all_first_is_asked_again_one_by_one() -> None:
    def load(model: Loader, name: str, w: Tensor) -> None:
        if name == "b":
            raise RuntimeError("no")
        (model.p if name == "w" else model.q).data.copy_(w)

    specs = [W, TensorSpec("b", "BF16", (4, 4)), V]
    found = record(TakesAllFirst(load), specs)
    assert set(found.tensors) == {"w", "v"}
    assert set(found.unmapped) == {"b"}


class TakesTwo(Loader):
    """Looks one ahead, as a loader does that groups tensors by layer."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        asked = iter(weights)
        for pair in asked:
            super().load_weights([pair, *islice(asked, 1)])


def test_a_loader_that_looks_ahead_does_not_have_the_wrong_tensor_blamed() -> None:
    def load(model: Loader, name: str, w: Tensor) -> None:
        model.get_parameter(name).data.copy_(w)
        if name == "a":
            raise RuntimeError("too late")

    model = TakesTwo(load)
    for name in ("a", "b", "c", "d"):
        model.register_parameter(name, nn.Parameter(torch.zeros(4, 4).to(BF16), False))
    found = record(model, [TensorSpec(name, "BF16", (4, 4)) for name in ("c", "d", "a", "b")])
    assert set(found.tensors) == {"b", "c", "d"}
    assert "too late" in found.unmapped["a"]


def test_a_loader_that_fails_before_it_asks_maps_nothing() -> None:
    class Refuses(Loader):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            raise RuntimeError("not now")

    found = record(Refuses(_fail), [W, V])
    assert set(found.unmapped) == {"w", "v"}
    assert "not now" in found.unmapped["v"]


def test_the_last_tensor_may_be_the_one_that_fails() -> None:
    def load(model: Loader, name: str, w: Tensor) -> None:
        if name == "v":
            raise RuntimeError("no")
        model.p.data.copy_(w)

    found = record(Loader(load), [W, V])
    assert list(found.tensors) == ["w"]
    assert "no" in found.unmapped["v"]


def test_a_loader_that_fails_without_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_map, "_FAILURES", 3)
    specs = [TensorSpec(f"t{i}", "BF16", (4, 4)) for i in range(9)]
    for kind in (Loader, TakesAllFirst):
        found = record(kind(_fail), specs)
        assert set(found.unmapped) == {spec.name for spec in specs}
        said = [why for why in found.unmapped.values() if "failed with 3 tensors before" in why]
        assert len(said) == len(specs) - 3


def test_what_a_loader_does_not_ask_for_is_unmapped() -> None:
    class Short(Loader):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            _, weight = next(iter(weights))
            self.p.data.copy_(weight)

    found = record(Short(_fail), [W, V])
    assert list(found.tensors) == ["w"]
    assert found.unmapped == {"v": "the loader did not ask for it"}


def test_two_tensors_in_one_place_are_both_unmapped() -> None:
    found = record(Loader(lambda m, n, w: m.p.data.copy_(w)), [W, V])
    assert found.unmapped == {
        "w": "it shares live elements with v",
        "v": "it shares live elements with w",
    }


def test_columns_side_by_side_are_apart_and_columns_that_meet_are_not() -> None:
    def load(model: Loader, name: str, w: Tensor) -> None:
        at = 0 if name == "w" else shift
        model.p.data[:, at : at + 2].copy_(w)

    specs = [TensorSpec(name, "BF16", (4, 2)) for name in ("w", "v")]
    shift = 2
    assert len(record(Loader(load), specs).tensors) == 2
    shift = 1
    assert not record(Loader(load), specs).tensors


def test_a_dtype_that_torch_lacks_is_unmapped() -> None:
    found = record(Loader(_fail), [TensorSpec("w", "F4", (4, 4))])
    assert found.unmapped == {"w": "torch has no dtype for F4"}


def test_parameters_wider_than_any_element_of_ours_are_not_written_either() -> None:
    model = Loader(lambda m, n, w: m.r.data.copy_(w))
    model.r = nn.Parameter(torch.ones(4, 4, dtype=torch.complex128), requires_grad=False)
    found = record(model, [W])
    assert "casts it" in found.unmapped["w"]
    assert torch.equal(model.r, torch.ones(4, 4, dtype=torch.complex128))


def test_a_tensor_without_elements_is_ignored() -> None:
    found = record(Loader(lambda m, n, w: m.p.data[:0].copy_(w)), [TensorSpec("w", "BF16", (0, 4))])
    assert found.ignored == ("w",)


def test_buffers_are_mapped_too_and_views_of_one_storage_are_one() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(8)
            self.register_buffer("a", whole[:4])
            self.b = nn.Parameter(whole[4:], requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, weight in weights:
                getattr(self, name).data.copy_(weight)

    model = Buffered()
    found = record(model, [TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (4,))])
    (storage,) = found.storages
    assert storage.bits.dtype is torch.int32
    assert storage.bits.numel() == 8
    assert found.tensors["a"].regions[0].offset == 0
    assert found.tensors["b"].regions[0].offset == 4
    storage.bits[5] = 0x3F800000
    assert model.b[1] == 1.0


def test_recording_needs_no_memory_for_the_weights() -> None:
    """Far more elements than the machine could hold, in one tensor and in a copy of it."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.zeros(4, 4).to(BF16), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, weight in weights:
                row = weight.clone().view(1 << 19, 1 << 19)[1 << 18]
                self.p.data.view(-1).copy_(row[:16])

    found = record(Huge(), [TensorSpec("w", "BF16", (1 << 38,))])
    assert "leaves" in found.unmapped["w"]


def test_nothing_of_the_recording_is_held_afterwards() -> None:
    model = Loader(lambda m, n, w: m.p.data.copy_(w))
    found = record(model, [W])
    gone = weakref.ref(model)
    del model, found
    gc.collect()
    assert gone() is None
