"""What is odd about a step's values is told, by name and count; it travels all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltactl.bucket.local import LocalBucket
from deltactl.codec.bits import elements
from deltactl.ops.oddities import count_not_finite
from deltactl.ops.push import push
from deltactl.trainer import Publisher
from tests.support.checkpoints import read_tensors, write_safetensors
from tests.support.publishing import assert_chain, bits_of, small

NAN, INF = 0x7FC0, 0xFF80

TORCH = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", TORCH)
@given(data=st.binary(min_size=8, max_size=256), before=st.binary(min_size=256, max_size=256))
def test_it_counts_as_torch_does(dtype: str, data: bytes, before: bytes) -> None:
    raw = np.frombuffer(data[: len(data) // 8 * 8], np.uint8)
    old = np.frombuffer(before[: raw.size], np.uint8)

    def odd(part: np.ndarray) -> torch.Tensor:
        return ~torch.from_numpy(part.copy()).view(TORCH[dtype]).double().isfinite()

    bits, was = elements(raw, dtype), elements(old, dtype)
    assert count_not_finite(bits, dtype) == int(odd(raw).sum())
    assert count_not_finite(bits, dtype, was) == int((odd(raw) & ~odd(old)).sum())


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "F8_E8M0"])
def test_what_is_no_float_is_never_odd(dtype: str) -> None:
    assert count_not_finite(elements(np.full(16, 0xFF, np.uint8), dtype), dtype) == 0


def model(**changes: np.ndarray) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Four tensors of 64 bf16, of which ``changes`` has others."""
    values = {n: np.arange(64, dtype="<u2") + 0x3F80 + 64 * i for i, n in enumerate("abcd")}
    return {n: ("BF16", (64,), v.astype("<u2").tobytes()) for n, v in (values | changes).items()}


def part(name: str) -> np.ndarray:
    return np.frombuffer(model()[name][2], "<u2").copy()


def odd_step(kind: str) -> tuple[dict[str, np.ndarray], str]:
    """What changes, and what is said of it."""
    a, b, c = part("a"), part("b"), part("c")
    a[:2], c[5] = NAN, INF
    return {
        "blown": (
            {"a": a, "c": c},
            "2 of 4 floating tensors hold NaN or infinities where the step before had numbers: "
            "a (2 elements), c (1 element)",
        ),
        "zeroed": ({"b": 0 * b}, "1 of 4 floating tensors became all zeros: b"),
        "exchanged": (
            {"a": part("b"), "b": part("a")},
            "2 tensors have each other's content of the step before, as where names were "
            "exchanged: a has that of b, b has that of a",
        ),
        "turned": (
            {"a": part("b"), "b": part("c"), "c": part("a")},
            "3 tensors have each other's content of the step before, as where names were "
            "exchanged: a has that of b, b has that of c, c has that of a",
        ),
    }[kind]


@pytest.mark.parametrize("kind", ["blown", "zeroed", "exchanged", "turned"])
def test_a_push_says_what_became_odd_and_no_step_says_it_again(tmp_path: Path, kind: str) -> None:
    bucket, source = LocalBucket(tmp_path / "bucket"), tmp_path / "model.safetensors"
    write_safetensors(source, model())
    assert push(source, bucket).notes == ()
    changes, said = odd_step(kind)
    write_safetensors(source, model(**changes))
    report = push(source, bucket, dry_run=True)
    assert said in report.notes
    report = push(source, bucket)
    assert report.written and said in report.notes
    d = part("d")
    d[0] += 1
    write_safetensors(source, model(**changes, d=d))
    assert push(source, bucket).notes == ()


def test_ordinary_changes_are_not_odd(tmp_path: Path) -> None:
    bucket, source = LocalBucket(tmp_path / "bucket"), tmp_path / "model.safetensors"
    a, b = part("a"), part("b")
    a[3] = 0  # one element alone
    b[:] = part("a")  # a copy, of which the other is not gone
    write_safetensors(source, model(d=0 * part("d")))
    assert push(source, bucket).notes == (), "a bias that begins with zeros"
    write_safetensors(source, model(a=a, b=b, d=0 * part("d")))
    assert push(source, bucket).notes == ()


def test_a_first_checkpoint_with_nan(tmp_path: Path) -> None:
    a = part("a")
    a[-1] = NAN
    source = tmp_path / "model.safetensors"
    write_safetensors(source, model(a=a))
    report = push(source, LocalBucket(tmp_path / "bucket"))
    assert report.notes == ("1 of 4 floating tensors hold NaN or infinities: a (1 element)",)
    assert read_tensors(source) == model(a=a)


def test_a_publisher_logs_it_and_publishes_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, net = LocalBucket(tmp_path / "bucket"), small()
    expected = {}
    with Publisher(net, bucket) as publisher:
        for step in (1, 2, 3):
            net[0].weight.data[0, 0] += 1
            if step == 2:
                net[0].weight.data[3, :4] = float("nan")
            publisher.publish()
            expected[step] = bits_of(net.state_dict())
    assert_chain(bucket, expected, tmp_path)
    said = [message for message in caplog.messages if "NaN" in message]
    assert said == [
        "step 2: 1 of 4 floating tensors hold NaN or infinities where the step before had "
        "numbers: 0.weight (4 elements)"
    ]
