"""``--verbose`` and ``--log-file``, which every command has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deltactl.cli.interface.output import Output

_Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Say what is done; -vv: also each request, and to whom.",
        show_default=False,
    ),
]
_LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        metavar="FILE",
        help="Append all that -vv says to this file, with the time.",
        show_default=False,
    ),
]


def logged(command: Callable[..., None]) -> Callable[..., None]:
    """The command with both options, which it does not see."""
    signature = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    both = [
        inspect.Parameter("verbose", kind, default=0, annotation=_Verbose),
        inspect.Parameter("log_file", kind, default=None, annotation=_LogFile),
    ]

    @functools.wraps(command)
    def run(ctx: typer.Context, *, verbose: int, log_file: Path | None, **options: Any) -> None:
        out = ctx.find_root().obj
        assert isinstance(out, Output)
        out.log(verbose, log_file)
        command(ctx, **options)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *both]
    )
    return run
