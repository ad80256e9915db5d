"""Experts computed on weights as they were loaded, and modules patched once they are imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from deltactl.vllm.layout import cpu_layout

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 7, 16, 8, 4, 2


def one_by_one(
    tokens: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    shares: torch.Tensor,
    places: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The same in float64, token by token and expert by expert."""
    act = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }[activation]
    total = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for slot in range(CHOSEN):
            place = int(places[token, slot])
            if place < 0:
                continue
            wide = weights[0][place].double() @ tokens[token].double()
            wide += 0 if biases is None else biases[0][place].double()
            inner = act(wide[:WIDTH]) * wide[WIDTH:]
            found = weights[1][place].double() @ inner
            found += 0 if biases is None else biases[1][place].double()
            total[token] += found * shares[token, slot].double()
    return total


@pytest.mark.parametrize("activation", cpu_layout._ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_weighted_sum_of_each_token_s_experts(
    activation: str, biased: bool, elsewhere: bool
) -> None:
    torch.manual_seed(3)
    tokens, weights = (
        torch.randn(TOKENS, HIDDEN),
        (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)),
    )
    biases = (torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)) if biased else None
    shares = torch.rand(TOKENS, CHOSEN)
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    there = torch.tensor([1, -1, 0, 2]) if elsewhere else None
    places = cpu_layout._places(chosen, there)
    output = torch.full((TOKENS, HIDDEN), torch.nan)
    up_bias, down_bias = biases or (None, None)
    cpu_layout._plain_experts(
        output, tokens, *weights, up_bias, down_bias, shares, places, activation
    )
    expected = one_by_one(tokens, weights, biases, shares, places, activation)
    assert torch.allclose(output.double(), expected, atol=1e-4)


def test_a_module_is_patched_when_it_is_imported_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packs_weights.py").write_text("loaded = ['itself']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "packs_weights", raising=False)
    finders = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", finders)

    def patch(module: ModuleType) -> None:
        module.loaded.append("patch")

    monkeypatch.setattr(cpu_layout, "_PATCHES", {"packs_weights": patch})
    before = [finder for finder in finders if isinstance(finder, cpu_layout._Watch)]
    cpu_layout.install()
    cpu_layout.install()
    assert "packs_weights" not in sys.modules
    watching = [finder for finder in sys.meta_path if isinstance(finder, cpu_layout._Watch)]
    assert len(watching) == max(1, len(before))
    module = importlib.import_module("packs_weights")
    assert module.loaded == ["itself", "patch"]
    assert module.__file__ == str(tmp_path / "packs_weights.py")
