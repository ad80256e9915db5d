"""A delta onto a checkpoint on disk: the base is checked before, the result after."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.checkpoint.hf_directory import TORCH_SUFFIXES
from deltactl.checkpoint.state import state_of
from deltactl.codec import encoding_named
from deltactl.codec.base import BLOCK, Decoder, touch_sum_of
from deltactl.codec.bits import Bits, Bytes
from deltactl.codec.room import room_for
from deltactl.core.errors import Conflict, DeltactlError, Malformed, UsageError
from deltactl.core.progress import Progress, silent
from deltactl.files.atomic import atomic_directory, atomic_file, recover
from deltactl.format.delta import Delta, open_delta
from deltactl.format.header import Record, is_ours
from deltactl.replay.rebuild import Written, check_tensors, write_directory, write_file

Side = Literal["base", "result"]

_PIECE = 1 << 20
_ENOUGH = 1 << 16  # changes that a base's side is told by: milliseconds, where all may take seconds
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What ``apply_delta`` did. ``written`` is False where the result was there already; ``proven``
    is False where the delta has no digest to prove the result by (TRL's)."""

    out: Path
    state: str
    step: int | None
    changed_elements: int
    written: bool
    proven: bool


def apply_delta(
    delta_path: Path, base_path: Path, out: Path | None, *, progress: Progress = silent
) -> ApplyReport:
    """Write the state that a delta leads to from ``base_path`` to ``out``, or in place with None.

    The result has the form and the shard layout of the base. Nothing is visible before it is
    proven. Raises Conflict for another base (before anything is written) or an ``out`` that holds
    something else, Malformed for a torn delta or a result that is not the one that the delta names.
    """
    recover(base_path.resolve())  # of an apply in place that died, nothing but the old may be left
    delta = open_delta(delta_path)
    if delta.header.has_digests:
        delta.check_payload()
    with open_checkpoint(base_path) as base:
        _check_target(base, base_path, out)
        side = which_side(base, delta) if delta.header.base_state is not None else "base"
        if side == "result" or _changes_nothing(delta):
            done = _applied_already(base, delta, out, progress)
            if done is not None:
                return done
        if out is not None and _holds(out, delta.header.result_state, progress):
            return _report(delta, out, str(delta.header.result_state), False)
        written = write_result(
            base,
            [] if side == "result" else [delta],  # then all that is left to do is to copy
            out or base_path,
            in_place=out is None,
            expected=delta.header.result_state,
            progress=progress,
        )
        return _report(delta, out or base_path, written.state, True)


def _changes_nothing(delta: Delta) -> bool:
    """Whether the delta says that it leads to where it stands; without digests it says nothing."""
    header = delta.header
    return header.base_state is not None and header.base_state == header.result_state


def _report(delta: Delta, out: Path, state: str, written: bool) -> ApplyReport:
    header = delta.header
    proven = header.result_state is not None
    return ApplyReport(out, state, header.step, header.changed_elements, written, proven)


def _check_target(base: Checkpoint, base_path: Path, out: Path | None) -> None:
    if out is None:
        if is_ours(base.index_metadata or {}) or any(is_ours(s.metadata) for s in base.shards):
            what = "the checkpoint is an anchor of a chain, and stays as it is"
            raise UsageError(what, file=base_path, hint="write to a new place with -o OUT")
        if not all(shard.file.endswith(".safetensors") for shard in base.shards):
            what = "only safetensors checkpoints can be changed in place"
            raise UsageError(what, file=base_path, hint="write to a new place with -o OUT")
        return
    if out.resolve() == base_path.resolve():
        what = "the output is the base itself"
        raise UsageError(what, file=out, hint="change it in place with --in-place")
    if not base.is_directory and out.suffix in TORCH_SUFFIXES:
        what = "the output would be a safetensors file with the name of a PyTorch file"
        raise UsageError(what, file=out, hint=f"-o {out.with_suffix('.safetensors')}")
    if out.exists() and out.is_dir() != base.is_directory:
        kinds = ("a file", "a directory")
        raise Conflict(
            "the output is there and is of another kind than the base",
            file=out,
            expected=kinds[base.is_directory],
            found=kinds[out.is_dir()],
        )


def _empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _holds(out: Path, state: str | None, progress: Progress) -> bool:
    """Whether ``out`` holds the result. Raises Conflict if it holds anything else."""
    if not out.exists() or _empty(out):
        return False
    found = None
    try:
        with open_checkpoint(out) as checkpoint:
            found = state_of(checkpoint, progress=progress)
    except DeltactlError:
        pass
    if found is not None and found == state:
        return True
    raise Conflict(
        "the output is there and holds something else",
        file=out,
        expected=f"nothing, or state {state}",
        found=f"state {found}" if found else "no checkpoint",
        hint="remove it, or name another place with -o OUT",
    )


def _applied_already(
    base: Checkpoint, delta: Delta, out: Path | None, progress: Progress
) -> ApplyReport | None:
    """The report, if the base is the result and nothing is left to write."""
    state = state_of(base, progress=progress)
    if state != delta.header.result_state:
        raise another_base(delta, state)
    if out is not None and not _holds(out, state, progress):
        return None
    return _report(delta, out or base.path, state, False)


def another_base(delta: Delta, found: str) -> Conflict:
    """The error for a base whose state is not the delta's."""
    return Conflict(
        "wrong base: its state is not the one that the delta starts from",
        file=delta.path,
        step=delta.header.step,
        expected=f"state {delta.header.base_state}",
        found=f"state {found}",
        hint=f"deltactl show {quote(str(delta.path))}",
    )


def which_side(base: Checkpoint, delta: Delta) -> Side:
    """Whether a checkpoint is what the delta stands on or what it leads to.

    Gathers the bits at the changed positions and compares their touch sums; of large deltas only
    those of the tensors with the fewest changes, until that tells. What it does not see the digest
    of the result shows before anything is visible. For deltas with digests alone. Raises Conflict
    if the checkpoint is neither.
    """
    sides: set[Side] = {"base", "result"}
    seen = 0
    for record in sorted(delta.records.values(), key=lambda record: record.changed):
        sides &= _sides_of(base, delta, record)
        if not sides and _is_result(base, delta):
            return "result"
        if not sides:
            raise Conflict(
                "wrong base: the tensor matches neither the delta's base nor its result",
                file=delta.path,
                tensor=record.name,
                step=delta.header.step,
                expected=f"state {delta.header.base_state}",
                hint=f"deltactl show {quote(str(delta.path))}",
            )
        seen += record.changed
        if len(sides) == 1 and seen >= _ENOUGH:
            break
    return "base" if "base" in sides else "result"


def _is_result(base: Checkpoint, delta: Delta) -> bool:
    """For encodings whose positions only the base tells: whether all is as after the delta."""
    needs_base = encoding_named(delta.header.encoding).needs_base
    return needs_base and state_of(base) == delta.header.result_state


def _sides_of(base: Checkpoint, delta: Delta, record: Record) -> set[Side]:
    tensor = base.tensors.get(record.name)
    found = None if tensor is None else (tensor.dtype, tensor.shape)
    fits = record.fits(found)
    if record.kind == "removed":
        return {"result"} if found is None else _only(fits)
    if fits and (record.kind == "added" or record.replaced):
        return {"base"}
    if not record.whole:
        return _sides_by_sums(base, delta, record)
    if tensor is None or found != (record.dtype, record.shape):
        return set()
    if _same_bytes(tensor.data, delta.whole(record.name)):
        return {"result"}
    return _only(record.kind == "dense" and not record.replaced)


def _same_bytes(a: Bytes, b: Bytes) -> bool:
    starts = range(0, a.size, _PIECE)
    return all(np.array_equal(a[at : at + _PIECE], b[at : at + _PIECE]) for at in starts)


def _only(is_base: bool) -> set[Side]:
    return {"base"} if is_base else set()


def _sides_by_sums(base: Checkpoint, delta: Delta, record: Record) -> set[Side]:
    tensor = base.tensors.get(record.name)
    if tensor is None or (tensor.dtype, tensor.shape) != (record.dtype, record.shape):
        return set()
    bits = tensor.bits
    decoder = delta.decoder(record.name, tensor.dtype, bits.size)
    try:
        total = _touch_sum(bits, decoder)
    except Malformed:
        if decoder.needs_base:  # as the payload is sound, it is the base that is another
            return set()
        raise
    sides: set[Side] = set()
    if total == record.old_sum:
        sides.add("base")
    if total == record.new_sum:
        sides.add("result")
    return sides


def _touch_sum(bits: Bits, decoder: Decoder) -> int:
    """The touch sum of a tensor's bits at the positions of its changes."""
    total = 0
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        with room_for(decoder.count_in(start // BLOCK)):
            total += touch_sum_of(decoder.block(start // BLOCK, block), block, start)
    return total % (1 << 64)


def write_result(
    base: Checkpoint,
    deltas: Sequence[Delta],
    out: Path,
    *,
    in_place: bool,
    expected: str | None,
    progress: Progress = silent,
) -> Written:
    """Write what ``deltas`` lead to from ``base`` under its final name, once it is proven.

    ``in_place``: ``out`` is the base's own place; what else is in that directory stays.
    ``expected``: the state to prove, None where nothing says it. Raises Conflict, Malformed.
    """
    if not base.is_directory:
        with atomic_file(out) as file:
            with _blamed_on_the_base(base, deltas):
                written = write_file(base, deltas, file, progress=progress)
            prove(base, deltas, written, expected)
        return written
    with atomic_directory(out) as directory:
        aux = {} if in_place else base.aux
        with _blamed_on_the_base(base, deltas):
            written = write_directory(base, deltas, directory, aux=aux, progress=progress)
        prove(base, deltas, written, expected)
        if in_place:
            carry_over(out, directory, {shard.file for shard in base.shards})
    return written


def prove(
    base: Checkpoint, deltas: Sequence[Delta], written: Written, expected: str | None
) -> None:
    """Compare the result with what the deltas name, each tensor and the whole; on a difference,
    find out who is to blame.

    Raises Conflict if the base is not the first delta's, Malformed otherwise.
    """
    for delta in deltas:
        delta.check_stands()
    if expected is None:
        return
    if written.state != expected:
        _check_base(base, deltas)
    check_tensors(written, deltas)
    if written.state == expected:
        return
    raise Malformed(
        "the result does not have the state that it is named by",
        file=deltas[-1].path if deltas else base.path,
        expected=expected,
        found=written.state,
    )


@contextmanager
def _blamed_on_the_base(base: Checkpoint, deltas: Sequence[Delta]) -> Iterator[None]:
    """Where changes cannot be decoded: upon another base those of some encodings never can.

    Raises Conflict if it is another.
    """
    try:
        yield
    except Malformed:
        _check_base(base, deltas)
        raise


def _check_base(base: Checkpoint, deltas: Sequence[Delta]) -> None:
    first = deltas[0].header.base_state if deltas else None
    if first is not None:
        found = state_of(base)
        if found != first:
            raise another_base(deltas[0], found)


def carry_over(old: Path, new: Path, weights: Set[str]) -> None:
    """Give ``new`` every file of ``old`` that it lacks, but weights and what repeats them."""
    for directory, names, files in os.walk(old):
        target = new / Path(directory).relative_to(old)
        if os.path.lexists(target) and not target.is_dir():
            names[:] = []  # what was a directory is a file now
            continue
        if not target.exists():
            target.mkdir()
            shutil.copymode(directory, target)
        for name in [*files, *(n for n in names if Path(directory, n).is_symlink())]:
            is_weight = name in weights or name.endswith(_INDEX) or name.startswith("consolidated")
            if (Path(directory) == old and is_weight) or os.path.lexists(target / name):
                continue
            _link_or_copy(Path(directory, name), target / name)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
