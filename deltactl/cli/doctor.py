"""``deltactl doctor``."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from deltactl.cli import exits
from deltactl.cli.manual import manual
from deltactl.cli.options import Json, Quiet, Servers, Timeout, output
from deltactl.core.errors import UsageError

if TYPE_CHECKING:
    from deltactl.server.doctor import Finding


@manual(
    keys={
        "ok": "whether nothing stands between any of the servers and an update",
        "servers": "of each: url, ok, findings",
        "servers[].findings": "level (ok, warn, error), check (one word), what, hint (what to do; "
        "null if nothing)",
    },
    exits=[],
    exit_1="something stands between a server and an update",
    examples=[
        "deltactl doctor --server http://127.0.0.1:8000",
        "deltactl doctor --server http://a:8000 --server http://b:8000 --json",
    ],
)
def doctor(
    ctx: typer.Context,
    servers: Servers = None,
    timeout: Timeout = 30.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what stands between a running vLLM server and apply, and what to do about it.

    Looks, and changes nothing. Warns of what is exposed: vLLM's --api-key does not guard the routes
    by which a server is paused and its weights are changed. A server with data parallelism takes no
    updates: each of its replicas has to be a server of its own.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if not servers:
        raise UsageError("no server is named", expected="--server URL")
    from deltactl.server.doctor import examine
    from deltactl.server.fleet import side_by_side, urls_of

    urls = urls_of(servers)
    found, interrupted = side_by_side(
        lambda url: examine(url, timeout), urls, threading.Event(), lambda: None
    )
    by_url = dict(zip(urls, found, strict=True))
    rows = [_row(url, findings) for url, findings in by_url.items()]
    document = {"ok": all(row["ok"] for row in rows), "servers": rows}
    screen.result(document, lambda: _lines(by_url))
    if interrupted:
        raise typer.Exit(exits.INTERRUPTED)
    if not document["ok"]:
        raise typer.Exit(exits.FAILED)


def _row(url: str, findings: list[Finding]) -> dict[str, Any]:
    ok = not any(finding.level == "error" for finding in findings)
    return {"url": url, "ok": ok, "findings": [finding.facts() for finding in findings]}


def _lines(by_url: dict[str, list[Finding]]) -> Iterable[str]:
    for url, findings in by_url.items():
        yield url
        for finding in findings:
            yield f"  {finding.level:<5}  {finding.what}"
            if finding.hint:
                yield f"         {finding.hint}"
