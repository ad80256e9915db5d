"""Print how well AdamW's moments foretell which bf16 weights a step will change:
``python -m tests.benchmarks.mask_prediction``.

A trainer that knew the changed elements before the step had nothing to compare after it. Three ways
to know, each held against the truth, the bits before and after, on the tiny model with float32
masters:

``moments``: the step that the moments as they are would make, as if the gradient were the first
moment. ``bound``: every element that any gradient at all could move: with a = b1 m, c = 1 - b1,
d = b2 v and e = 1 - b2 the step (a + c g) / sqrt(d + e g^2) is at most sqrt(a^2 / d + c^2 / e) by
Cauchy and Schwarz, and rounding is monotone, so what the bound leaves out cannot change.
``gradient``: the arithmetic of the step itself, once its gradient is known.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from statistics import mean

import torch

from deltactl.demo import tiny_model

_LINE = 32  # bf16 elements of a cache line


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of a prediction: right ones among the named, named ones among the right, named ones
    among all elements, and cache lines that hold a named one."""

    precision: float
    recall: float
    named: float
    lines: float


@dataclass(frozen=True, slots=True)
class _Group:
    lr: float
    decay: float
    b1: float
    b2: float
    eps: float


def _step_of(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, count: int, group: _Group
) -> torch.Tensor:
    """The master after torch's AdamW, operation for operation; nothing is written to."""
    p = p * (1 - group.lr * group.decay)
    m = m.lerp(g, 1 - group.b1)
    v = v.mul(group.b2).addcmul_(g, g, value=1 - group.b2)
    c1, c2 = 1 - group.b1**count, 1 - group.b2**count
    denominator = (v.sqrt() / (c2**0.5)).add_(group.eps)
    return p.addcdiv(m, denominator, value=-group.lr / c1)


def _bits(p: torch.Tensor) -> torch.Tensor:
    return p.bfloat16().view(torch.int16)


def _bound(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, count: int, group: _Group
) -> torch.Tensor:
    c1, c2 = 1 - group.b1**count, 1 - group.b2**count
    ratio = (group.b1 * m) ** 2 / (group.b2 * v) + (1 - group.b1) ** 2 / (1 - group.b2)
    reach = group.lr * c2**0.5 / c1 * ratio.sqrt() * (1 + 1e-5)
    reach = reach.nan_to_num(nan=float("inf"))  # v is 0: nothing is known
    rest = p * (1 - group.lr * group.decay)
    now = _bits(p)
    return (_bits(rest - reach) != now) | (_bits(rest + reach) != now)


def _score(named: torch.Tensor, truth: torch.Tensor) -> Score:
    right = int((named & truth).sum())
    whole = named[: named.numel() // _LINE * _LINE].view(-1, _LINE).any(1)
    return Score(
        right / max(int(named.sum()), 1),
        right / max(int(truth.sum()), 1),
        float(named.float().mean()),
        float(whole.float().mean()),
    )


def measure(steps: int, lr: float, warm: int) -> dict[str, list[Score]]:
    """Scores by way of predicting, one for each of ``steps`` steps after ``warm`` at ``lr``."""
    text = tiny_model._text(0)
    tokenizer = tiny_model._tokenizer(text)
    tokens = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    model = tiny_model._model(tokenizer, tied=False, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tiny_model.PRETRAIN_LR, weight_decay=0.01)
    draw = torch.Generator().manual_seed(0)
    for _ in range(tiny_model.PRETRAIN_STEPS):
        tiny_model._update(model, optimizer, tiny_model._batch(tokens, draw))
    optimizer.param_groups[0]["lr"] = lr
    for _ in range(warm):
        tiny_model._update(model, optimizer, tiny_model._batch(tokens, draw))
    group = _Group(lr, 0.01, 0.9, 0.999, 1e-8)
    found: dict[str, list[Score]] = {"moments": [], "bound": [], "gradient": []}
    parameters = list(model.parameters())
    for _ in range(steps):
        loss = model(input_ids=(batch := tiny_model._batch(tokens, draw)), labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        named: dict[str, list[torch.Tensor]] = {way: [] for way in found}
        before = []
        for parameter in parameters:
            p, g = parameter.detach(), parameter.grad
            state = optimizer.state[parameter]
            assert g is not None
            m, v, count = state["exp_avg"], state["exp_avg_sq"], int(state["step"]) + 1
            now = _bits(p)
            before.append(now.flatten())
            named["moments"].append((_bits(_step_of(p, m, m, v, count, group)) != now).flatten())
            named["bound"].append(_bound(p, m, v, count, group).flatten())
            named["gradient"].append((_bits(_step_of(p, g, m, v, count, group)) != now).flatten())
        optimizer.step()
        after = [_bits(parameter.detach()).flatten() for parameter in parameters]
        truth = torch.cat(after) != torch.cat(before)
        for way, masks in named.items():
            found[way].append(_score(torch.cat(masks), truth))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=50, help="steps at the low rate before")
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-7, 1e-6, 3e-6])
    options = parser.parse_args(arguments)
    print(f"{'lr':>8} {'way':10} {'precision':>9} {'recall':>7} {'named':>7} {'lines':>6}")
    with tiny_model.one_thread():
        for lr in options.lr:
            for way, scores in measure(options.steps, lr, options.warm).items():
                print(
                    f"{lr:8.0e} {way:10}"
                    f" {mean(s.precision for s in scores):9.2%}"
                    f" {mean(s.recall for s in scores):7.2%}"
                    f" {mean(s.named for s in scores):7.2%}"
                    f" {mean(s.lines for s in scores):6.1%}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
