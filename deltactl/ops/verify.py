"""Proof that a chain is whole, at three levels; every fault found, none passed over.

``links``: what the headers alone prove. ``data``: every byte of every payload against its digest,
and what a payload shows of its rows. ``rebuild``: every state replayed from its anchor, every
tensor against its digest, and every row against what changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from deltactl.chain.chain import Chain, Link
from deltactl.chain.check.links import doubts, link_faults, no_digests
from deltactl.chain.check.payload import data_faults, payload_faults
from deltactl.chain.reading import read_chain
from deltactl.chain.replaced import delta_replaces_all, replaces_all
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.fetching import Fetched, batches, fetched
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import (
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    UsageError,
)
from deltactl.core.progress import Meter, Progress, silent
from deltactl.format.delta import open_delta
from deltactl.format.tensor_table import Table
from deltactl.replay.check import replay_faults
from deltactl.replay.compare import first_differences

LEVELS = ("links", "data", "rebuild")

Row = dict[str, Any]
"""One fault: step, file, tensor, what, expected, found."""


@dataclass(slots=True)
class VerifyReport:
    """What was found. ``links`` counts the links looked at, broken ones too; ``unproven``: what
    nothing is known against, for want of a digest; ``bytes_read``: of headers, and of payloads from
    ``data`` on; ``requests``: to the bucket, its listing counted as one; ``replaced``: names of the
    links that keep next to nothing of the step before, which is no fault."""

    level: str
    links: int = 0
    steps: int = 0
    bytes_read: int = 0
    requests: int = 0
    errors: list[Row] = field(default_factory=list)
    unproven: list[Row] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No fault, and something was looked at."""
        return self.links > 0 and not self.errors


def check_level(level: str) -> None:
    """Raise UsageError for a level that is none."""
    if level not in LEVELS:
        raise UsageError("unknown level", expected=f"one of {', '.join(LEVELS)}", found=level)


def verify_delta(path: Path, *, level: str = "data", progress: Progress = silent) -> VerifyReport:
    """Verify a delta file by itself: its header, and from ``data`` on its payload.

    Raises NotFound, and UsageError for ``rebuild``, which needs what the delta stands on.
    """
    check_level(level)
    if level == "rebuild":
        raise UsageError(
            "a delta alone cannot be rebuilt",
            file=path,
            hint=f"deltactl apply {quote(str(path))} BASE -o OUT checks base and result",
        )
    report = VerifyReport(level, links=1, steps=1)
    try:
        delta = open_delta(path)
        report.bytes_read = delta.header.header_bytes
        report.replaced = [str(path)] if delta_replaces_all(delta.header) else []
        if delta.header.dialect != "deltactl":
            report.unproven.append(no_digests(str(path), delta.header.step).facts())
        if level == "data":
            report.bytes_read = delta.header.nbytes
            progress("verifying", 0, delta.header.nbytes)
            report.errors += [fault.facts() for fault in data_faults(delta)]
            progress("verifying", delta.header.nbytes, delta.header.nbytes)
    except NotFound:
        raise
    except DeltactlError as error:
        report.errors.append(error.facts())
    return report


def verify_bucket(
    bucket: Bucket,
    *,
    level: str = "data",
    step: int | None = None,
    against: Path | None = None,
    progress: Progress = silent,
) -> VerifyReport:
    """Verify all links of a chain; with ``against``, also that a step (the tip by default) has the
    bits of a checkpoint. Raises NotFound for no such bucket, and for one without a chain,
    UsageError, and what the bucket raises.
    """
    check_level(level)
    if step is not None and against is None:
        raise UsageError(
            "a step is for --against", hint="add --against CKPT, or leave out the step"
        )
    chain = read_chain(bucket)
    if not chain.links and not chain.problems:
        what = "there is nothing to verify: the bucket holds no chain"
        raise NotFound(what, file=chain.url, hint=f"deltactl push CKPT {quote(chain.url)}")
    report = VerifyReport(level, links=len(chain.links) + len(chain.problems))
    report.steps = len(chain.steps)
    report.replaced = [link.name for link in chain.links if replaces_all(chain, link)]
    report.bytes_read, report.requests = chain.bytes_read, chain.requests
    tables: dict[int, Table] = {}
    broken = _verify_links(chain, tables, report)
    if level != "links":
        _verify_payloads(bucket, chain, tables, broken, report, progress)
    if against is not None:
        _verify_against(bucket, chain, step, against, report, progress)
    report.errors.sort(key=lambda row: (row["step"] is None, row["step"] or 0))
    return report


def _scratch() -> Path:
    """Beside what to fetch the links that cannot be mapped where they are."""
    return Path(tempfile.gettempdir(), "verify")


# Level links.


def _verify_links(chain: Chain, tables: dict[int, Table], report: VerifyReport) -> set[str]:
    """Check what the headers say of one another; returns the names of faulty links.

    Fills ``tables``: the tensors of each step, as far as they are known.
    """
    faults = list(chain.problems)
    broken = set()
    for link in chain.links:
        found = link_faults(chain, link, tables)
        for fault in found:
            fault.step = link.step
        faults += found
        broken |= {link.name} if found else set()
        report.unproven += [doubt.facts() for doubt in doubts(chain, link)]
    report.errors += [fault.facts() for fault in faults]
    return broken


# Levels data and rebuild.


def _verify_payloads(
    bucket: Bucket,
    chain: Chain,
    tables: Mapping[int, Table],
    broken: set[str],
    report: VerifyReport,
    progress: Progress,
) -> None:
    """Read every byte of every link; for ``rebuild`` also replay each run of links.

    What cannot be mapped is fetched once, at most a run, or a batch of links, at a time.
    """
    rebuild = report.level == "rebuild"
    meter = Meter(progress, "verifying", sum(link.bytes for link in chain.links))
    for group in _runs(chain) if rebuild else batches(chain.links, bucket):
        with fetched(bucket, group, _scratch(), meter, gather=True) as found:
            broken |= _verify_data(chain, group, found, tables, report, meter)
            if rebuild and group[0].kind == "anchor":
                _verify_rebuild(group, found, broken, report, progress)
        _count(report, found)
    total = sum(link.bytes for link in chain.links)
    progress("verifying", total, total)


def _count(report: VerifyReport, found: Fetched) -> None:
    report.bytes_read += found.in_place + found.tally.bytes_fetched
    report.requests += found.tally.requests


def _verify_data(
    chain: Chain,
    group: Sequence[Link],
    found: Fetched,
    tables: Mapping[int, Table],
    report: VerifyReport,
    meter: Meter,
) -> set[str]:
    """Returns the names of faulty links."""
    broken = set()
    for link in group:
        faults = payload_faults(chain, link, found, tables)
        report.errors += [fault.facts() for fault in faults]
        broken |= {link.name} if faults else set()
        if link.name in found.mapped:
            meter.add(link.bytes)
    return broken


def _verify_rebuild(
    run: Sequence[Link],
    found: Fetched,
    broken: set[str],
    report: VerifyReport,
    progress: Progress,
) -> None:
    """Replay the deltas from an anchor up to the next, and compare every tensor's digest."""
    sound = _sound_part(run, broken)
    for link in run[len(sound) :]:
        if link.name not in broken:
            what = "the step cannot be rebuilt: it stands on a link that is faulty"
            report.errors.append(Malformed(what, file=link.name, step=link.step).facts())
    if len(sound) < 2:
        return
    try:
        deltas = [open_delta(found.places[link.name]) for link in sound[1:]]
        with open_checkpoint(found.places[sound[0].name]) as base:
            faults = replay_faults(base, deltas, progress)
    except DeltactlError as error:
        faults = [(None, error)]
    for number, fault in faults:
        link = sound[0] if number is None else sound[1 + number]
        fault.step, fault.file = link.step, link.name
        report.errors.append(fault.facts())


def _runs(chain: Chain) -> list[list[Link]]:
    """Each anchor with the deltas that stand on it, up to and with the next anchor's own delta.

    Deltas before any anchor, a fault of level links, are a run without one.
    """
    runs: list[list[Link]] = []
    for link in chain.links:
        if link.kind == "anchor" or not runs:
            runs.append([link])
        else:
            runs[-1].append(link)
    return runs


def _sound_part(run: Sequence[Link], broken: set[str]) -> list[Link]:
    sound: list[Link] = []
    for link in run:
        if link.name in broken:
            break
        sound.append(link)
    return sound


def _verify_against(
    bucket: Bucket,
    chain: Chain,
    step: int | None,
    against: Path,
    report: VerifyReport,
    progress: Progress,
) -> None:
    """Compare a step with a checkpoint bit for bit, without writing it anywhere."""
    wanted = step
    with open_checkpoint(against) as other:
        try:
            wanted = chain.wanted(chain.numbered(step))
            anchor, links = chain.path(wanted)
            path = [anchor, *links]
            meter = Meter(progress, "fetching", sum(link.bytes for link in path))
            with fetched(bucket, path, _scratch(), meter) as found:
                meter.add(found.in_place)
                _count(report, found)
                deltas = [open_delta(found.places[link.name]) for link in links]
                with open_checkpoint(found.places[anchor.name]) as base:
                    faults = first_differences(base, deltas, other, progress)
        except (NotFound, NotAllowed, Transient):
            raise
        except DeltactlError as error:
            faults = [error]
    for fault in faults:
        fault.step = fault.step if wanted is None else wanted  # None: there is no tip to compare
        fault.file = fault.file or str(against)
        report.errors.append(fault.facts())
