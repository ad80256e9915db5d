"""Small chains for tests: the states of a few steps, written out and pushed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from deltactl.bucket.local import LocalBucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.ops.diff import diff
from deltactl.ops.push import PushReport, push
from tests.support.checkpoints import (
    Spec,
    changed,
    random_tensor,
    read_tensors,
    write_hf_directory,
    write_safetensors,
)

Tensors = dict[str, Spec]

AUX: Mapping[str, bytes] = {
    "config.json": b'{"model_type": "tiny"}\n',
    "tokenizer/vocab.txt": b"a\nb\n",
}


def first_state() -> Tensors:
    """Some dtypes, a scalar and a tensor without elements."""
    return {
        "model.embed": random_tensor("BF16", (40, 20), 1),
        "model.norm": random_tensor("F32", (64,), 2),
        "model.scale": random_tensor("F32", (), 3),
        "model.packed": random_tensor("F8_E4M3", (32, 8), 4),
        "model.nothing": ("BF16", (0, 4), b""),
    }


def next_state(state: Mapping[str, Spec], seed: int) -> Tensors:
    """A few elements of the two larger tensors changed."""
    return {
        **state,
        "model.embed": changed(state["model.embed"], 0.02, seed),
        "model.packed": changed(state["model.packed"], 0.02, seed + 1000),
    }


def states(count: int) -> list[Tensors]:
    """The states of steps 1 to ``count``, each other than the one before."""
    found = [first_state()]
    while len(found) < count:
        found.append(next_state(found[-1], len(found)))
    return found


def every_kind(state: Mapping[str, Spec]) -> Tensors:
    """What follows on a ``first_state`` by a delta with every kind of record."""
    after = next_state(state, 77)
    after["model.norm"] = random_tensor("F32", (64,), 78)  # all elements
    after["model.scale"] = random_tensor("BF16", (2,), 79)  # another dtype and shape
    after["model.new"] = random_tensor("I64", (3,), 80)
    del after["model.nothing"]
    return after


def write(path: Path, tensors: Mapping[str, Spec], *, shards: int = 2) -> Path:
    """A directory with AUX, or with ``shards=0`` a single file of that name."""
    if not shards:
        return write_safetensors(path, tensors)
    return write_hf_directory(path, tensors, shards=shards, aux=AUX)


def write_steps(
    directory: Path, steps: Iterable[Mapping[str, Spec]], shards: int = 2
) -> list[Path]:
    """Each state as a checkpoint below ``directory``."""
    suffix = "" if shards else ".safetensors"
    return [
        write(directory / f"step_{n}{suffix}", tensors, shards=shards)
        for n, tensors in enumerate(steps, 1)
    ]


def push_all(
    bucket: LocalBucket, checkpoints: Iterable[Path], *, anchor_every: int = 10
) -> list[PushReport]:
    """Push as steps 1, 2, ..."""
    return [
        push(checkpoint, bucket, step=n, anchor_every=anchor_every)
        for n, checkpoint in enumerate(checkpoints, 1)
    ]


def make_chain(
    directory: Path, steps: Iterable[Mapping[str, Spec]], *, shards: int = 2, anchor_every: int = 10
) -> LocalBucket:
    """A bucket at ``directory/bucket`` with these states; their checkpoints are beside it."""
    bucket = LocalBucket(directory / "bucket")
    push_all(bucket, write_steps(directory, steps, shards), anchor_every=anchor_every)
    return bucket


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, hidden ones too: relative path and bytes."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def holds(directory: Path, tensors: Mapping[str, Spec]) -> bool:
    """Whether a checkpoint has exactly these tensors, bit for bit."""
    return read_tensors(directory) == dict(tensors)


def make_delta(
    path: Path,
    before: Mapping[str, Spec],
    after: Mapping[str, Spec],
    *,
    encoding: str = "ulp",
    step: int | None = 2,
) -> Path:
    """The delta between two states, as a file; with a ``step`` as from the one below it."""
    a = write_safetensors(path.with_suffix(".a.safetensors"), before)
    b = write_safetensors(path.with_suffix(".b.safetensors"), after)
    with open_checkpoint(a) as base, open_checkpoint(b) as result:
        base_step = None if step is None else step - 1
        diff(base, result, path, encoding=encoding, step=step, base_step=base_step)
    a.unlink()
    b.unlink()
    return path


def write_torch(directory: Path, tensors: Mapping[str, Spec]) -> Path:
    """A directory with a PyTorch file of tensors as ``first_state`` has them."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    state = {
        name: torch.frombuffer(bytearray(data or b"\0" * 8), dtype=torch.uint8)
        .view(dtypes[dtype])[: len(data) // dtypes[dtype].itemsize]
        .reshape(shape)
        for name, (dtype, shape, data) in tensors.items()
    }
    directory.mkdir()
    torch.save(state, directory / "pytorch_model.bin")
    return directory
