"""``deltactl pull``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    BucketAtStep,
    Jobs,
    Json,
    LimitRate,
    Quiet,
    complete_step,
    output,
    place_and_step,
    step_named,
)
from deltactl.cli.interface.servers import warn_of_newer
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.pull import PullReport


@manual(
    keys={
        "step": "the step that DEST now holds",
        "state": "its state digest",
        "bytes_fetched": "bytes fetched this time",
        "bytes_resumed": "bytes that an earlier, interrupted pull had fetched and this one used",
        "links": "links used",
        "from_step": "the step that DEST held before, if it was built on; else null",
        "written": "false if DEST held the step already",
        "proven": "false if no link has a digest to check the step with, such as TRL's",
        "newer": "newer steps in the bucket that cannot be rebuilt",
        "dest": "DEST",
    },
    exits=[3, 4, 5, 10, 11],
    examples=["deltactl pull /mnt/chain model", "deltactl pull /mnt/chain@10 old --json"],
)
def pull(
    ctx: typer.Context,
    bucket: BucketAtStep,
    dest: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="DEST",
            help="A directory: new, empty, or with a step of the chain.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            parser=step_named,
            help="The step; by default the tip.",
            show_default=False,
            autocompletion=complete_step,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace the weights in DEST even if a trainer keeps its state there."
        ),
    ] = False,
    jobs: Jobs = None,
    limit_rate: LimitRate = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rebuild a step of a chain in a directory, ready to serve.

    If DEST holds an earlier step of the chain, only the missing links are fetched. The result, a
    Hugging Face directory, is checked against the chain's digest and then replaces DEST in one
    step. Other files in DEST are kept, except files that an earlier pull put beside the weights and
    that the step does not have. DEST is refused if it holds weights that are no step of the chain
    and that no pull put there, or if a trainer keeps its state there or one level below, such as
    optimizer.pt (use --force to replace the weights anyway).

    A pull that was interrupted continues where it stopped: run it again. What it fetched is kept
    beside DEST, in .DEST.deltactl-download, and checked again.
    """
    screen = output(ctx, json=json, quiet=quiet)
    from deltactl.bucket import open_bucket
    from deltactl.ops.pull import pull as rebuild

    place, step = place_and_step(bucket, step)
    with screen.progress() as progress:
        report = rebuild(
            open_bucket(place, jobs=jobs, limit_rate=limit_rate),
            dest,
            step=step,
            force=force,
            progress=progress,
        )
    warn_of_newer(screen, report.newer, place)
    if not report.proven:
        screen.warn("the links name no digest: nothing proves the result")
    screen.result(facts_of(report, dest=dest), lambda: _lines(report, dest))


def _lines(report: PullReport, dest: Path) -> Iterable[str]:
    if not report.written:
        yield f"{dest} holds step {report.step} already: nothing to do"
    else:
        since = "" if report.from_step is None else f" from step {report.from_step}"
        fetched = f"{text.plural(report.links, 'link')}, {text.size(report.bytes_fetched)}"
        if report.bytes_resumed:
            fetched += f", {text.size(report.bytes_resumed)} from an earlier pull"
        yield f"pulled step {report.step}{since}: {fetched}"
    yield from text.pairs([("state", report.state), ("output", dest)])
