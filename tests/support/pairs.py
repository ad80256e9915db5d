"""Two consecutive bf16 checkpoints of any size, as AdamW over fp32 masters leaves them.

A step moves a master weight by ``lr`` times a number of about N(0, 0.25): the ratio of Adam's two
moments under noisy gradients (beta 0.9, 0.999) with a little drift. Rounded to bf16, about 1 % of
the elements change at lr 1e-6, most by one unit in the last place. Written a tensor at a time.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

WIDTH = 1024


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even, as bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_pair(
    directory: Path, params: int, *, lr: float = 1e-6, tensors: int = 8, seed: int = 0
) -> tuple[Path, Path]:
    """Write ``directory/a`` and ``directory/b``; each is a Hugging Face directory of one file."""
    rows = max(1, params // tensors // WIDTH)
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(tensors)]
    size = rows * WIDTH * 2
    entries = {
        name: {"dtype": "BF16", "shape": [rows, WIDTH], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    text += b" " * (-len(text) % 8)
    places = (directory / "a", directory / "b")
    for place in places:
        place.mkdir(parents=True)
        (place / "config.json").write_text('{"model_type": "synthetic"}')
    with (
        open(places[0] / "model.safetensors", "wb") as a,
        open(places[1] / "model.safetensors", "wb") as b,
    ):
        for file in (a, b):
            file.write(struct.pack("<Q", len(text)) + text)
        rng = np.random.default_rng(seed)
        for _ in names:
            _write_tensor(a, b, rows, lr, rng)
    return places


def _write_tensor(a, b, rows: int, lr: float, rng: np.random.Generator) -> None:
    for at in range(0, rows, 4096):
        count = min(4096, rows - at)
        scale = 0.02 * np.exp(0.3 * rng.standard_normal((count, 1), np.float32))
        master = rng.standard_normal((count, WIDTH), np.float32) * scale.astype(np.float32)
        update = rng.standard_normal((count, WIDTH), np.float32) * np.float32(0.25 * lr)
        a.write(_bf16(master).tobytes())
        b.write(_bf16(master - update).tobytes())
