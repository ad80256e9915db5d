"""``deltactl doctor``."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli.interface import exits
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    Jobs,
    Json,
    Quiet,
    Servers,
    Timeout,
    bucket_and_step,
    is_delta,
    output,
)
from deltactl.cli.interface.servers import warn_of_newer
from deltactl.core.errors import UsageError
from deltactl.core.facts import as_json

if TYPE_CHECKING:
    from deltactl.server.doctor import Finding
    from deltactl.server.goal import Goal


@manual(
    keys={
        "ok": "whether nothing stands between any of the servers and an update",
        "step": "the step that was asked about; null if none",
        "newer": "newer steps in the bucket that cannot be rebuilt, if no step is named",
        "servers": "of each: url, ok, findings",
        "servers[].findings": "level (ok, warn, error), check (one word), what, hint (what to do; "
        "null if nothing)",
    },
    exits=[3, 4, 5, 10],
    exit_1="something stands between a server and an update",
    examples=[
        "deltactl doctor --server http://127.0.0.1:8000",
        "deltactl doctor /mnt/chain@11 --server http://127.0.0.1:8000",
        "deltactl doctor --server http://a:8000 --server http://b:8000 --json",
    ],
)
def doctor(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[BUCKET@STEP]",
            help="A step of a chain, or its bucket for the tip: whether the servers can load it.",
            show_default=False,
        ),
    ] = None,
    servers: Servers = None,
    timeout: Timeout = 30.0,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check whether a vLLM server can receive updates, and say what to fix.

    Nothing that is served changes. With BUCKET@STEP it reports what apply -n would: the names,
    shapes and dtypes of the step's tensors are compared with the server's, and layers that only
    vLLM's own loader can load are listed. For that the server finds out which step it serves.

    Warns about what is exposed: vLLM's --api-key does not protect the routes that pause a server
    and change its weights. A server with data parallelism takes no updates: run each replica as a
    server of its own.
    """
    screen = output(ctx, json=json, quiet=quiet)
    from deltactl.server.doctor import examine
    from deltactl.server.fleet import Met, side_by_side, urls_of

    urls, met = urls_of(servers or ()), Met()
    goal = None if target is None else _goal(target, jobs)
    found, interrupted = side_by_side(
        lambda url: examine(url, timeout, goal, met), urls, threading.Event(), lambda: None
    )
    by_url = dict(zip(urls, found, strict=True))
    rows = [_row(url, findings) for url, findings in by_url.items()]
    document = {
        "ok": all(row["ok"] for row in rows),
        "step": None if goal is None else goal.step,
        "newer": () if goal is None else goal.newer,
        "servers": rows,
    }
    if goal is not None:
        warn_of_newer(screen, goal.newer, goal.bucket)
    screen.result(document, lambda: _lines(by_url))
    if interrupted:
        raise typer.Exit(exits.INTERRUPTED)
    if not document["ok"]:
        raise typer.Exit(exits.FAILED)


def _goal(target: str, jobs: int | None) -> Goal:
    from deltactl.bucket import open_bucket
    from deltactl.chain.reading import read_chain
    from deltactl.server.goal import ChainGoal

    if is_delta(target):
        raise UsageError("this is a delta", file=target, expected="BUCKET or BUCKET@STEP")
    name, step = bucket_and_step(target) or (target, None)
    return ChainGoal(read_chain(open_bucket(name, jobs=jobs)), step)


def _row(url: str, findings: list[Finding]) -> dict[str, Any]:
    ok = not any(finding.level == "error" for finding in findings)
    return {"url": url, "ok": ok, "findings": as_json(findings)}


def _lines(by_url: dict[str, list[Finding]]) -> Iterable[str]:
    for url, findings in by_url.items():
        yield url
        for finding in findings:
            yield f"  {finding.level:<5}  {finding.what}"
            if finding.hint:
                yield f"         {finding.hint}"
