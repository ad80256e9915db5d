"""From a capture to the bucket, in the background: each rank its part, the first the index, last.

No rank waits for another here but by looking into the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deltactl.chain.anchor_policy import AnchorPolicy
from deltactl.chain.store import Bucket
from deltactl.core.digest import state_digest
from deltactl.format.delta_index import DELTA_INDEX, delta_index, parse_delta_index, part_name
from deltactl.format.link_names import delta_directory
from deltactl.ops.oddities import of_first
from deltactl.trainer.capture.capture import Capture
from deltactl.trainer.capture.encode import States, write_delta
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.model.masters import Masters
from deltactl.trainer.ranks.anchors import Anchors, Loose, Shards
from deltactl.trainer.ranks.capture import Sent, receive
from deltactl.trainer.ranks.layout import Layout
from deltactl.trainer.ranks.resume import Begin
from deltactl.trainer.ranks.shard import ShardFile
from deltactl.trainer.ranks.watch import Watch
from deltactl.trainer.report import Publication, log
from deltactl.trainer.upload.account import Account, Notify
from deltactl.trainer.upload.line import PENDING
from deltactl.trainer.upload.put import put_index, put_link
from deltactl.trainer.upload.waiting import Waiting
from deltactl.trainer.upload.worker import Job, Worker

_LAST_LOOK = 10.0
"""Seconds that are left for what there is when other ranks are waited for no more."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A capture, and its place. ``started``: the clock when it began."""

    sent: Sent
    step: int
    training_step: int
    merged_steps: int
    started: float
    blocked_seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank says of itself at every step. ``encoded``: whether it has made its part of the
    step before; ``confirmed``, ``due``: the newest link that the bucket has, and the newest step
    that is to have an anchor, as the first rank knows."""

    encoded: bool
    room: bool
    over: bool
    confirmed: int
    due: int


@dataclass(frozen=True, slots=True)
class _Before:
    """What an encoded step is taken back to."""

    capture: Capture | None
    taken: int
    step: int | None
    states: States


class RankLine(Account):
    """Takes captures one by one (``encode``), and puts this rank's parts in that order.

    ``count``: of ranks; ``attempt``: a text that no other run has, for the names of parts;
    ``directory``: an empty one, for files until they are of no more use.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: Layout,
        count: int,
        owned: Mirror,
        start: Begin,
        aux: dict[str, Path],
        directory: Path,
        *,
        attempt: str,
        encoding: str,
        masters: Masters,
        cadence: AnchorPolicy,
        notify: Notify | None,
    ) -> None:
        super().__init__(bucket.url, notify if layout.rank == 0 else None)
        self._bucket, self._layout, self._count, self._owned = bucket, layout, count, owned
        self._directory, self._attempt, self._encoding = directory, attempt, encoding
        self._states, self._table = start.states, start.table
        self._masters = masters
        since = start.plan.since
        self._step = None if since is None else since.step
        self._before: _Before | None = None
        self._confirmed_step, self._stopped = -1, False
        self._file = ShardFile(directory / "shard.safetensors")
        if since is not None:
            self._file.write(owned.checkpoint())
        self._watch = Watch(bucket)
        self._shards = Shards(bucket, self._watch, layout.rank, count, aux, directory)
        self._links = Worker("deltactl-links", PENDING, self._link_failed)
        self._anchors = Anchors(
            self._shards, self._file, cadence, since,
            done=self._anchored, failed=self._anchor_failed,
        )  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether no link is put any more; known to all ranks at the same step."""
        return self._stopped

    def status(self, waiting: Waiting, *, encoded: bool) -> Status:
        """What to tell the others, after having waited for room in this way."""
        room = waiting.room(self._links)
        due = self._anchors.due
        return Status(encoded, room, self._links.over, self._confirmed_step, due)

    # On the thread that encodes.

    def encode(self, taken: Taken) -> bool:
        """Write this rank's part and let it be put. False where that fails. What came of it on all
        ranks is to be told by ``settle`` before the next capture."""
        self._before = _Before(None, taken.step, self._step, self._states)
        try:
            capture = receive(self._owned, self._layout, taken.sent.received)
            self._before = replace(self._before, capture=capture)
            first = self._step is None
            job = self._first(taken) if first else self._delta(capture, taken)
        except Exception as error:
            self.fail(error)
            return False
        self._step, self._step_error = taken.step, None
        self._links.put(job)
        return True

    def _first(self, taken: Taken) -> Job:
        shard = self._file.write(self._owned.checkpoint())
        self._states = {state.name: state for state in shard.tensors}
        self._odd(taken.step, of_first(self._owned.checkpoint()))

        def put() -> None:
            found = self._shards.put(shard, taken.step)
            if found is None:
                return
            self._table = {state.name: state for state in found.tensors}
            publication = replace(
                _publication(taken, "anchor"),
                total_elements=sum(tensor.elements for tensor in found.tensors),
                state=state_digest(found.tensors),
                bytes=found.nbytes,
            )
            self._anchors.first(self._noted(publication, taken))

        return put

    def _delta(self, capture: Capture, taken: Taken) -> Job:
        assert self._step is not None
        self._masters.look(capture)
        step, base_step = taken.step, self._step
        path = self._directory / f"{step}.safetensors"
        made = write_delta(
            capture, self._states, path, encoding=self._encoding, step=step, base_step=base_step
        )
        self._states = made.states
        self._odd(step, made.report.notes)
        self._anchors.add(Loose(step, path, made.report.delta_bytes))
        place = delta_directory(step)
        names = [part_name(number, self._count, self._attempt) for number in range(self._count)]

        def put() -> None:
            put_link(self._bucket, f"{place}/{names[self._layout.rank]}", path, step)
            if self._layout.rank == 0:
                self._put_index(taken, names, base_step)

        return put

    # On the thread that puts.

    def _put_index(self, taken: Taken, names: list[str], base_step: int) -> None:
        """Wait for all parts, and make a link of them."""
        step, place = taken.step, delta_directory(taken.step)
        headers = self._watch.headers([f"{place}/{name}" for name in names], step)
        if headers is None:
            return
        parts = {path.rpartition("/")[2]: header for path, header in headers.items()}
        raw, table = delta_index(self._table, parts, step, base_step)
        index = self._directory / f"{step}.{DELTA_INDEX}"
        index.write_bytes(raw)
        sizes = {path: header.file_size for path, header in headers.items()}
        put_index(self._bucket, f"{place}/{DELTA_INDEX}", index, step, sizes)
        index.unlink()
        self._table = table
        header = parse_delta_index(raw, index)
        publication = replace(
            _publication(taken, "delta"),
            changed_elements=header.changed_elements,
            total_elements=header.total_elements or 0,
            bytes=header.nbytes,
            encoding=header.encoding,
            state=str(header.result_state),
        )
        self._anchors.confirmed(self._noted(publication, taken))

    def _noted(self, publication: Publication, taken: Taken) -> Publication:
        publication = self._confirmed(publication, taken.started)
        self._confirmed_step = publication.step
        return publication

    # On the training's thread.

    def settle(self, ok: bool) -> None:
        """Whether all ranks have made their parts of the step that was encoded last. Where not it
        is taken back, and its changes will be found again."""
        before, self._before = self._before, None
        if ok or before is None:
            return
        if before.capture is not None:
            before.capture.undo()
        self._step, self._states = before.step, before.states
        self._watch.take_back(before.taken)
        self._anchors.take_back(before.taken)
        if self._step_error is None:
            self.fail(RuntimeError("another rank could not make its part of the step"))

    def heard(self, statuses: list[Status]) -> bool:
        """What all ranks have said; returns whether a capture may be made."""
        if any(status.over for status in statuses):
            self.stop()
            return False
        self._anchors.advance(statuses[0].confirmed, statuses[0].due)
        return all(status.room for status in statuses)

    def stop(self) -> None:
        """Put no more links: not all ranks can."""
        if not self._stopped:
            log.error("nothing more is published: not all ranks can go on")
        self._stopped = True
        self._watch.give_up()

    def close_links(self) -> bool:
        """Put what is waiting; whether that is there."""
        self._links.close()
        return not self._links.over

    def close_anchors(self) -> bool:
        """Put the anchor that is under way; whether it is there."""
        self._anchors.close()
        return not self._anchors.over

    def give_up(self) -> None:
        """Wait for no other rank any more."""
        self._watch.give_up()

    def close(self, until: float | None = None) -> None:
        """Put what is waiting, or give up at the first error; see Worker. Where there is an end to
        it the other ranks' parts are waited for until shortly before."""
        if until is not None:
            self._links.close(until - _LAST_LOOK)
            self._watch.give_up()
        self._links.close(until)
        self._anchors.close(until)
        super().close(until)

    def tell_missing(self) -> None:
        """The first rank knows what is in the bucket."""
        if self._layout.rank == 0:
            super().tell_missing()


def _publication(taken: Taken, kind: str) -> Publication:
    """As far as it is known before the bucket has all."""
    return Publication(
        step=taken.step,
        training_step=taken.training_step,
        kind=kind,
        changed_elements=None,
        total_elements=0,
        bytes=0,
        seconds=0.0,
        blocked_seconds=taken.blocked_seconds,
        merged_steps=taken.merged_steps,
        encoding=None,
        state="",
    )
