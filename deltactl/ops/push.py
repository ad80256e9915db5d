"""A checkpoint, or a delta made before, becomes the next step of a chain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

from deltactl.chain.anchor_policy import ANCHOR_EVERY, BANDWIDTH, AnchorPolicy, Every
from deltactl.chain.chain import Chain
from deltactl.chain.check.objects import aux_files
from deltactl.chain.model import admit, admit_delta
from deltactl.chain.next_step import NextStep
from deltactl.chain.reading import read_chain
from deltactl.chain.replaced import other_run
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.put import put_object, put_snapshot
from deltactl.chain.transfer.snapshot import Snapshot, take_snapshot
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.checkpoint.hf_directory import TORCH_SUFFIXES
from deltactl.checkpoint.state import fingerprint, state_of, tensor_states
from deltactl.codec import DEFAULT, encoding_named
from deltactl.core.digest import state_digest
from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotFound, UsageError
from deltactl.core.progress import Progress, silent
from deltactl.files.atomic import atomic_directory, remove, temporary_directory
from deltactl.files.cache import tip_cache
from deltactl.files.names import is_plain_path
from deltactl.files.safetensors import read_header
from deltactl.files.signatures import check_fetched
from deltactl.format.checker import has_file
from deltactl.format.delta import open_delta
from deltactl.format.delta_header import says_delta
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.format.header import check_step
from deltactl.format.link_names import delta_name
from deltactl.format.restamp import restamped
from deltactl.ops.advice import AUTO, Advice, advise
from deltactl.ops.diff import DiffReport, diff
from deltactl.ops.oddities import of_first
from deltactl.ops.pull import materialize
from deltactl.ops.push_report import PushReport, delta_report, with_size

__all__ = ["PushReport", "push"]


def push(
    source: Path,
    bucket: Bucket,
    *,
    step: int | None = None,
    anchor_every: int = ANCHOR_EVERY,
    base: Path | None = None,
    encoding: str = DEFAULT,
    bandwidth: float = BANDWIDTH,
    allow_other_model: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> PushReport:
    """Publish a checkpoint, or a delta file, as ``step`` (by default the one after the tip).

    The first push is an anchor. Later ones are a delta against the tip, which is kept in a local
    cache, or is at ``base``; a step at or past the next multiple of ``anchor_every`` is an anchor
    as well (0: never). Delta first, so that the chain is whole at every moment. A step that is
    there with the same state is left as it is, and so is the tip where no step is named.
    ``encoding`` may be "auto": the one that gets the delta there soonest at ``bandwidth`` bytes a
    second. With ``allow_other_model`` a checkpoint may be of another model than the chain; then it
    is an anchor, with its own config, and no delta. Raises Conflict for another model, for a step
    with another state, for one below the tip, and for a base that is not the tip; and what the
    bucket raises.
    """
    if encoding != AUTO:
        encoding_named(encoding)
    if step is not None:
        check_step(step)
    anchors = Every(anchor_every)
    with tip_cache(bucket.url) as cached:
        try:
            chain = read_chain(bucket)
        except NotFound:
            chain = Chain((), url=bucket.url)
        publisher = _Publisher(
            bucket, chain, cached, anchors, (encoding, bandwidth), dry_run, progress
        )
        publisher.allows_other_model = allow_other_model
        if _is_delta(source):
            if base is not None:
                raise UsageError("a delta needs no --base: it names its own", file=source)
            return publisher.push_delta(source, step)
        return publisher.push_checkpoint(source, step, base)


def _is_delta(source: Path) -> bool:
    """Whether a file is a delta: it says so; a checkpoint that cannot be read says nothing here."""
    if (source / DELTA_INDEX).is_file() or source.name == DELTA_INDEX:
        what = "a delta of several files is not pushed: it goes from bucket to bucket"
        raise UsageError(what, file=source, hint="deltactl copy SOURCE DEST")
    if not source.is_file() or source.suffix in TORCH_SUFFIXES:
        return False
    try:
        return says_delta(read_header(source))
    except DeltactlError:  # opened as a checkpoint it says what is wrong with it
        return False


class _Publisher:
    def __init__(
        self,
        bucket: Bucket,
        chain: Chain,
        cached: Path,
        anchors: AnchorPolicy,
        wish: tuple[str, float],
        dry_run: bool,
        progress: Progress,
    ) -> None:
        self._bucket, self._chain, self._cached = bucket, chain, cached
        self._next, self._wish = NextStep(chain, anchors), wish
        self._advice: Advice | None = None
        self._dry_run, self._progress = dry_run, progress
        self._seen: tuple[tuple[str, int, int, int], ...] | None = None
        self.allows_other_model = False

    def push_checkpoint(self, source: Path, step: int | None, base: Path | None) -> PushReport:
        with open_checkpoint(source) as checkpoint:
            _check_aux(checkpoint)
            self._seen = fingerprint(checkpoint)
            if step is not None and self._chain.links_at(step):
                state = state_of(checkpoint, progress=self._progress)
                report = self._same_step(step, state, checkpoint.total_elements)
                return self._finish_anchor(checkpoint, report)
            asked, step, tip = step, self._next.number(step), self._chain.tip
            admitted = admit(checkpoint, self._bucket, self._chain, allow=self.allows_other_model)
            if tip is None or admitted.other:
                report = self._whole(checkpoint, step, keep=base is None)
                return replace(report, notes=admitted.notes + of_first(checkpoint))
            with self._scratch() as scratch:
                delta = scratch / "delta"
                found = self._diff(checkpoint, base, delta, step)
                if asked is None and found.identical:
                    report = self._same_step(tip, found.result_state, found.total_elements)
                    report = replace(report, left_behind=self._left_behind(checkpoint))
                    return self._finish_anchor(checkpoint, report)
                report = replace(
                    delta_report(found, step, self._dry_run),
                    advice=self._advice,
                    notes=admitted.notes
                    + other_run(found.records, found.total_elements)
                    + found.notes,
                )
                return self._write(checkpoint, report, delta, keep=base is None)

    def _write(
        self, checkpoint: Checkpoint, report: PushReport, delta: Path, *, keep: bool
    ) -> PushReport:
        """Put the delta, and the anchor where one is due; keep the checkpoint as the cached tip.

        It is copied before anything is put, which shows whether it still is what was compared, and
        becomes the cached tip after everything is.
        """
        due = self._anchor_due(report)
        if not due:
            report = replace(report, left_behind=self._left_behind(checkpoint))
        if self._dry_run:
            return with_size(report, checkpoint) if due else report
        if not due and not keep:
            self._check_unchanged(checkpoint, report)
            return self._put_delta(delta, report)
        with self._snapshot(checkpoint, report, keep=keep) as snapshot:
            report = self._put_delta(delta, report)
            return self._put_anchor(snapshot, report) if due else report

    def _left_behind(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Files beside the weights that are not as the newest anchor has them."""
        newest = max(self._chain.anchors, default=None)
        if newest is None or not checkpoint.is_directory:
            return ()
        known = {file.name: file for file in aux_files(self._chain.anchors[newest])}
        differ = [
            n for n, p in checkpoint.aux.items() if n not in known or not has_file(p, known[n])
        ]
        return tuple(sorted({*differ, *(known.keys() - checkpoint.aux.keys())}))

    def _finish_anchor(self, checkpoint: Checkpoint, report: PushReport) -> PushReport:
        """An anchor that a push did not live to write is written when the step is pushed again."""
        if report.step != self._chain.steps[-1] or not self._anchor_due(report):
            return report
        report = replace(report, written=True, left_behind=())
        return self._anchor(checkpoint, report, keep=False)

    def _anchor_due(self, report: PushReport) -> bool:
        """Whether the step of a report, whose link is a delta, is to be an anchor as well."""
        delta = self._chain.deltas.get(report.step)
        size = report.bytes if delta is None else delta.bytes
        return self._next.anchor_due(report.step, size, report.changed_elements or 0)

    def _whole(self, checkpoint: Checkpoint, step: int, keep: bool) -> PushReport:
        """An anchor without a delta: the chain's first, or where another model begins."""
        report = PushReport(
            step, "anchor", 0, "", True, None, checkpoint.total_elements, self._dry_run, ()
        )
        if self._dry_run:
            state = state_digest(tensor_states(checkpoint, progress=self._progress))
            report = replace(report, state=state)
        return self._anchor(checkpoint, report, keep=keep)

    def _anchor(self, checkpoint: Checkpoint, report: PushReport, *, keep: bool) -> PushReport:
        """Put an anchor alone: the first, or one of a step whose delta is there."""
        if self._dry_run:
            return with_size(report, checkpoint)
        with self._snapshot(checkpoint, report, keep=keep) as snapshot:
            return self._put_anchor(snapshot, report)

    def _same_step(self, step: int, state: str, total_elements: int) -> PushReport:
        """The report for a step that is there with this state. Raises Conflict for another."""
        self._next.check_same(step, state)
        links = self._chain.links_at(step)
        return PushReport(
            step=step,
            kind=links[-1].kind,
            bytes=0,
            state=state,
            written=False,
            changed_elements=links[0].changed_elements,
            total_elements=total_elements,
            dry_run=self._dry_run,
            files=(),
        )

    def _diff(self, result: Checkpoint, base: Path | None, out: Path, step: int) -> DiffReport:
        """The delta from the tip. Raises Conflict if ``base`` is not the tip."""
        tip = self._chain.tip
        assert tip is not None
        expected = self._chain.state_at(tip)
        if base is None:
            with contextlib.suppress(DeltactlError):  # missing, torn, or of another step
                found = self._diff_from(self._cached, result, out, step, tip)
                if found.base_state == expected:
                    return found
            self._refresh_cache(tip)
        found = self._diff_from(base or self._cached, result, out, step, tip)
        if expected is not None and found.base_state != expected:
            raise Conflict(
                "the base is not the chain's tip",
                file=base or self._cached,
                step=tip,
                expected=f"state {expected}",
                found=f"state {found.base_state}",
                hint=f"deltactl pull {quote(self._chain.url)} DEST --step {tip}",
            )
        return found

    def _diff_from(
        self, base: Path, result: Checkpoint, out: Path, step: int, tip: int
    ) -> DiffReport:
        with open_checkpoint(base) as opened:
            encoding, bandwidth = self._wish
            if encoding == AUTO:
                self._advice = advise(opened, result, bandwidth)
                encoding = self._advice.encoding
            return diff(
                opened,
                result,
                out,
                encoding=encoding,
                step=step,
                base_step=tip,
                progress=self._progress,
            )

    def _refresh_cache(self, step: int) -> None:
        """Rebuild a step in the cache, from what it holds where that is of the chain."""
        try:
            materialize(self._bucket, self._chain, self._cached, step=step, progress=self._progress)
        except (Conflict, UsageError):  # of another chain, or nothing that pull would replace
            remove(self._cached)
            materialize(self._bucket, self._chain, self._cached, step=step, progress=self._progress)

    # A delta.

    def push_delta(self, source: Path, step: int | None) -> PushReport:
        delta = open_delta(source)
        header = delta.header
        if header.dialect != "deltactl":
            what = "only deltas that name their base and result can be pushed"
            raise UsageError(what, file=source, hint="push the checkpoint instead")
        delta.check_payload()
        total, result_state = header.total_elements or 0, str(header.result_state)
        step = header.step if step is None else step
        if step is not None and self._chain.links_at(step):
            return self._same_step(step, result_state, total)
        step = self._next.number(step)
        self._next.check_base(header)
        notes = admit_delta(header, self._bucket, self._chain)
        notes += other_run(header.records.values(), total)
        tip = self._chain.tip
        assert tip is not None
        with self._scratch() as scratch:
            out = scratch / "delta"
            size = restamped(source, out, step, tip)
            report = PushReport(
                step=step,
                kind="delta",
                bytes=size,
                state=result_state,
                written=True,
                changed_elements=header.changed_elements,
                total_elements=total,
                dry_run=self._dry_run,
                files=(delta_name(step),),
                notes=notes,
            )
            if not self._dry_run:
                report = self._put_delta(out, report)
        if not self._anchor_due(report):
            return report
        if self._dry_run:
            return replace(report, kind="anchor")
        self._chain = read_chain(self._bucket)
        self._refresh_cache(step)
        with open_checkpoint(self._cached) as checkpoint:
            return self._anchor(checkpoint, report, keep=False)

    # Writing.

    @contextlib.contextmanager
    def _snapshot(
        self, checkpoint: Checkpoint, report: PushReport, *, keep: bool
    ) -> Iterator[Snapshot]:
        """A copy of the checkpoint; with ``keep`` it is the cached tip once the block ends well.

        Raises Malformed if it is not the state that the report names.
        """
        with atomic_directory(self._cached) if keep else self._scratch() as directory:
            snapshot = take_snapshot(checkpoint, report.step, directory, self._progress)
            self._check_unchanged(checkpoint, report, snapshot.state)
            yield snapshot

    def _check_unchanged(
        self, checkpoint: Checkpoint, report: PushReport, state: str | None = None
    ) -> None:
        """Raise Malformed if somebody wrote to the source; ``state``: what a copy of it has."""
        differs = bool(report.state and state) and state != report.state
        written_to = self._seen is not None and fingerprint(checkpoint) != self._seen
        if differs or written_to:
            raise Malformed(
                "the checkpoint changed while it was pushed; nothing was published",
                file=checkpoint.path,
                step=report.step,
                hint="push it once it is written, from a place that nobody writes to",
            )

    def _put_delta(self, delta: Path, report: PushReport) -> PushReport:
        name = delta_name(report.step)
        other = partial(self._other, name, report.step, report.state)
        return replace(report, written=put_object(self._bucket, name, delta, other))

    def _scratch(self) -> AbstractContextManager[Path]:
        """A temporary directory on the cache's disk, which has room for a checkpoint."""
        return temporary_directory(self._cached)

    def _put_anchor(self, snapshot: Snapshot, report: PushReport) -> PushReport:
        other = partial(self._other, snapshot.name, report.step, snapshot.state)
        files, written = put_snapshot(self._bucket, snapshot, other, self._progress)
        return replace(
            report,
            kind="anchor",
            state=snapshot.state,
            bytes=report.bytes + sum(files.values()),
            files=report.files + tuple(files),
            written=written or (report.written and bool(report.files)),
        )

    def _other(self, name: str, step: int, state: str) -> Conflict | None:
        """What is wrong where somebody was faster; nothing if it was with the same content."""
        found = read_chain(self._bucket).state_at(step)
        if found == state:
            return None
        return Conflict(
            "the step was published by somebody else meanwhile",
            file=name,
            step=step,
            expected=f"state {state}",
            found=f"state {found}",
            hint=f"deltactl log {quote(self._chain.url)}",
        )


def _check_aux(checkpoint: Checkpoint) -> None:
    """Raise UsageError for a name that cannot travel, Unsupported for what was never fetched."""
    for name, path in checkpoint.aux.items():
        if not is_plain_path(name):
            what = "the file's name cannot travel with an anchor"
            raise UsageError(what, file=checkpoint.path, found=name)
        check_fetched(path)
