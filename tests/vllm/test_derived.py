"""What a layer makes of its weights and keeps: patched in place, it would be stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deltactl.vllm.layout.regions import TensorSpec
from deltactl.vllm.layout.weight_map import record

SPECS = [TensorSpec(f"{name}.weight", "F32", (3, 3)) for name in ("a", "b")]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)


class Finishing(nn.Module):
    """Makes something of its children's weights, as latent attention does."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def process_weights_after_loading(self) -> None: ...


class Kernel:
    def __init__(self, made: Tensor) -> None:
        self.made = made

    def run(self, x: Tensor) -> Tensor:
        return self.made @ x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            getattr(self, name[0]).weight.data.copy_(weight)


def _packed_by_hand(model: Model) -> None:
    packed = model.a.weight.t().contiguous()
    model.a.cpu_linear = lambda x: x @ packed


def _packed_out_of_sight(model: Model) -> None:
    handle = object()
    model.a.cpu_linear = lambda x: (x, handle)


def _in_a_function(model: Model) -> None:
    made = model.a.weight * 2
    model.a.method = SimpleNamespace(run=partial(lambda m, x: m @ x, made))


def _by_a_parent(model: Model) -> None:
    model.parent = Finishing(model.a)
    model.parent.product = model.a.weight @ model.a.weight


def _as_parameter_of_a_parent(model: Model) -> None:
    model.parent = Finishing(model.a)
    model.parent.product = nn.Parameter(model.a.weight.t().contiguous(), requires_grad=False)


STALE: dict[str, Callable[[Model], None]] = {
    "packed": _packed_by_hand,
    "packed out of sight": _packed_out_of_sight,
    "attribute": lambda m: setattr(m.a, "made", m.a.weight * 2),
    "list": lambda m: setattr(m.a, "made", [{"of": (m.a.weight * 2,)}]),
    "object": lambda m: setattr(m.a, "made", SimpleNamespace(x=SimpleNamespace(y=m.a.weight * 2))),
    "function": _in_a_function,
    "method": lambda m: setattr(m.a, "run", Kernel(m.a.weight * 2).run),
    "parent": _by_a_parent,
    "parent's parameter": _as_parameter_of_a_parent,
}


@pytest.mark.parametrize("case", STALE)
def test_a_layer_that_keeps_what_it_made_of_a_weight_is_left_to_its_loader(case: str) -> None:
    model = Model()
    STALE[case](model)
    found = record(model, SPECS)
    assert list(found.tensors) == ["b.weight"]
    assert "also computes with" in found.unmapped["a.weight"]
    assert found.unmapped["a.weight"].startswith(("a ", "parent "))


def test_a_weight_that_another_layer_has_packed_is_stale_too() -> None:
    """As the output layer of a tied model, where the embedding is only read."""
    model = Model()
    model.a.weight = model.b.weight
    packed = model.a.weight.clone()
    model.a.cpu_linear = lambda x: x @ packed
    found = record(model, SPECS[1:])
    assert "packed copy" in found.unmapped["b.weight"]


class AnswersAll:
    """As torch.ops: has whatever attribute it is asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return self


def _traced(model: Model) -> None:
    with FakeTensorMode() as mode:
        model.a.example = [mode.from_tensor(torch.randn(3, 3))]


def _cycle(model: Model) -> None:
    model.a.ring = ring = [model.a]
    ring.append(ring)


FRESH: dict[str, Callable[[Model], None]] = {
    "plain function": lambda m: setattr(m.a, "cpu_linear", torch.nn.functional.linear),
    "without a closure": lambda m: setattr(m.a, "cpu_linear", lambda x: x),
    "view": lambda m: setattr(m.a, "view", [m.a.weight[1:], m.b.weight.data]),
    "scale": lambda m: setattr(m.a, "scale", torch.tensor(2.0)),
    "places": lambda m: setattr(m.a, "places", torch.arange(9)),
    "cache": lambda m: setattr(m.a, "kv_cache", torch.randn(9)),
    "module": lambda m: setattr(m.a, "other", SimpleNamespace(layer=m.b)),
    "parent": lambda m: setattr(m, "parent", Finishing(m.a)),
    "ring": _cycle,
    "answers all": lambda m: setattr(m.a, "ops", [AnswersAll(), torch.ops.aten]),
    "traced": _traced,
}


@pytest.mark.parametrize("case", FRESH)
def test_what_holds_nothing_made_of_a_weight_is_patched_in_place(case: str) -> None:
    model = Model()
    FRESH[case](model)
    assert len(record(model, SPECS).tensors) == 2
