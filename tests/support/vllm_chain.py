"""Chains of small models that a real vLLM serves: one step in each encoding, one dense, one empty.

Each step's checkpoint is made from the one before without deltactl's own code.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltactl.bucket import open_bucket
from deltactl.chain.reading import read_chain
from deltactl.format.link_names import delta_name
from deltactl.ops.push import push
from tests.support.checkpoints import Spec, read_tensors, write_safetensors
from tests.support.vllm_models import write_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

ENCODINGS = {2: "raw", 3: "gap_delta", 4: "ulp", 5: "ulp_ctx", 6: "ulp", 7: "ulp", 8: "ulp"}
DENSE, EMPTY, TIP = 6, 7, 8
"""Steps: the one that replaces whole tensors, the one that changes nothing, the last."""


@dataclass(frozen=True)
class ModelChain:
    """``bucket``: a directory with an anchor at step 1 and a delta for each later step.
    ``checkpoints``: each step's Hugging Face directory. ``states``: each step's state digest."""

    kind: str
    bucket: str
    checkpoints: dict[int, Path]
    states: dict[int, str]

    def links(self, before: int, after: int) -> list[str]:
        """The deltas from one step to another."""
        return [delta_name(step) for step in range(before + 1, after + 1)]

    def steps(self) -> dict[str, int]:
        """The step of each state: of two that have the same the first."""
        return {state: step for step, state in sorted(self.states.items(), reverse=True)}


def make_chain(root: Path, kind: str) -> ModelChain:
    """Write and publish all steps of a model of ``kind`` below ``root``."""
    model = write_model(root / "model", kind)
    tensors = read_tensors(model)
    tied = kind.endswith("-tied")
    if tied:  # many checkpoints have it all the same
        tensors[HEAD] = tensors[EMBEDDING]
    checkpoints = {1: write_like(root / "step_1", model, tensors)}
    bucket = str(root / "bucket")
    push(checkpoints[1], open_bucket(bucket), step=1, anchor_every=0)
    for step, encoding in ENCODINGS.items():
        if step != EMPTY:
            tensors = next_step(tensors, step)
        if tied:
            tensors[HEAD] = tensors[EMBEDDING]
        made = checkpoints[step] = write_like(root / f"step_{step}", model, tensors)
        push(made, open_bucket(bucket), step=step, encoding=encoding, anchor_every=0)
    chain = read_chain(open_bucket(bucket))
    states = {step: chain.state_at(step) for step in checkpoints}
    assert None not in states.values()
    return ModelChain(kind, bucket, checkpoints, states)  # type: ignore[arg-type]


def copy_chain(chain: ModelChain, url: str) -> None:
    """Publish the same steps at ``url``, with the environment's credentials."""
    for step, checkpoint in chain.checkpoints.items():
        encoding = ENCODINGS.get(step, "ulp")
        push(checkpoint, open_bucket(url), step=step, encoding=encoding, anchor_every=0)


def copy_bucket(chain: ModelChain, root: Path) -> Path:
    """The same bucket once more, as a directory to be damaged."""
    shutil.copytree(chain.bucket, root)
    return root


def next_step(tensors: dict[str, Spec], step: int) -> dict[str, Spec]:
    """About one bf16 element in fifty of every tensor moved, at DENSE all of some tensors."""
    random = np.random.default_rng(step)
    found = {}
    for name, (dtype, shape, data) in tensors.items():
        assert dtype == "BF16", name
        bits = np.frombuffer(data, "<u2").copy()
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        chosen = random.random(bits.size) < 0.02
        if step == DENSE and ("norm" in name or "layers.1." in name):
            chosen[:] = True
        moved = values[chosen] + random.normal(0, 0.3, int(chosen.sum())).astype(np.float32)
        bits[chosen] = (moved.view(np.uint32) >> 16).astype(np.uint16)
        where = np.flatnonzero(chosen)
        bits[where[:1]], bits[where[1:2]] = 0x8000, 0  # minus zero and zero
        found[name] = (dtype, shape, bits.tobytes())
    return found


def write_like(path: Path, like: Path, tensors: dict[str, Spec]) -> Path:
    """A directory as ``like`` with these weights in one file."""
    path.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, path / file.name)
    write_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
    return path
