"""What a push did, or would do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.format.link_names import anchor_directory, anchor_file_name, delta_name
from deltactl.ops.advice import Advice
from deltactl.ops.diff import DiffReport


@dataclass(frozen=True, slots=True)
class PushReport:
    """What ``push`` did, or with ``dry_run`` would do. ``kind``: the link that the step is known
    by; ``bytes``: of all objects that were written; ``files``: their names. An anchor's step has
    its delta too. ``written``: False where the step was there already with the same content.
    ``left_behind``: files beside the weights that differ from the newest anchor's, which a delta
    does not carry. ``encoding``: of the delta that was made, None where none was; ``advice``: what
    it was chosen by, where that was asked for. ``notes``: what changed of the model, or is odd
    about it, a sentence each.
    """

    step: int
    kind: str
    bytes: int
    state: str
    written: bool
    changed_elements: int | None
    total_elements: int
    dry_run: bool
    files: tuple[str, ...]
    left_behind: tuple[str, ...] = ()
    encoding: str | None = None
    advice: Advice | None = None
    notes: tuple[str, ...] = ()


def delta_report(found: DiffReport, step: int, dry_run: bool) -> PushReport:
    """The report of a delta that was made and is still to be put."""
    return PushReport(
        step=step,
        kind="delta",
        bytes=found.delta_bytes,
        state=found.result_state,
        written=True,
        changed_elements=found.changed_elements,
        total_elements=found.total_elements,
        dry_run=dry_run,
        files=(delta_name(step),),
        encoding=found.encoding,
    )


def with_size(report: PushReport, checkpoint: Checkpoint) -> PushReport:
    """A dry run's estimate of an anchor: the tensors' bytes and the other files'."""
    size = checkpoint.nbytes + sum(path.stat().st_size for path in checkpoint.aux.values())
    name = anchor_directory if checkpoint.is_directory else anchor_file_name
    files = (*report.files, name(report.step))
    return replace(report, kind="anchor", bytes=report.bytes + size, files=files)
