"""``deltactl stats``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from deltactl.cli.manual import manual
from deltactl.cli.options import Json, Quiet, output


@manual(keys={}, exits=[3, 4, 5, 10], examples=[])
def stats(
    ctx: typer.Context,
    targets: Annotated[list[str], typer.Argument(metavar="A B|DELTA|BUCKET", help="X.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how sparse training is."""
    output(ctx, json=json, quiet=quiet)


def _lines(stats: Any) -> Iterable[str]:
    return []
