"""The verbs for programs, notebooks and trainers: what ``import deltactl`` gives.

Each does what the verb of that name does on the command line, prints nothing, returns the verb's
report, and raises ``DeltactlError``, whose fields say what is wrong, where, and what to do about
it. A checkpoint or a delta is given by its path; a bucket by its address, such as "s3://b/run", or
by its directory. ``progress`` is called with what goes on, the bytes that are done, and all of
them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from deltactl.bucket import open_bucket
from deltactl.chain.anchor_policy import ANCHOR_EVERY
from deltactl.chain.chain import Chain
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.checkpoint import checkpoint as checkpoints
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.codec import DEFAULT
from deltactl.core.progress import Progress, silent
from deltactl.format import delta as deltas
from deltactl.format.delta import Delta
from deltactl.format.delta_index import is_delta_path
from deltactl.ops import diff as diffing
from deltactl.ops import pull as pulling
from deltactl.ops import push as pushing
from deltactl.ops.apply import ApplyReport, apply_delta
from deltactl.ops.diff import DiffReport
from deltactl.ops.pull import PullReport
from deltactl.ops.push_report import PushReport
from deltactl.ops.verify import VerifyReport, verify_bucket, verify_delta

AnyPath: TypeAlias = str | os.PathLike[str]
Level: TypeAlias = Literal["links", "data", "rebuild"]


def open_checkpoint(path: AnyPath) -> Checkpoint:
    """Open a checkpoint: a safetensors or PyTorch file, or a Hugging Face directory.

    A context manager. ``tensors`` maps names to tensors with ``dtype`` (a safetensors code),
    ``shape`` and ``data``, the bytes, mapped and read-only. Raises NotFound, NotAllowed, Malformed;
    Unsupported for what is sound and cannot be read.
    """
    return checkpoints.open_checkpoint(Path(path))


def open_delta(path: AnyPath) -> Delta:
    """Open a delta, ours or TRL's: a file, or a directory of files.

    ``header`` holds the steps and states that it leads from and to; ``records`` maps names to how
    each tensor is carried. Raises NotFound, Malformed, Unsupported.
    """
    return deltas.open_delta(Path(path))


def open_chain(bucket: AnyPath) -> Chain:
    """Read the headers of a bucket's links.

    ``links`` in order, ``tip``, and ``problems``: what is wrong with single links. Raises NotFound
    where there is no such bucket, UsageError, and what the store raises.
    """
    return read_chain(_bucket(bucket))


def diff(
    base: AnyPath,
    result: AnyPath,
    out: AnyPath | None = None,
    *,
    encoding: str = DEFAULT,
    progress: Progress = silent,
) -> DiffReport:
    """Compare two checkpoints, bit by bit, and write the delta that leads from one to the other.

    Without ``out`` it is only measured. Raises as ``open_checkpoint``, and UsageError for an
    encoding that is not known.
    """
    with open_checkpoint(base) as old, open_checkpoint(result) as new:
        target = None if out is None else Path(out)
        return diffing.diff(old, new, target, encoding=encoding, progress=progress)


def apply(
    delta: AnyPath, base: AnyPath, out: AnyPath | None = None, *, progress: Progress = silent
) -> ApplyReport:
    """Write what a delta makes of the checkpoint ``base`` to ``out``, or in its place.

    Raises Conflict where the delta stands on another checkpoint, Malformed where it is damaged;
    then nothing was written.
    """
    target = None if out is None else Path(out)
    return apply_delta(Path(delta), Path(base), target, progress=progress)


def push(
    source: AnyPath,
    bucket: AnyPath,
    *,
    step: int | None = None,
    anchor_every: int = ANCHOR_EVERY,
    base: AnyPath | None = None,
    encoding: str = DEFAULT,
    allow_other_model: bool = False,
    progress: Progress = silent,
) -> PushReport:
    """Publish a checkpoint, or a delta file, as the next step of a chain, or as ``step``.

    Every ``anchor_every`` steps it is an anchor as well; 0: never after the first. ``base``: the
    tip's checkpoint, where this machine's cache does not have it. Raises Conflict for another
    model, for a step that is there with other bits, and for one below the tip.
    """
    return pushing.push(
        Path(source),
        _bucket(bucket),
        step=step,
        anchor_every=anchor_every,
        base=None if base is None else Path(base),
        encoding=encoding,
        allow_other_model=allow_other_model,
        progress=progress,
    )


def pull(
    bucket: AnyPath,
    dest: AnyPath,
    *,
    step: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> PullReport:
    """Make ``dest`` a Hugging Face directory of a step, by default the newest that can be rebuilt.

    Raises NotFound for a step that is not in the chain, Malformed where a link is damaged, Conflict
    where ``dest`` holds something else; ``force`` replaces weights beside a trainer's state.
    """
    return pulling.pull(_bucket(bucket), Path(dest), step=step, force=force, progress=progress)


def verify(
    source: AnyPath,
    *,
    level: Level = "data",
    step: int | None = None,
    against: AnyPath | None = None,
    progress: Progress = silent,
) -> VerifyReport:
    """Verify a delta, or all links of a bucket; look at the report's ``ok``.

    ``level``: "links" for the headers, "data" for every byte as well, "rebuild" for every step of
    the chain too. ``against``: a checkpoint that ``step``, by default the tip, has to equal. Faults
    are in ``errors``; what no digest proves is in ``unproven``. Raises NotFound, UsageError, and
    what the store raises.
    """
    if against is None and step is None and is_delta_path(Path(source)):
        return verify_delta(Path(source), level=level, progress=progress)
    other = None if against is None else Path(against)
    return verify_bucket(_bucket(source), level=level, step=step, against=other, progress=progress)


def _bucket(address: AnyPath) -> Bucket:
    return open_bucket(os.fspath(address))
