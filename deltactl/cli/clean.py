"""``deltactl clean``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.exits import code_of
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    WHERE,
    DryRun,
    Jobs,
    Json,
    Quiet,
    age,
    output,
    whole_chain,
)
from deltactl.core.errors import Unsupported, UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.clean import CleanReport, Item


_ITEM = ("kind", "name", "step", "bytes", "age", "action", "why")


@manual(
    keys={
        "place": "the bucket, the directory or the cache",
        "older_than": "the age, in seconds",
        "cleaned": "how many left-overs were removed, or would be",
        "bytes": "their size",
        "kept": "how many were left alone",
        "items": "of each: kind (unfinished anchor, unfinished delta, parts of no delta, parts of "
        "no anchor, upload, temporary, old content, download, claim, cache), name, step (null "
        "where it is of none), bytes, age (in seconds; null where the store does not say), action "
        "(remove, give back: the only copy of what had a name has it again, keep), why (it is "
        "kept; else null)",
        "errors": "what could not be looked at, or removed: step, file, tensor, what, expected, "
        "found",
        "dry_run": "whether this only says what would be done",
    },
    exits=[4, 5, 10, 11],
    exit_4="something may not be looked at, or removed",
    exit_11="somebody finished a link while its files were removed: it is not whole",
    examples=[
        "deltactl clean s3://models/chain --dry-run",
        "deltactl clean /mnt/chain --older-than 12h",
        "deltactl clean --cache --older-than 7d",
    ],
)
def clean(
    ctx: typer.Context,
    bucket: Annotated[
        str | None,
        typer.Argument(
            metavar="BUCKET|DIR",
            help=f"Where the chain lives, or where pulled checkpoints lie: {WHERE}.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache",
            help="Clean the cache of this machine instead: what nobody holds, and nobody used "
            "within the age.",
        ),
    ] = False,
    older_than: Annotated[
        int,
        typer.Option(
            "--older-than",
            metavar="AGE",
            parser=age,
            help="Leave alone what was touched within this time, as 30m, 12h or 7d. Choose it "
            "longer than the largest file takes to be sent.",
        ),
    ] = "1d",  # type: ignore[assignment]  # Typer has the parser read it
    jobs: Jobs = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove what commands and trainers that died left behind.

    Removes temporary files, also those of other hosts; unfinished anchors and deltas, and parts
    that no index names; unfinished uploads; and downloads that pull kept to continue with. Looks in
    the directory, below it, and beside it under its name.

    Never removes complete links, anything of the chain's newest step or later (somebody may be
    publishing), anything in use by a process on this machine or touched within the age, or files
    that deltactl does not make.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if cache is (bucket is not None):
        raise UsageError("what is to be cleaned?", expected="either BUCKET|DIR or --cache")
    if bucket is None:
        from deltactl.ops.clean_cache import clean_cache

        report = clean_cache(older_than=older_than, dry_run=dry_run)
    else:
        from deltactl.bucket import open_bucket
        from deltactl.ops.clean import clean_bucket

        opened = open_bucket(whole_chain(bucket, "clean"), jobs=jobs)
        report = clean_bucket(opened, older_than=older_than, dry_run=dry_run)
    document = facts_of(
        report,
        *("place", "older_than", "cleaned", "bytes", "kept", "items", "errors", "dry_run"),
        cleaned=len(report.cleaned),
        kept=len(report.kept),
        items=[facts_of(item, *_ITEM) for item in report.items],
        errors=[error.facts() for error in report.errors],
    )
    screen.result(document, lambda: _lines(report))
    for error in report.errors:
        if isinstance(error, Unsupported):
            screen.warn(f"not looked at: {error}")
        else:
            screen.fault(error, hint=True)
    codes = [code_of(error) for error in report.errors if not isinstance(error, Unsupported)]
    if codes:
        raise typer.Exit(max(codes))


def _lines(report: CleanReport) -> Iterable[str]:
    for item in report.items:
        facts = text.size(item.bytes)
        if item.age is not None:
            facts += f", {text.seconds(max(item.age, 0.0))} old"
        why = f": {item.why}" if item.why else ""
        yield f"{_verb(item, report.dry_run)} {item.kind} {item.name} ({facts}){why}"
    if not report.items:
        yield f"{report.place}: nothing is left behind"
        return
    done = "would clean" if report.dry_run else "cleaned"
    kept = f"; {text.count(len(report.kept))} kept" if report.kept else ""
    yield f"{done} {text.plural(len(report.cleaned), 'left-over')}, {text.size(report.bytes)}{kept}"


def _verb(item: Item, dry_run: bool) -> str:
    if item.action == "keep":
        return "keep" if dry_run else "kept"
    if item.action == "give back":
        return "would give back" if dry_run else "gave back"
    return "would remove" if dry_run else "removed"
