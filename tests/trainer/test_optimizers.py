"""One optimizer or several, in steps that some of them may leave out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import deltactl
from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import UsageError
from deltactl.trainer import Publisher
from tests.support.publishing import Bits, assert_chain, bits_of, small


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket")


def muon_and_adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for all else, as they are used together."""
    parameters = list(model.parameters())
    return [
        torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3),
        torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=1e-3),
    ]


def backward(model: torch.nn.Module, batch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(batch)
    return model(torch.randn(8, 24, generator=draw)).square().mean()


def test_two_optimizers_make_one_step(tmp_path: Path, bucket: LocalBucket) -> None:
    model = small(torch.float32)
    optimizers = muon_and_adamw(model)
    expected = {}
    with Publisher(model, bucket, optimizer=optimizers) as publisher:
        for step in (1, 2, 3):
            backward(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            expected[step] = bits_of(model.state_dict())
    assert_chain(bucket, expected, tmp_path)
    assert all(publication.merged_steps == 0 for publication in publisher.history)


@pytest.mark.parametrize(
    ("skips", "links"),
    [
        ({2: 0}, {1: 0, 2: 0, 3: 0, 4: 0}),  # step 2 without Muon: AdamW's is published
        ({2: 1}, {1: 0, 3: 1, 4: 0}),  # without AdamW: it is in step 3's link
        ({1: 0}, {1: 0, 2: 0, 3: 0, 4: 0}),
        ({4: 1}, {1: 0, 2: 0, 3: 0, 4: 0}),  # the last one, when the publisher is closed
        ({2: 1, 3: 1}, {1: 0, 4: 2}),
    ],
)
def test_a_grad_scaler_has_one_of_two_leave_a_step_out(
    tmp_path: Path, bucket: LocalBucket, skips: dict[int, int], links: dict[int, int]
) -> None:
    """Gradients of one that are not finite; the other steps by itself."""
    model = small(torch.float32)
    optimizers = muon_and_adamw(model)
    scaler = torch.amp.GradScaler("cpu")
    states: dict[int, Bits] = {}
    with Publisher(model, bucket, optimizer=optimizers) as publisher:
        for step in (1, 2, 3, 4):
            scaler.scale(backward(model, step)).backward()
            if step in skips:
                skipped = optimizers[skips[step]]
                skipped.param_groups[0]["params"][0].grad.fill_(float("inf"))
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            states[step] = bits_of(model.state_dict())
    assert_chain(bucket, {step: states[step] for step in links}, tmp_path)
    found = {p.training_step: p.merged_steps for p in publisher.history}
    assert found == links


def test_one_that_steps_twice_is_a_step_more(tmp_path: Path, bucket: LocalBucket) -> None:
    model = small(torch.float32)
    muon, adamw = muon_and_adamw(model)
    states = []
    with Publisher(model, bucket, optimizer=(muon, adamw)) as publisher:
        for optimizer in (muon, adamw, muon, muon, adamw):
            backward(model, 0).backward()
            optimizer.step()
            states.append(bits_of(model.state_dict()))
    assert_chain(bucket, {1: states[1], 3: states[4]}, tmp_path)
    assert [(p.training_step, p.merged_steps) for p in publisher.history] == [(1, 0), (3, 1)]


def test_another_order_is_told_of(bucket: LocalBucket, caplog: pytest.LogCaptureFixture) -> None:
    model = small(torch.float32)
    muon, adamw = muon_and_adamw(model)
    with Publisher(model, bucket, optimizer=[adamw, muon]):
        backward(model, 0).backward()
        muon.step()
        adamw.step()
    (record,) = [r for r in caplog.records if "order in which they step" in r.getMessage()]
    assert record.levelno == logging.WARNING


def told_of_idle(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "nothing is published" in r.getMessage()]


def test_a_last_one_that_does_not_step_is_told_of_once_for_each_run_of_such_steps(
    tmp_path: Path, bucket: LocalBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(torch.float32)
    muon, adamw = muon_and_adamw(model)

    def step(*optimizers: torch.optim.Optimizer) -> None:
        backward(model, 0).backward()
        for optimizer in optimizers:
            optimizer.step()

    with Publisher(model, bucket, optimizer=[muon, adamw]) as publisher:
        for _ in range(3):
            step(muon)
        assert told_of_idle(caplog) == []  # the third round may not be over
        step(muon)
        (said,) = told_of_idle(caplog)
        assert "3 rounds of steps without optimizer 1 (AdamW)" in said
        assert "publisher.publish(step)" in said
        assert caplog.records[-1].levelno == logging.WARNING
        for _ in range(20):
            step(muon)
        assert len(told_of_idle(caplog)) == 1
        step(muon, adamw)  # it ends, and a short one is not told of
        expected = {25: bits_of(model.state_dict())}
        step(muon)
        step(muon)
        step(muon, adamw)
        expected[28] = bits_of(model.state_dict())
        assert len(told_of_idle(caplog)) == 1
        for _ in range(4):
            step(muon)
        assert len(told_of_idle(caplog)) == 2
        step(muon, adamw)
        expected[33] = bits_of(model.state_dict())
    assert [p.merged_steps for p in publisher.history if p.kind == "delta"] == [2, 4]
    assert_chain(bucket, expected, tmp_path)


def test_all_that_do_not_step_are_named(
    bucket: LocalBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(torch.float32)
    first, *others = (torch.optim.SGD([p], lr=1e-3) for p in list(model.parameters())[:3])
    with Publisher(model, bucket, optimizer=[first, *others]):
        for _ in range(4):
            backward(model, 0).backward()
            first.step()
    (said,) = told_of_idle(caplog)
    assert "without optimizer 1 (SGD) and optimizer 2 (SGD)" in said


def test_tensors_that_no_optimizer_has_are_told_of(
    bucket: LocalBucket, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(torch.float32)
    muon, adamw = muon_and_adamw(model)
    with Publisher(model, bucket, optimizer=muon):
        pass
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "2 of the model's tensors that require gradients, such as '0.bias'" in (
        record.getMessage()
    )
    caplog.clear()
    with Publisher(model, bucket, optimizer=[muon, adamw]):
        pass
    model[0].bias.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    with Publisher(model, bucket, optimizer=muon):
        pass
    assert caplog.records == []


@pytest.mark.parametrize(
    ("give", "match"),
    [
        (lambda muon, adamw: [], "empty list"),
        (lambda muon, adamw: [muon, muon], "given twice"),
        (lambda muon, adamw: [muon, object()], "torch.optim.Optimizer"),
        (lambda muon, adamw: object(), "torch.optim.Optimizer"),
        (lambda muon, adamw: [muon, muon_and_adamw(small())[1]], "optimizer 1 steps none"),
    ],
)
def test_what_are_no_optimizers_of_the_model(
    bucket: LocalBucket, give: Callable[..., Any], match: str
) -> None:
    model = small(torch.float32)
    with pytest.raises(UsageError, match=match):
        Publisher(model, bucket, optimizer=give(*muon_and_adamw(model)))


def test_an_optimizer_that_gets_copies_of_its_own_is_refused_at_its_first_step(
    bucket: LocalBucket,
) -> None:
    """As DeepSpeed's ZeRO stages 1 and 2 do it: the weights are copied back after the step."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(model, bucket, optimizer=optimizer) as publisher:
        masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
        optimizer.param_groups[0]["params"] = masters
        with pytest.raises(UsageError, match="steps none of the model's tensors") as caught:
            optimizer.step()
        assert "publisher.publish(step)" in str(caught.value.hint)
    assert publisher.history == ()


def test_a_compiled_step_is_published_and_the_publisher_not_traced(
    tmp_path: Path, bucket: LocalBucket
) -> None:
    model = small(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch._dynamo.reset()
    clear_compilation_metrics()
    counters.clear()
    expected = {}
    with Publisher(model, bucket, optimizer=optimizer):
        compiled = torch.compile(lambda: optimizer.step())
        for step in (1, 2, 3):
            backward(model, step).backward()
            compiled()
            optimizer.zero_grad()
            expected[step] = bits_of(model.state_dict())
    assert_chain(bucket, expected, tmp_path)
    assert counters["inductor"], "the step was really compiled"
    traced = {Path(str(found.co_filename)) for found in get_compilation_metrics()}
    inside = {parent for path in traced for parent in path.parents}
    assert Path(torch.optim.__file__).parent in inside
    assert Path(deltactl.__file__).parent not in inside
