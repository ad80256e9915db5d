"""``deltactl verify``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.exits import UNSOUND
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    Jobs,
    Json,
    LimitRate,
    Quiet,
    Servers,
    Timeout,
    complete_place,
    complete_step,
    delta_file,
    is_delta,
    output,
    place_and_step,
    step_named,
)
from deltactl.cli.interface.output import Output
from deltactl.cli.interface.servers import exit_of, row_of, say_interrupted, warn_of_newer
from deltactl.core.errors import DeltactlError, UsageError, listed
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.verify import VerifyReport
    from deltactl.server.audit import Audited

Level = Literal["links", "data", "rebuild"]
_SHOWN = 5  # names of tensors


@manual(
    keys={
        "ok": "whether no error was found; unproven links are listed separately",
        "level": "how thorough the check was",
        "links": "links checked",
        "steps": "steps checked",
        "errors": "errors found: step, file, tensor, what, expected, found; null if not known",
        "unproven": "what could not be checked because a digest is missing; same keys as errors",
        "replaced": "names of the links that keep almost nothing of the step before, as where "
        "another model begins; not an error",
        "bytes_read": "bytes read",
        "requests": "requests made to the bucket; the listing counts as one, and files read in"
        " place count as none",
        "newer": "with --server: newer steps in the bucket that cannot be rebuilt, if no step is "
        "named",
        "replicas": "with --server, where ok and newer are the only other keys, for each "
        "server: url, ok (whether no error was found; tensors that were not "
        "checked are listed separately), step and state (null if not known), "
        "paused (null if not known), tensors (how many there are), checked (how "
        "many were compared), differing and unaudited (names), notes, error (what,"
        " file, tensor, step, expected, found, hint, exit_code; null if there is "
        "none)",
    },
    exits=[3, 4, 5, 10, 11],
    exit_3="an error was found, or something is unproven and --accept-unproven was not given",
    examples=[
        "deltactl verify /mnt/chain",
        "deltactl verify /mnt/chain --level rebuild --json",
        "deltactl verify /mnt/chain --against step_11 --step 11",
        "deltactl verify /mnt/chain@11 --server http://a:8000",
    ],
)
def verify(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="BUCKET|DELTA",
            help="A chain's bucket, or a delta file (- is stdin). With --server or --against "
            "also BUCKET@STEP.",
            autocompletion=complete_place,
        ),
    ],
    level: Annotated[
        Level,
        typer.Option(
            "--level",
            metavar="|".join(get_args(Level)),
            help="links: check headers, and that each link starts from the state the one "
            "before leads to; data: also check every byte against its digest, and "
            "decode it; rebuild: also replay the chain from each anchor.",
        ),
    ] = "data",
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            readable=False,
            metavar="CKPT",
            help="Compare the tip, or --step, with this checkpoint.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            parser=step_named,
            show_default=False,
            autocompletion=complete_step,
            help="The step for --against, or the step that servers must be on.",
        ),
    ] = None,
    accept_unproven: Annotated[
        bool,
        typer.Option(
            "--accept-unproven", help="Accept links without digests, such as those written by TRL."
        ),
    ] = False,
    servers: Servers = None,
    timeout: Timeout = 120.0,
    jobs: Jobs = None,
    limit_rate: LimitRate = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a chain, a delta, or the weights that servers hold.

    Goes on after the first error and reports all of them. A bucket without links fails.

    With --server only the chain's headers are read. Each server adds up its live weights while it
    serves, and the sums are compared with the chain's for the step it is on.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if servers:
        if against is not None or limit_rate is not None or is_delta(target):
            raise UsageError("--server takes a bucket, no --against and no --limit-rate")
        return _audit(screen, target, step, servers, timeout, jobs, accept_unproven)
    if is_delta(target) and (against is not None or step is not None):
        raise UsageError("--against and --step are for chains", file=target)
    with screen.progress() as progress:
        if is_delta(target):
            from deltactl.ops.verify import verify_delta

            with delta_file(Path(target)) as file:
                report = verify_delta(file, level=level, progress=progress)
        else:
            from deltactl.bucket import open_bucket
            from deltactl.ops.verify import verify_bucket

            place, step = place_and_step(target, step)
            report = verify_bucket(
                open_bucket(place, jobs=jobs, limit_rate=limit_rate),
                level=level,
                step=step,
                against=against,
                progress=progress,
            )
    own = ("ok", "level", "links", "steps", "errors", "unproven", "replaced")
    document = facts_of(report, *own, "bytes_read", "requests")
    screen.result(document, lambda: _lines(report))
    for fault in report.errors:
        screen.fault(_as_error(fault))
    for doubt in report.unproven:
        screen.warn(f"unproven: {_as_error(doubt)}")
    for name in report.replaced:
        screen.warn(
            f"{name} keeps almost nothing of the step before: another model may begin there"
        )
    if not report.ok or (report.unproven and not accept_unproven):
        raise typer.Exit(UNSOUND)


def _audit(
    screen: Output,
    target: str,
    step: int | None,
    servers: Sequence[str],
    timeout: float,
    jobs: int | None,
    accept_unproven: bool,
) -> None:
    from deltactl.bucket import open_bucket
    from deltactl.server.audit import audit_servers

    name, step = place_and_step(target, step)
    done = audit_servers(
        open_bucket(name, jobs=jobs),
        step,
        servers,
        timeout=timeout,
        on_interrupt=say_interrupted(screen),
    )
    found = done.replicas
    rows = [row_of(audited.facts(), audited.error) for audited in found]
    document = {"ok": all(row["ok"] for row in rows), "newer": done.newer, "replicas": rows}
    warn_of_newer(screen, done.newer, name)
    screen.result(document, lambda: _audits(found))
    for audited in found:
        if audited.error is not None:
            screen.fault(audited.error, hint=True)
        if audited.unaudited:
            screen.warn(f"unproven: {audited.url}: {_unaudited(audited)}")
    code = exit_of([audited.error for audited in found], done.interrupted)
    unproven = any(audited.unaudited for audited in found) and not accept_unproven
    if code or unproven:
        raise typer.Exit(code or UNSOUND)


def _audits(found: Sequence[Audited]) -> Iterable[str]:
    for audited in found:
        step = "unknown weights" if audited.step is None else f"step {audited.step}"
        compared = f"OK, {text.plural(audited.checked, 'tensor')} compared"
        if audited.unaudited:
            some = f"{audited.checked} of {text.plural(audited.tensors, 'tensor')}"
            compared = f"OK, {some} compared, {len(audited.unaudited)} not checked"
        parts = [f"{step}: {compared if audited.error is None else 'failed'}"]
        parts += ["paused"] if audited.paused else []
        yield f"{audited.url}  {'; '.join([*parts, *audited.notes])}"


def _unaudited(audited: Audited) -> str:
    """Which tensors could not be looked at, and why; all of them in ``--json``."""
    names = [f"{n!r} ({why})" if why else repr(n) for n, why in audited.unaudited.items()]
    count = f"{len(audited.unaudited)} of {text.plural(audited.tensors, 'tensor')}"
    return f"{count} could not be checked: {listed(names, _SHOWN)}"


def _as_error(facts: dict[str, Any]) -> DeltactlError:
    return DeltactlError(**facts)


def _lines(report: VerifyReport) -> Iterable[str]:
    checked = f"{text.plural(report.links, 'link')}, {text.plural(report.steps, 'step')}"
    read = f"{text.size(report.bytes_read)} read"
    if report.level == "links" and report.requests:
        read += f" in {text.plural(report.requests, 'request')}"
    unproven = f", {len(report.unproven)} unproven" if report.unproven else ""
    if not report.ok:
        verdict = f"FAILED: {text.plural(len(report.errors), 'error')} in {checked}{unproven}"
    elif report.unproven:
        verdict = f"no errors in {checked}{unproven}"
    else:
        verdict = f"OK: {checked} verified"
    yield f"{verdict} (level {report.level}, {read})"
