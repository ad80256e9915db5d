"""float32 masters without ``dtype=``: told of once, with what it costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deltactl.codec import ENCODINGS
from deltactl.trainer import Publisher
from tests.support.publishing import MoodyBucket, update


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


def train(place: Path, held: torch.dtype, **options: Any) -> tuple[Publisher, float]:
    """Three steps at a rate as of reinforcement learning; the share of bfloat16 elements that the
    first delta changes, by torch alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 3000), torch.nn.Linear(3000, 24)).to(held)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with Publisher(model, MoodyBucket(place), optimizer=optimizer, **options) as publisher:
        update(model, optimizer, 1)
        before = [p.detach().bfloat16() for p in model.parameters()]
        update(model, optimizer, 2)
        after = [p.detach().bfloat16() for p in model.parameters()]
        update(model, optimizer, 3)
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return publisher, changed / sum(p.numel() for p in before)


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_masters_are_told_of_once_with_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, encoding: str
) -> None:
    publisher, share = train(tmp_path / "full", torch.float32, encoding=encoding)
    (text,) = [r.getMessage() for r in caplog.records if "float32" in r.getMessage()]
    numbers = re.findall(r"[\d,.]*\d", text.replace("float32", "").replace("bfloat16", ""))
    elements, percent, size, rounded_percent, rounded_size = (
        float(number.replace(",", "")) for number in numbers
    )
    (delta, _) = [p for p in publisher.history if p.kind == "delta"]
    assert delta.changed_elements is not None
    assert elements == delta.total_elements
    assert percent == pytest.approx(100 * delta.changed_elements / elements, abs=0.05)
    assert rounded_percent == pytest.approx(100 * share, abs=0.05)
    caplog.clear()
    rounded, _ = train(tmp_path / "half", torch.float32, encoding=encoding, dtype="bfloat16")
    assert caplog.records == []
    (other, _) = [p for p in rounded.history if p.kind == "delta"]
    for told, really in ((size, delta.bytes), (rounded_size, other.bytes)):
        assert told < really < told + 20_000  # the streams, without the file around them
    assert rounded_size < size / 2


def test_a_model_that_is_no_wider_than_it_is_published_is_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, torch.bfloat16)
    assert caplog.records == []


def test_masters_whose_every_step_is_as_sparse_are_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounding would gain nothing."""
    model = torch.nn.Linear(24, 24)
    with Publisher(model, tmp_path / "bucket") as publisher:
        for _ in range(3):
            publisher.publish()
            model.weight.data[0, 0] += 1
    assert caplog.records == []
