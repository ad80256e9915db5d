"""Which encoding is taken, and by what."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from deltactl.bench.made import write_steps
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.codec import DEFAULT, ENCODINGS
from deltactl.core.errors import UsageError
from deltactl.format.delta import open_delta
from deltactl.ops import advice
from deltactl.ops.advice import AUTO, advise
from deltactl.ops.diff import diff
from tests.support.checkpoints import changed, random_tensor, write_safetensors

Pair = tuple[Checkpoint, Checkpoint]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Alike but for one tensor, which was added."""
    old = {f"t{i}": random_tensor("BF16", (64, 64), seed=i) for i in range(4)}
    new = {name: changed(spec, 0.02) for name, spec in old.items()}
    new["added"] = random_tensor("BF16", (100,))
    a, b = (
        write_safetensors(tmp_path / f"{name}.safetensors", tensors)
        for name, tensors in (("a", old), ("b", new))
    )
    return open_checkpoint(a), open_checkpoint(b)


def test_it_takes_what_is_made_shipped_and_decoded_soonest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a quarter of the pair; the tensor that is new travels in any encoding."""
    costs = {"raw": (0.1, 6000), "gap_delta": (0.2, 4000), "ulp": (0.7, 1000)}
    monkeypatch.setattr(advice, "ENCODINGS", costs)
    monkeypatch.setattr(advice, "_once", lambda a, b, encoding, clock: costs[encoding])
    monkeypatch.setattr(advice, "_PIECES", 2)
    monkeypatch.setattr(advice, "_PIECE_BYTES", 4096)
    for bandwidth, expected in ((1e3, "ulp"), (13e3, "gap_delta"), (1e9, "raw")):
        found = advise(*pair, bandwidth)
        assert (found.encoding, found.bandwidth) == (expected, bandwidth)
        assert [e.encoding for e in found.estimates] == list(costs)
        for estimate in found.estimates:
            seconds, size = costs[estimate.encoding]
            assert estimate.bytes == 4 * size + 200
            assert estimate.seconds == pytest.approx(4 * seconds + estimate.bytes / bandwidth)


def test_sizes_are_near_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_PIECE_BYTES", 1 << 19)
    a, b = write_steps(tmp_path, 1 << 22, 2)
    with open_checkpoint(a) as base, open_checkpoint(b) as result:
        found = advise(base, result, 1.0)  # so slow that size alone counts
        sizes = {}
        for encoding in ENCODINGS:
            diff(base, result, tmp_path / "delta", encoding=encoding)
            sizes[encoding] = open_delta(tmp_path / "delta").payload_bytes
    assert found.encoding == min(sizes, key=sizes.__getitem__)
    for estimate in found.estimates:
        assert estimate.bytes == pytest.approx(sizes[estimate.encoding], rel=0.05)
        assert estimate.seconds >= estimate.bytes


def test_the_best_round_counts_and_none_begins_late(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.3, 0.2, 0.1])
    monkeypatch.setattr(advice, "ENCODINGS", ("ulp",))
    monkeypatch.setattr(advice, "_once", lambda *args: (next(times), 10))
    quick, slow = (lambda: 0.0), count().__next__
    assert advise(*pair, 1e9, clock=quick).estimates[0].seconds == pytest.approx(0.1, abs=1e-3)
    times = iter([0.3, 0.2])
    assert advise(*pair, 1e9, clock=slow).estimates[0].seconds == pytest.approx(0.3, abs=1e-3)


def test_with_nothing_to_choose_by_it_is_the_default(pair: Pair, tmp_path: Path) -> None:
    assert advise(pair[0], pair[0]).encoding == DEFAULT
    other = write_safetensors(tmp_path / "c.safetensors", {"x": random_tensor("F32", (9,))})
    with open_checkpoint(other) as strange:
        found = advise(pair[0], strange)
    assert found.encoding == DEFAULT
    assert {estimate.bytes for estimate in found.estimates} == {36}


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("nan")])
def test_a_bandwidth_of_nothing_is_refused(bandwidth: float, pair: Pair) -> None:
    with pytest.raises(UsageError):
        advise(*pair, bandwidth)


def test_the_word_is_no_encodings_name() -> None:
    assert AUTO not in ENCODINGS
