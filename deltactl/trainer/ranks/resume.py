"""Where a run of many ranks goes on: at the tip of the chain, each rank with its share of it.

One rank of each machine rebuilds the tip into a directory; all ranks of the machine take from there
what they own and what they watch. The digests of what they own prove together that it is the tip.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from deltactl.chain.admission import Model
from deltactl.chain.anchor_policy import Every, Run
from deltactl.chain.next_step import NextStep
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.checkpoint.state import tensor_state
from deltactl.core.digest import state_digest
from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound, Transient
from deltactl.files.parallel import map_largest_first
from deltactl.trainer.capture.encode import States
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.ranks.group import Group, RankLost, on_all
from deltactl.trainer.ranks.layout import Layout
from deltactl.trainer.report import log
from deltactl.trainer.upload.resume import newest_step, rebuild, since_anchor, tip_model


@dataclass(frozen=True, slots=True)
class Plan:
    """What the bucket holds. ``newest``: the highest step that it has any object of, -1 for none;
    ``since`` and ``state`` are of the tip, where the chain goes on from it; ``model``: of the tip,
    as far as the chain says it."""

    newest: int
    since: Run | None = None
    state: str | None = None
    model: Model | None = None

    @property
    def step(self) -> int | None:
        """The tip, where the chain goes on from it."""
        return None if self.since is None else self.since.step


@dataclass(slots=True)
class Begin:
    """Where this rank begins. ``states``: of the tensors that it owns, ``table``: of all."""

    plan: Plan
    states: States = field(default_factory=dict)
    table: States = field(default_factory=dict)


def begin(
    bucket: Bucket, group: Group, layout: Layout, place: Path, parts: Mirror, owned: Mirror
) -> Begin:
    """Read the chain, and bring each rank's share of its tip into its mirrors. Collective.

    ``place``: a directory of this rank's own. Where the chain cannot be gone on with that is
    logged, and the run begins with an anchor above all that is there. Raises as ``resume.begin``.
    """
    plan = group.gather(on_all(group, lambda: _plan(bucket) if group.rank == 0 else None))[0]
    assert plan is not None
    if plan.since is None:
        return Begin(plan)
    try:
        return _continued(bucket, group, layout, place, plan, parts, owned)
    except (NotAllowed, Transient, RankLost):
        raise
    except DeltactlError as error:
        parts.tensors.clear()
        owned.tensors.clear()
        _begins_anew(bucket, error)
        return Begin(Plan(plan.newest, model=plan.model))


def _begins_anew(bucket: Bucket, error: Exception) -> None:
    log.warning("%s: the chain is not gone on with; an anchor begins anew: %s", bucket.url, error)


def _plan(bucket: Bucket) -> Plan:
    try:
        chain = read_chain(bucket)
    except NotFound:
        return Plan(-1)
    newest = newest_step(bucket)
    if not chain.links and not chain.problems:
        return Plan(newest)
    try:
        NextStep(chain, Every(0)).number(None)
        assert chain.tip is not None  # or the placement would have refused
        since, state = since_anchor(chain, chain.tip), chain.state_at(chain.tip)
        return Plan(newest, since, state, tip_model(bucket, chain))
    except (NotAllowed, Transient):
        raise
    except DeltactlError as error:
        _begins_anew(bucket, error)
        return Plan(newest, model=tip_model(bucket, chain))


def _continued(
    bucket: Bucket,
    group: Group,
    layout: Layout,
    place: Path,
    plan: Plan,
    parts: Mirror,
    owned: Mirror,
) -> Begin:
    assert plan.since is not None
    step = plan.since.step
    hosts = group.gather((socket.gethostname(), str(place / "tip")))
    leader = [host for host, _ in hosts].index(hosts[group.rank][0])
    directory = Path(hosts[leader][1])
    if leader == group.rank:
        on_all(group, lambda: rebuild(bucket, read_chain(bucket), directory, step))
    else:
        on_all(group, lambda: None)

    def load() -> States:
        with open_checkpoint(directory) as checkpoint:
            return _load(checkpoint, layout, parts, owned)

    states = on_all(group, load)
    table = {name: state for share in group.gather(states) for name, state in share.items()}
    found = state_digest(table.values())
    if found != plan.state:
        what = "what the ranks rebuilt is not the tip"
        raise Malformed(what, file=bucket.url, step=step, expected=plan.state, found=found)
    return Begin(plan, states, table)


def _load(tip: Checkpoint, layout: Layout, parts: Mirror, owned: Mirror) -> States:
    """Copy this rank's share into its mirrors; returns what it owns of the tip. Tensors that the
    model does not have any more are the first rank's: it says that they are removed."""
    known = {tensor.name: tensor for tensor in layout.tensors}
    mine = [
        tensor
        for name, tensor in tip.tensors.items()
        if (known[name].owner if name in known else 0) == layout.rank
    ]
    owned.add((tensor.name, tensor.dtype, tensor.shape) for tensor in mine)
    for tensor in mine:
        owned.tensors[tensor.name].data[:] = tensor.data
    watched = {
        name: placed.readers[layout.rank]
        for name, placed in layout.read.items()
        if (there := tip.tensors.get(name)) is not None
        and (there.dtype, there.shape) == (placed.dtype, placed.shape)
    }
    parts.add((n, known[n].dtype, piece.local_shape) for n, piece in watched.items())
    for name, piece in watched.items():
        whole = tip.tensors[name].bits
        parts.tensors[name].bits[:] = piece.take(whole)
    held = list(owned.tensors.values())
    found = map_largest_first(tensor_state, held, lambda item: item.data.size)
    return {state.name: state for state in found}
