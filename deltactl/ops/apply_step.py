"""A step's delta, from its chain, onto a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.chain.transfer.fetching import fetched
from deltactl.core.errors import Conflict, DeltactlError, NotFound
from deltactl.core.progress import Meter, Progress, silent
from deltactl.ops.apply import ApplyReport, apply_delta


def apply_step(
    bucket: Bucket,
    step: int | None,
    base: Path,
    out: Path | None,
    *,
    progress: Progress = silent,
) -> tuple[ApplyReport, tuple[int, ...]]:
    """``apply_delta`` for the delta of a step, by default the tip's; it is fetched if need be. Also
    the steps above that are in the bucket and cannot be rebuilt, where no step was asked for.

    Raises as that, what reading the chain raises, and NotFound for a step without a delta.
    """
    chain = read_chain(bucket)
    wanted = chain.wanted(chain.numbered(step))
    chain.need(wanted)
    link = chain.deltas.get(wanted)
    if link is None:
        raise NotFound(
            "the step has an anchor and no delta",
            file=chain.url,
            step=wanted,
            hint=f"deltactl pull {quote(f'{chain.url}@{wanted}')} DEST",
        )
    meter = Meter(progress, "fetching", link.bytes)
    with fetched(bucket, [link], (out or base).resolve(), meter) as found:
        meter.add(found.in_place)
        place = found.places[link.name]
        try:
            report = apply_delta(place, base, out, progress=progress)
            return report, () if step is not None else chain.newer(wanted)
        except DeltactlError as error:
            if error.file is not None and Path(error.file).is_relative_to(place):
                error.file = link.name  # what was fetched is gone by then
            if isinstance(error, Conflict) and error.file == link.name:
                error.hint = f"deltactl pull {quote(f'{chain.url}@{wanted}')} DEST"
            raise
