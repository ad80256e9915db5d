"""Consecutive checkpoints of any size, as AdamW over fp32 masters leaves them.

Masters are normal, of a scale that differs from row to row. A step moves each by ``lr`` times its
normalised momentum: that of noisy gradients (beta 0.9) with a little drift, of deviation 0.25.
Rounded to bf16, about 1 % of the elements change at lr 1e-6, most by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltactl.codec.bits import Bits
from deltactl.files.safetensors import make_header

Floats = npt.NDArray[np.float32]

WIDTH = 1024
WEIGHTS = "model.safetensors"
_ROWS = 1024  # made together
_BETA = np.float32(0.9)
_NOISE = np.float32(((1 - 0.9) / (1 + 0.9)) ** 0.5)  # deviation of the momentum of white noise
_DRIFT = np.float32(0.1)
_FP8_SCALE = np.float32(1024)  # what a checkpoint in fp8 divides by; a power of two fits its range


def write_steps(
    directory: Path,
    params: int,
    steps: int,
    *,
    lr: float = 1e-6,
    dtype: str = "BF16",
    tensors: int = 8,
    seed: int = 0,
) -> list[Path]:
    """Write ``steps`` checkpoints of about ``params`` elements of BF16, F32 or F8_E4M3.

    Returns them, oldest first: Hugging Face directories of one file below ``directory``. All are
    written side by side, a chunk at a time, so that none is ever in memory.
    """
    rows = max(1, params // tensors // WIDTH)
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(tensors)]
    header = make_header([(name, dtype, (rows, WIDTH)) for name in names], {"format": "pt"})
    places = [directory / f"step_{i:06d}" for i in range(steps)]
    rng = np.random.default_rng(seed)
    with ExitStack() as stack:
        files = []
        for place in places:
            place.mkdir(parents=True)
            (place / "config.json").write_text('{"model_type": "synthetic"}')
            files.append(stack.enter_context(open(place / WEIGHTS, "wb")))
            files[-1].write(header)
        for at in (at for _ in names for at in range(0, rows, _ROWS)):
            masters = _masters(min(_ROWS, rows - at), lr, rng)
            for file, master in zip(files, masters, strict=False):  # the masters have no end
                file.write(_rounded(master, dtype).tobytes())
    return places


def _masters(rows: int, lr: float, rng: np.random.Generator) -> Iterator[Floats]:
    """The same rows of one tensor, step after step; each array is only valid until the next."""

    def normal(width: int = WIDTH) -> Floats:
        return rng.standard_normal((rows, width), np.float32)

    master = normal() * (np.float32(0.02) * np.exp(np.float32(0.3) * normal(1)))
    drift = _DRIFT * normal()
    momentum = drift + _NOISE * normal()
    while True:
        yield master
        master -= np.float32(lr) * momentum
        momentum *= _BETA
        momentum += (1 - _BETA) * (normal() + drift)


def _rounded(values: Floats, dtype: str) -> Bits:
    """Bits of the nearest number of ``dtype``, ties to even."""
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "BF16":
        return _cut(values, 16).astype(np.uint16)
    return _fp8(values * _FP8_SCALE)


def _cut(values: Floats, count: int) -> npt.NDArray[np.uint32]:
    """The bits without their ``count`` last, rounded."""
    bits = values.view(np.uint32)
    half = np.uint32((1 << (count - 1)) - 1)
    return (bits + half + ((bits >> np.uint32(count)) & np.uint32(1))) >> np.uint32(count)


def _fp8(values: Floats) -> Bits:
    """E4M3: 3 bits of mantissa, exponents from -6, below those steps of 2^-9, up to 448."""
    size = np.minimum(np.abs(values), np.float32(448))
    normal = _cut(size, 20) - np.uint32((127 - 7) << 3)
    small = np.rint(size * np.float32(512)).astype(np.uint32)
    bits: Bits = np.where(size < np.float32(2**-6), small, normal)
    bits |= np.signbit(values).astype(np.uint32) << np.uint32(7)
    return bits.astype(np.uint8)
