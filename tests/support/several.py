"""Links of several files, made as many writers make them: each from the tensors that it has."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from blake3 import blake3

from deltactl.bucket.local import LocalBucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.digest import TensorState
from deltactl.files.safetensors import read_header
from deltactl.format.delta_index import DELTA_INDEX, delta_index, part_name
from deltactl.format.link_names import delta_directory
from deltactl.ops.diff import diff
from deltactl.ops.push import push
from tests.support.chains import write_steps
from tests.support.checkpoints import Spec, write_safetensors

State = Mapping[str, Spec]


def table(state: State) -> dict[str, TensorState]:
    return {
        name: TensorState(name, dtype, tuple(shape), blake3(data).hexdigest())
        for name, (dtype, shape, data) in state.items()
    }


def write_parts(
    directory: Path,
    before: State,
    after: State,
    *,
    count: int,
    step: int,
    base_step: int | None = None,
    encoding: str = "ulp",
    attempt: str = "",
) -> Path:
    """A delta of ``count`` files, tensors dealt out in order of name; returns the directory."""
    names = sorted(before.keys() | after.keys())
    parts = {}
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        mine = set(names[number::count])
        path = directory / part_name(number, count, attempt)
        _part(path, *({n: s[n] for n in mine & s.keys()} for s in (before, after)), encoding)
        parts[path.name] = read_header(path)
    base_step = step - 1 if base_step is None else base_step
    raw, _ = delta_index(table(before), parts, step, base_step)
    (directory / DELTA_INDEX).write_bytes(raw)
    return directory


def _part(path: Path, before: State, after: State, encoding: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        a = write_safetensors(Path(scratch, "a.safetensors"), before)
        b = write_safetensors(Path(scratch, "b.safetensors"), after)
        with open_checkpoint(a) as base, open_checkpoint(b) as result:
            diff(base, result, path, encoding=encoding)


def make_parts_chain(
    directory: Path, steps: list[State], *, count: int = 3, encoding: str = "ulp"
) -> LocalBucket:
    """A bucket at ``directory/bucket``: an anchor, a directory, and deltas of ``count`` files."""
    bucket = LocalBucket(directory / "bucket")
    push(write_steps(directory, steps[:1])[0], bucket, step=1)
    for step, (before, after) in enumerate(pairwise(steps), 2):
        place = directory / "bucket" / delta_directory(step)
        write_parts(place, before, after, count=count, step=step, encoding=encoding)
    return bucket
