"""``deltactl pull``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import Bucket, Jobs, Json, LimitRate, Quiet, output
from deltactl.cli.interface.servers import warn_of_newer
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.pull import PullReport


@manual(
    keys={
        "step": "the step that DEST holds now",
        "state": "its state digest",
        "bytes_fetched": "how much was fetched this time",
        "bytes_resumed": "how much an earlier pull, that came to no end, had fetched and this one "
        "used",
        "links": "how many they were",
        "from_step": "the step that DEST held before and that was built on; null if none",
        "written": "false if DEST held the step already",
        "proven": "false if no link names a digest to prove the step by, as TRL's",
        "newer": "newer steps in the bucket that cannot be rebuilt",
        "dest": "DEST",
    },
    exits=[3, 4, 5, 10, 11],
    examples=["deltactl pull /mnt/chain model", "deltactl pull /mnt/chain old --step 10 --json"],
)
def pull(
    ctx: typer.Context,
    bucket: Bucket,
    dest: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="DEST",
            help="A directory: new, empty, or with a step of the chain.",
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="The step; by default the tip.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace the weights in DEST though a trainer keeps its state there."
        ),
    ] = False,
    jobs: Jobs = None,
    limit_rate: LimitRate = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rebuild a step of a chain in a directory, ready to serve.

    If DEST holds an earlier step of the chain only what is missing is fetched. The result, a
    Hugging Face directory, is compared with the chain's digest before it takes DEST's place in one
    step. What else is in DEST stays, but for files that an earlier pull put beside the weights and
    that the step has not. A DEST with weights that are no step of the chain, and that no pull put
    there, is refused; so is one in which, or in a directory of which, a trainer keeps its state,
    such as optimizer.pt, unless --force is given.

    A pull that is killed, interrupted or cut off goes on where it was when it is repeated: what it
    has fetched is kept beside DEST, in .DEST.deltactl-download, and checked again.
    """
    screen = output(ctx, json=json, quiet=quiet)
    from deltactl.bucket import open_bucket
    from deltactl.ops.pull import pull as rebuild

    with screen.progress() as progress:
        report = rebuild(
            open_bucket(bucket, jobs=jobs, limit_rate=limit_rate),
            dest,
            step=step,
            force=force,
            progress=progress,
        )
    warn_of_newer(screen, report.newer, bucket)
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
