"""What changed is found, all of it and nothing else, and can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltactl.codec.base import BLOCK
from deltactl.codec.bits import touch_sum
from deltactl.core.errors import Unsupported, UsageError
from deltactl.trainer.capture import device as staging_module
from deltactl.trainer.capture.capture import Capture, Capturer
from deltactl.trainer.capture.device import Staging
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.model import tensors as live_module
from deltactl.trainer.model.tensors import Live, live_tensors

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(params=["memory", "disk"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mirror]:
    found = Mirror(request.param, tmp_path)
    yield found
    found.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "CHUNK", 256)
    monkeypatch.setattr(staging_module, "CHUNK", 256)


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def take(capturer: Capturer, tensors: dict[str, torch.Tensor], view: str | None = None) -> Capture:
    return capturer.capture(live_tensors(tensors, view))


def content(mirror: Mirror) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {n: (h.dtype, h.shape, h.data.tobytes()) for n, h in mirror.tensors.items()}


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(0, 700), st.data())
def test_finds_every_change_of_any_bits_and_undoes_it(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    dtype: torch.dtype,
    count: int,
    data: st.DataObject,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_module, "CHUNK", 256)
        rng = np.random.default_rng(seed)
        width = dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        old = rng.integers(0, high, count * width, dtype=np.uint8)
        new = old.copy()
        share = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
        touched = rng.random(count * width) < share
        new[touched] = rng.integers(0, high, int(touched.sum()), dtype=np.uint8)
        kind = data.draw(st.sampled_from(["memory", "disk"]))
        mirror = Mirror(kind, tmp_path_factory.getbasetemp())
        capturer = Capturer(mirror)
        tensor = torch.empty(count, dtype=dtype)
        tensor.view(torch.uint8).numpy()[:] = old
        assert take(capturer, {"w": tensor}).changes["w"].kind == "added"
        tensor.view(torch.uint8).numpy()[:] = new
        found = take(capturer, {"w": tensor})
        assert mirror.tensors["w"].data.tobytes() == new.tobytes()
        wide = np.dtype(f"<u{width}")
        a, b = old.view(wide), new.view(wide)
        expected = np.flatnonzero(a != b)
        if not expected.size:
            assert not found.changes
        else:
            change = found.changes["w"]
            chunks = sorted(change.chunks, key=lambda chunk: chunk.start)
            changes = [(c.start, c.found(mirror.tensors["w"].bits)) for c in chunks]
            positions = np.concatenate([f.positions + start for start, f in changes])
            assert positions.tolist() == expected.tolist()
            assert np.concatenate([f.before for _, f in changes]).tolist() == a[expected].tolist()
            assert np.concatenate([f.after for _, f in changes]).tolist() == b[expected].tolist()
            assert change.old_sum == touch_sum(expected, a[expected])
            assert change.new_sum == touch_sum(expected, b[expected])
        found.undo()
        assert mirror.tensors["w"].data.tobytes() == old.tobytes()
        capturer.close()
        mirror.close()


def test_a_capture_never_takes_much_more_than_the_tensors(
    small_chunks: None, mirror: Mirror
) -> None:
    capturer = Capturer(mirror)
    tensor = torch.zeros(5000, dtype=torch.bfloat16)
    take(capturer, {"w": tensor})
    tensor[:2500] = 1.0  # in half of the chunks all elements
    tensor[4000] = 2.0
    (change,) = take(capturer, {"w": tensor}).changes.values()
    taken = sum(
        c.before.nbytes + (0 if c.positions is None else c.positions.nbytes) for c in change.chunks
    )
    assert any(c.positions is None for c in change.chunks)
    assert any(c.positions is not None for c in change.chunks)
    assert taken <= 2 * tensor.numel()
    for chunk in change.chunks:  # copies, not the fronts of arrays as long as the chunk
        assert chunk.before.base is None


def test_nan_minus_zero_and_infinity_are_bits_like_others(mirror: Mirror) -> None:
    capturer = Capturer(mirror)
    tensor = torch.tensor([0.0, float("nan"), float("inf"), 1.0], dtype=torch.bfloat16)
    take(capturer, {"w": tensor})
    assert not take(capturer, {"w": tensor}).changes  # a NaN equals itself
    tensor[0] = -0.0
    tensor.view(torch.int16)[1] ^= 1  # another NaN
    tensor[2] = float("-inf")
    (change,) = take(capturer, {"w": tensor}).changes.values()
    positions = [c.found(mirror.tensors["w"].bits).positions.tolist() for c in change.chunks]
    assert positions == [[0, 1, 2]]


def odd_floats() -> torch.Tensor:
    """Ties, numbers that round to infinity, denormals, both zeros, infinities, NaNs."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 50_000, dtype=np.uint32)
    bits[::3] = (bits[::3] & 0xFFFF0000) | 0x8000  # half way between two
    bits[1::97] = (bits[1::97] & 0x8000FFFF) | 0x7F7F0000
    bits[2::97] &= 0x800FFFFF
    bits[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC00000, 1]
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def test_masters_are_rounded_as_torch_rounds_them(mirror: Mirror) -> None:
    master = odd_floats()
    capturer = Capturer(mirror)
    take(capturer, {"w": master, "n": torch.arange(5)}, "bfloat16")
    expected = as_bytes(master.to(torch.bfloat16))
    assert mirror.tensors["w"].dtype == "BF16"
    assert mirror.tensors["n"].dtype == "I64"
    assert mirror.tensors["w"].data.tobytes() == expected.tobytes()
    master[10_000:20_000] *= 1 + 2**-10  # less than half a unit: most keep their bits
    before = expected.view(np.uint16)
    now = as_bytes(master.to(torch.bfloat16)).view(np.uint16)
    (change,) = take(capturer, {"w": master, "n": torch.arange(5)}, "bfloat16").changes.values()
    count = sum(c.found(mirror.tensors["w"].bits).positions.size for c in change.chunks)
    assert count == int((before != now).sum())
    assert 0 < count < 10_000


def test_tensors_come_go_and_change_their_shape(mirror: Mirror) -> None:
    capturer = Capturer(mirror)
    first = {"a": torch.ones(8), "b": torch.ones(3, 4), "c": torch.ones(2)}
    take(capturer, first)
    before = content(mirror)
    second = {"b": torch.ones(4, 3), "c": torch.ones(2, dtype=torch.bfloat16), "d": torch.ones(())}
    found = take(capturer, second)
    kinds = {name: change.kind for name, change in found.changes.items()}
    assert kinds == {"a": "removed", "b": "replaced", "c": "replaced", "d": "added"}
    assert content(mirror).keys() == second.keys()
    found.undo()
    assert content(mirror) == before


def test_changes_across_blocks_and_non_contiguous_tensors(mirror: Mirror) -> None:
    capturer = Capturer(mirror)
    tensor = torch.zeros(2, (BLOCK + 100) // 2, dtype=torch.uint8)
    turned = torch.arange(12.0).reshape(3, 4).t()
    take(capturer, {"w": tensor, "t": turned})
    assert mirror.tensors["t"].data.tobytes() == as_bytes(turned).tobytes()
    at = [0, BLOCK - 1, BLOCK, BLOCK + 99]
    tensor.view(-1)[at] = 7
    turned[1, 0] = -1.0
    found = take(capturer, {"w": tensor, "t": turned})
    starts = sorted(found.changes["w"].chunks, key=lambda chunk: chunk.start)
    bits = mirror.tensors["w"].bits
    positions = [p + c.start for c in starts for p in c.found(bits).positions.tolist()]
    assert positions == at
    (chunk,) = found.changes["t"].chunks
    assert chunk.found(mirror.tensors["t"].bits).positions.tolist() == [3]


def test_an_error_on_the_way_leaves_the_mirror_as_it_was(
    small_chunks: None, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer = Capturer(mirror)
    tensors = {name: torch.zeros(1000) for name in "abc"}
    take(capturer, tensors)
    before = content(mirror)
    for tensor in tensors.values():
        tensor += 1
    tensors["d"] = torch.ones(3)
    del tensors["b"]

    def failing(live: Live, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        for number, chunk in enumerate(live_module.host_chunks(live, start, stop)):
            if live.name == "c" and number == 3:
                raise MemoryError
            yield chunk

    with monkeypatch.context() as patch:
        patch.setattr("deltactl.trainer.capture.capture.host_chunks", failing)
        with pytest.raises(MemoryError):
            take(capturer, tensors)
    assert content(mirror) == before
    assert sorted(take(capturer, tensors).changes) == ["a", "b", "c", "d"]


class LateCopier:
    """As a device does: the bytes are there only once they are waited for, those of the last chunk
    before those of the first."""

    def __init__(self) -> None:
        self.buffers = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.full((nbytes,), 0x55, dtype=torch.uint8)

    def start(self, live: Live, at: int, end: int, target: torch.Tensor) -> Any:
        target.fill_(0x55)
        return lambda: target.copy_(staging_module.bytes_of(staging_module._view(live, at, end)))


def test_a_devices_chunks_go_through_a_ring_of_buffers(small_chunks: None, mirror: Mirror) -> None:
    copier = LateCopier()
    ring = Staging(lambda: copier)
    master = odd_floats()
    tensors = live_tensors({"w": master, "i": torch.arange(300)}, "bfloat16")
    seen: dict[str, bytearray] = {name: bytearray(live.nbytes) for name, live in tensors.items()}

    def work(live: Live, at: int, bits: Any) -> None:
        start = at * bits.itemsize
        seen[live.name][start : start + bits.nbytes] = bits.tobytes()

    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            for future in list(ring.each_chunk(list(tensors.values()), work, pool)):
                future.result()
            assert bytes(seen["w"]) == as_bytes(master.to(torch.bfloat16)).tobytes()
            assert bytes(seen["i"]) == as_bytes(torch.arange(300)).tobytes()
            seen = {name: bytearray(live.nbytes) for name, live in tensors.items()}
    assert copier.buffers == ring.buffers


def test_a_copy_that_cannot_begin_loses_no_buffer(small_chunks: None) -> None:
    copier = LateCopier()
    ring = Staging(lambda: copier)
    tensors = list(live_tensors({"w": torch.arange(500)}, None).values())
    draw, start = Random(1), copier.start

    def unlucky(*given: Any) -> Any:
        if draw.random() < 0.2:
            raise RuntimeError("the device is gone")
        return start(*given)

    copier.start = unlucky  # type: ignore[method-assign]
    ended = 0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(30):  # more often than there are buffers: one lost would be waited for
            try:
                for future in ring.each_chunk(tensors, lambda *_: None, pool):
                    future.result()
            except RuntimeError:
                ended += 1
    assert ended > ring.buffers


def test_what_cannot_be_published_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="'s'"):
        live_tensors({"s": torch.eye(3).to_sparse()}, None)
    with pytest.raises(Unsupported, match="'m'"):
        live_tensors({"m": torch.empty(3, device="meta")}, None)
    with pytest.raises(Unsupported, match="spread over ranks"):
        live_tensors({"d": type("Spread", (torch.Tensor,), {"to_local": None})(3)}, None)
    with pytest.raises(UsageError, match="bfloat16"):
        live_tensors({}, "fp8")
    with pytest.raises(UsageError, match="memory or disk"):
        Mirror("tape", Path("."))
