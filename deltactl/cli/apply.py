"""``deltactl apply``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli import text
from deltactl.cli.manual import manual
from deltactl.cli.options import STDIO, Json, Quiet, delta_file, output
from deltactl.core.errors import UsageError

if TYPE_CHECKING:
    from deltactl.core.apply import ApplyReport


@manual(
    keys={
        "step": "the delta's step; null if it names none",
        "state": "state digest of the result",
        "changed_elements": "elements that the delta changes",
        "written": "false if the result was there already",
        "proven": "false if the delta names no digest to prove the result by, as TRL's",
        "out": "where the result is",
    },
    exits=[3, 4, 10, 11],
    examples=[
        "deltactl apply step_11.delta step_10 -o step_11",
        "deltactl apply step_11.delta model --in-place",
    ],
)
def apply(
    ctx: typer.Context,
    delta: Annotated[
        Path, typer.Argument(readable=False, metavar="DELTA", help="A delta file; - is stdin.")
    ],
    base: Annotated[
        Path, typer.Argument(readable=False, metavar="BASE", help="The checkpoint it stands on.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", readable=False, metavar="OUT", help="Where to write the result."
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Let the result take the place of BASE, in one step."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Apply a delta to the checkpoint that it stands on.

    Another base is refused before anything is written, and the result is compared with the digest
    that the delta names before it is visible. The result keeps the form and the shards of BASE.
    Applying a delta twice does nothing the second time, and says so.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if (out is not None) == in_place:
        raise UsageError("give either -o OUT or --in-place")
    if out == STDIO:
        raise UsageError("a checkpoint cannot be written to stdout")
    from deltactl.core.apply import apply_delta

    with delta_file(delta) as file, screen.progress() as progress:
        report = apply_delta(file, base, out, progress=progress)
    if not report.proven:
        screen.warn("the delta names no digest: nothing proves the result")
    document = {
        "step": report.step,
        "state": report.state,
        "changed_elements": report.changed_elements,
        "written": report.written,
        "proven": report.proven,
        "out": str(report.out),
    }
    screen.result(document, lambda: _lines(report))


def _lines(report: ApplyReport) -> Iterable[str]:
    step = "" if report.step is None else f", step {report.step}"
    if not report.written:
        yield f"{report.out} holds the delta's result already{step}: nothing to do"
    else:
        yield f"applied the delta{step}: {text.plural(report.changed_elements, 'element')} changed"
    yield from text.pairs([("state", report.state), ("output", report.out)])
