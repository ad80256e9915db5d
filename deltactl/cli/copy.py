"""``deltactl copy``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    WHERE,
    DryRun,
    Jobs,
    Json,
    LimitRate,
    Quiet,
    output,
    whole_chain,
)
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.copy import CopyReport


@manual(
    keys={
        "links": "links of SRC to copy",
        "copied": "links copied",
        "skipped": "links that DEST had already, with the same content",
        "bytes": "bytes copied",
        "first_step": "the first one's step",
        "last_step": "the last one's step",
        "tip": "the newest step that can be rebuilt from DEST",
        "proven": "false if there are links without digests, such as TRL's",
        "dry_run": "whether this was a dry run",
    },
    exits=[3, 4, 5, 10, 11],
    exit_3="a link of SRC is damaged; those before it have been copied",
    exit_11="DEST holds another chain, or a different continuation",
    examples=[
        "deltactl copy /mnt/chain s3://models/chain",
        "deltactl copy s3://models/chain /mnt/chain --from-step 100 --limit-rate 50M",
    ],
)
def copy(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SRC", help=f"The chain's bucket: {WHERE}.")],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="A bucket: new, or with part of the chain.")
    ],
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step",
            metavar="N",
            min=0,
            help="Start at the newest anchor at or below this step; by default at the first link.",
        ),
    ] = None,
    jobs: Jobs = None,
    limit_rate: LimitRate = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a chain from one bucket to another, byte for byte.

    Links are copied oldest first, so DEST is a valid chain at every moment. Each link is checked
    against its digests before it is written; the copy stops at the first bad one. Links that DEST
    has already are skipped, so an interrupted copy can be repeated, and a copy repeated now and
    then follows the chain.
    """
    screen = output(ctx, json=json, quiet=quiet)
    from deltactl.bucket import open_bucket
    from deltactl.ops.copy import copy_chain

    with screen.progress() as progress:
        report = copy_chain(
            open_bucket(whole_chain(source, "copy"), jobs=jobs, limit_rate=limit_rate),
            open_bucket(whole_chain(dest, "copy"), jobs=jobs, limit_rate=limit_rate),
            from_step=from_step,
            dry_run=dry_run,
            progress=progress,
        )
    if not report.proven:
        screen.warn(
            "some links name no digest: they are copied as they are, and nothing proves them"
        )
    screen.result(facts_of(report), lambda: _lines(report, dest))


def _lines(report: CopyReport, dest: str) -> Iterable[str]:
    if not report.copied:
        yield f"{dest} holds all {text.plural(report.links, 'link')} already: nothing to do"
    else:
        verb = "would copy" if report.dry_run else "copied"
        had = f"; {text.count(report.skipped)} there already" if report.skipped else ""
        yield f"{verb} {text.plural(report.copied, 'link')}, {text.size(report.bytes)}{had}"
    tip = "none can be rebuilt" if report.tip is None else report.tip
    steps = f"{report.first_step} to {report.last_step}"
    yield from text.pairs([("steps", steps), ("tip", tip), ("output", dest)])
