"""Where a run goes on: at the tip of the bucket's chain, proven bit by bit, or with an anchor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from deltactl.chain.admission import Model
from deltactl.chain.anchor_policy import Every, Run
from deltactl.chain.chain import Chain
from deltactl.chain.model import chain_model
from deltactl.chain.next_step import NextStep
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.checkpoint.checkpoint import Checkpoint, Tensor, open_checkpoint
from deltactl.checkpoint.state import tensor_state
from deltactl.core.digest import state_digest
from deltactl.core.errors import (
    Conflict,
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    UsageError,
)
from deltactl.files.atomic import remove
from deltactl.files.parallel import map_largest_first
from deltactl.ops.pull import materialize
from deltactl.trainer.capture.encode import States
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.report import log

_STEP = re.compile(r"(?:anchors|deltas)/step_(\d{6,18})[./]")


@dataclass(slots=True)
class Begin:
    """Where a run begins. ``newest``: the highest step that the bucket has any object of, -1 for
    none. ``states`` and ``since`` are of the tip, where the chain goes on from it; then the mirror
    holds it. Without ``since`` the next link is an anchor. ``model``: of the tip, as far as the
    chain says it."""

    newest: int
    states: States = field(default_factory=dict)
    since: Run | None = None
    model: Model | None = None

    @property
    def step(self) -> int | None:
        """The tip, where the chain goes on from it."""
        return None if self.since is None else self.since.step


def begin(bucket: Bucket, directory: Path, mirror: Mirror) -> Begin:
    """Read the chain, bring its tip into the mirror and into ``directory``, and prove it.

    What ``directory`` holds already is used as far as its bits are a step's of the chain. Where the
    chain is damaged, carries no digests, or its tip cannot be rebuilt, that is logged, and the run
    begins with an anchor above all that is there. Raises NotAllowed, Transient: those say nothing
    of the chain.
    """
    try:
        chain = read_chain(bucket)
    except NotFound:
        return Begin(-1)
    newest = newest_step(bucket)
    if not chain.links and not chain.problems:
        return Begin(newest)
    try:
        return _continued(bucket, chain, directory, mirror, newest)
    except (NotAllowed, Transient):
        raise
    except DeltactlError as error:
        mirror.tensors.clear()
        log.warning(
            "%s: the chain is not gone on with; an anchor begins anew: %s", chain.url, error
        )
        return Begin(newest, model=tip_model(bucket, chain))


def tip_model(bucket: Bucket, chain: Chain) -> Model | None:
    """The model of the tip; None where the chain has none, or does not say it.

    Raises NotAllowed, Transient.
    """
    if chain.tip is None:
        return None
    try:
        return chain_model(bucket, chain, chain.tip)
    except (NotAllowed, Transient):
        raise
    except DeltactlError:
        return None


def newest_step(bucket: Bucket) -> int:
    """The highest step that the bucket has any object of, -1 for none; also of what was never
    finished: a directory without its index is no link, and in the way."""
    matches = (_STEP.match(item.name) for item in bucket.list())
    return max((int(match[1]) for match in matches if match is not None), default=-1)


def _continued(bucket: Bucket, chain: Chain, directory: Path, mirror: Mirror, newest: int) -> Begin:
    NextStep(chain, Every(0)).number(None)
    tip = chain.tip
    assert tip is not None  # or the placement would have refused
    rebuild(bucket, chain, directory, tip)
    with open_checkpoint(directory) as checkpoint:
        states = _load(mirror, checkpoint)
    found = state_digest(states.values())
    if found != chain.state_at(tip):
        what = "what was rebuilt is not the tip"
        raise Malformed(what, file=directory, step=tip, expected=chain.state_at(tip), found=found)
    return Begin(newest, states, since_anchor(chain, tip), tip_model(bucket, chain))


def rebuild(bucket: Bucket, chain: Chain, directory: Path, step: int) -> None:
    """Make ``directory`` a step's checkpoint, from what it holds where that is of the chain."""
    try:
        materialize(bucket, chain, directory, step=step)
    except (Conflict, UsageError):  # of another chain, or nothing that pull would replace
        remove(directory)
        materialize(bucket, chain, directory, step=step)


def _load(mirror: Mirror, checkpoint: Checkpoint) -> States:
    """Copy all tensors into the mirror; returns what they are there."""
    tensors = checkpoint.tensors
    mirror.add((t.name, t.dtype, t.shape) for t in tensors.values())

    def copy(held: Tensor) -> None:
        held.data[:] = tensors[held.name].data

    held = list(mirror.tensors.values())
    map_largest_first(copy, held, lambda item: item.data.size)
    found = map_largest_first(tensor_state, held, lambda item: item.data.size)
    return {state.name: state for state in found}


def since_anchor(chain: Chain, tip: int) -> Run:
    """What lies between the newest anchor that leads to the tip, and the tip."""
    anchor, deltas = chain.path(tip)
    size = sum(link.bytes for link in deltas)
    changed = sum(link.changed_elements or 0 for link in deltas)
    return Run(tip, anchor.step, anchor.bytes, size, changed)
