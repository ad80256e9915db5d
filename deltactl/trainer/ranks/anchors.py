"""Anchors of many ranks: each puts its shard, and the first rank the index, last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deltactl.chain.anchor_policy import AnchorPolicy, Run
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.snapshot import described
from deltactl.core.digest import TensorState, digest_of, state_digest
from deltactl.core.errors import Malformed
from deltactl.files.safetensors import Header
from deltactl.format.anchor import INDEX, AnchorFile, anchor_index
from deltactl.format.header import utf8
from deltactl.format.link_names import anchor_directory
from deltactl.trainer.ranks.shard import Shard, ShardFile, states_in
from deltactl.trainer.ranks.watch import Watch
from deltactl.trainer.report import Publication
from deltactl.trainer.upload.anchors import as_anchor, from_anchor, is_due, with_delta
from deltactl.trainer.upload.put import put_index, put_link
from deltactl.trainer.upload.worker import Worker


@dataclass(frozen=True, slots=True)
class Assembled:
    """An anchor that is in the bucket: the bytes of all its objects, and its tensors."""

    nbytes: int
    tensors: tuple[TensorState, ...]


class Shards:
    """Puts this rank's shard of an anchor; on the first rank all else too.

    ``aux``: the files that travel with every anchor, by relative path; ``directory``: for the file
    of the index until it is put.
    """

    def __init__(
        self,
        bucket: Bucket,
        watch: Watch,
        rank: int,
        count: int,
        aux: Mapping[str, Path],
        directory: Path,
    ) -> None:
        self._bucket, self._watch, self._rank, self._count = bucket, watch, rank, count
        self._aux, self._directory = aux, directory

    def put(self, shard: Shard, step: int) -> Assembled | None:
        """None on other ranks than the first, and for a step that was taken back. Raises what the
        bucket raises, Conflict, Malformed."""
        place = anchor_directory(step)
        names = [f"model-{n:05d}-of-{self._count:05d}.safetensors" for n in self._numbers()]
        put_link(self._bucket, f"{place}/{names[self._rank]}", shard.path, step)
        if self._rank:
            return None
        files = [described(path, name) for name, path in self._aux.items()]
        for file in files:
            put_link(self._bucket, f"{place}/{file.name}", self._aux[file.name], step)
        headers = self._watch.headers([f"{place}/{name}" for name in names], step)
        return None if headers is None else self._index(headers, files, step)

    def _numbers(self) -> range:
        return range(1, self._count + 1)

    def _index(
        self, headers: Mapping[str, Header], files: list[AnchorFile], step: int
    ) -> Assembled:
        tensors: dict[str, TensorState] = {}
        homes: dict[str, str] = {}
        for path, header in headers.items():
            name = path.rpartition("/")[2]
            files.append(AnchorFile(name, header.file_size, digest_of(header.raw), True))
            for state in states_in(header, path):
                tensors[state.name], homes[state.name] = state, name
        ordered = tuple(tensors[name] for name in sorted(tensors, key=utf8))
        index = self._directory / f"{step}.{INDEX}"
        index.write_bytes(anchor_index(step, ordered, homes, tuple(files)))
        place = anchor_directory(step)
        sizes = {f"{place}/{file.name}": file.nbytes for file in files}
        put_index(self._bucket, f"{place}/{INDEX}", index, step, sizes)
        size = index.stat().st_size + sum(file.nbytes for file in files)
        index.unlink()
        return Assembled(size, ordered)


@dataclass(frozen=True, slots=True)
class Loose:
    """This rank's part of a delta, which its shard does not have in it yet."""

    step: int
    path: Path
    nbytes: int


class Anchors:
    """Makes later anchors, in the background.

    The first rank alone asks the cadence, when a link is confirmed; what it says comes to the
    others with the next step, and all begin then (``advance``). Also where no anchor is due parts
    are taken into the shard once they are as large as it is.
    """

    def __init__(
        self,
        shards: Shards,
        file: ShardFile,
        cadence: AnchorPolicy,
        since: Run | None,
        *,
        done: Callable[[Publication], None],
        failed: Callable[[Exception, bool], None],
    ) -> None:
        self._shards, self._file, self._cadence, self._done = shards, file, cadence, done
        self._since = since
        self._loose: list[Loose] = []
        self._links: list[Publication] = []  # confirmed, since the last anchor; on the first rank
        self.due = self._begun = -1
        self._lock = threading.Lock()
        self._worker = Worker("deltactl-anchors", 1, failed)

    @property
    def over(self) -> bool:
        """Whether no anchor is made any more."""
        return self._worker.over

    # On the thread that encodes.

    def add(self, loose: Loose) -> None:
        """A part that was written."""
        with self._lock:
            self._loose.append(loose)

    def take_back(self, step: int) -> None:
        """A step that will not be."""
        with self._lock:
            self._loose = [item for item in self._loose if item.step != step]

    # On the thread that puts links, of the first rank.

    def first(self, publication: Publication) -> None:
        """The chain's first anchor, or a new one of a chain that was not gone on with."""
        step = publication.step
        self._since = from_anchor(step, publication.bytes, ())

    def confirmed(self, publication: Publication) -> None:
        """A delta that the bucket has."""
        with self._lock:
            assert self._since is not None
            self._links.append(publication)
            self._since = since = with_delta(self._since, publication)
        idle = self._worker.has_room and not self._worker.over and self.due <= self._begun
        if idle and is_due(self._cadence, since):
            self.due = publication.step

    # On the training's thread.

    def advance(self, confirmed: int, due: int) -> None:
        """Begin with the anchor of step ``due``, if that is a new one; ``confirmed``: the newest
        link that the bucket has, both as the first rank says."""
        anchor = due > self._begun
        limit = due if anchor else confirmed
        with self._lock:
            loose = tuple(item for item in self._loose if item.step <= limit)
        if anchor:
            self._begun = due
        elif not self._worker.has_room or not self._is_much(loose):
            return
        self._worker.put(_Advance(self, loose, due if anchor else None))

    def _is_much(self, loose: Sequence[Loose]) -> bool:
        return bool(loose) and sum(item.nbytes for item in loose) > self._file.path.stat().st_size

    # On the thread of the anchors.

    def take(self, loose: Sequence[Loose]) -> Shard:
        """Take parts into the shard, those that are not in it yet. Raises as ShardFile."""
        with self._lock:
            mine = [item for item in loose if item in self._loose]
        shard = self._file.advance([item.path for item in mine])
        with self._lock:
            self._loose = [item for item in self._loose if item not in mine]
        for item in mine:
            item.path.unlink(missing_ok=True)
        return shard

    def put(self, shard: Shard, step: int, started: float) -> None:
        """Put this rank's share of an anchor."""
        found = self._shards.put(shard, step)
        if found is None:
            return
        with self._lock:
            link = next(link for link in self._links if link.step == step)
        state = state_digest(found.tensors)
        if state != link.state:
            what = "the anchor is not the state that its step's delta leads to"
            raise Malformed(what, step=step, expected=link.state, found=state)
        with self._lock:
            self._links = [link for link in self._links if link.step > step]
            self._since = from_anchor(step, found.nbytes, self._links)
        anchor = as_anchor(link, time.monotonic() - started)
        self._done(replace(anchor, bytes=found.nbytes))

    def close(self, until: float | None = None) -> None:
        """Finish what is under way; see Worker."""
        self._worker.close(until)


class _Advance:
    """The job; tried again it goes on where it failed."""

    def __init__(self, anchors: Anchors, loose: Sequence[Loose], step: int | None) -> None:
        self._anchors, self._loose, self._step = anchors, loose, step
        self._shard: Shard | None = None
        self._started = time.monotonic()

    def __call__(self) -> None:
        if self._shard is None:
            self._shard = self._anchors.take(self._loose)
        if self._step is not None:
            self._anchors.put(self._shard, self._step, self._started)
