"""``deltactl stats``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli import text
from deltactl.cli.manual import manual
from deltactl.cli.options import Json, Quiet, delta_file, is_delta, output
from deltactl.core.errors import UsageError

if TYPE_CHECKING:
    from deltactl.core.stats import Stats

_BANDWIDTHS = (12.5, 125.0, 1250.0)  # MB/s: 100 Mbit/s, 1 and 10 Gbit/s


@manual(
    keys={
        "changed_elements": "elements whose bits changed",
        "total_elements": "elements of the checkpoint",
        "sparsity": "share of elements that kept their bits",
        "ship": "for each bandwidth: bandwidth (bytes a second), delta_seconds, checkpoint_seconds",
    },
    exits=[3, 4, 5, 10],
    examples=[
        "deltactl stats step_10 step_11",
        "deltactl stats step_11.delta --json",
        "deltactl stats /mnt/chain --bandwidth 50 --bandwidth 400",
    ],
)
def stats(
    ctx: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="A B|DELTA|BUCKET",
            help="Two checkpoints, a delta file (- is stdin), or a chain's bucket.",
        ),
    ],
    bandwidth: Annotated[
        list[float] | None,
        typer.Option(
            "--bandwidth",
            metavar="MBPS",
            min=0.001,
            help="Megabytes a second to give shipping times for; may be repeated. By default 12.5, "
            "125 and 1250.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how sparse training is: where weights change, by how much, and what that costs to ship.

    Two checkpoints tell most; a delta, or a bucket's deltas, tell what their headers and payloads
    hold.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if len(targets) > 2:
        raise UsageError("too many targets", expected="A B, DELTA or BUCKET", found=len(targets))
    document = _measure(targets).as_dict()
    screen.result(document, lambda: _lines(document))


def _measure(targets: Sequence[str]) -> Stats:
    if len(targets) == 2:
        from deltactl.core.checkpoint import open_checkpoint
        from deltactl.core.stats import stats_pair

        with open_checkpoint(Path(targets[0])) as a, open_checkpoint(Path(targets[1])) as b:
            return stats_pair(a, b)
    (target,) = targets
    if is_delta(target):
        from deltactl.core.delta import open_delta
        from deltactl.core.stats import stats_delta

        with delta_file(Path(target)) as file:
            return stats_delta(open_delta(file))
    from deltactl.bucket import open_bucket
    from deltactl.core.stats import stats_bucket

    return stats_bucket(open_bucket(target))


def _lines(document: Mapping[str, Any]) -> Iterable[str]:
    return text.pairs((key.replace("_", " "), value) for key, value in document.items())
