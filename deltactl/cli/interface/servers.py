"""What commands with ``--server`` have in common, and ``apply`` to servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from deltactl.cli.interface import exits, text
from deltactl.cli.interface.options import bucket_and_step, is_delta
from deltactl.cli.interface.output import Output
from deltactl.core.errors import DeltactlError, UsageError

if TYPE_CHECKING:
    from deltactl.server.apply import Applied
    from deltactl.server.report import Replica
    from deltactl.server.update import Options

REPLICA_KEYS = (
    "with --server, of each server: url, ok, step_before, step_after and state (null if not "
    "known), how (deltas, full, reload; null if nothing was written), deltas (how many), "
    "seconds_staging, seconds_paused (null if not paused), elements (written), bytes_fetched, "
    "reloaded (tensors that went through vLLM's own loader), paused (whether it is left paused; "
    "null if not known), notes, error (what, file, tensor, step, expected, found, hint, "
    "exit_code; null if it serves the step)"
)


def exit_of(errors: Sequence[DeltactlError | None], interrupted: bool) -> int:
    """The exit status of work on many servers: theirs where they agree, else 1."""
    if interrupted:
        return exits.INTERRUPTED
    codes = {exits.code_of(error) for error in errors if error is not None}
    return codes.pop() if len(codes) == 1 else exits.FAILED if codes else exits.OK


def row_of(facts: dict[str, Any], error: DeltactlError | None) -> dict[str, Any]:
    """One server's row, with the exit status that its error has."""
    if error is not None:
        facts["error"]["exit_code"] = exits.code_of(error)
    return facts


def warn_of_newer(screen: Output, newer: Sequence[int], bucket: str) -> None:
    """Say that a chain has steps above those that can be had."""
    if newer:
        steps = ", ".join(map(str, newer))
        screen.warn(f"newer steps cannot be rebuilt: {steps}; see deltactl verify {quote(bucket)}")


def say_interrupted(screen: Output) -> Any:
    """Called at the first Ctrl-C, while the servers are brought to rest."""
    return lambda: screen.warn(
        "interrupted: bringing the servers to rest; again to leave at once, perhaps with some "
        "of them paused"
    )


def apply_to(
    screen: Output,
    target: str,
    servers: Sequence[str],
    options: Options,
    reload_dir: Path | None,
    jobs: int | None,
) -> None:
    """Have servers load what ``target`` names, and end with the exit status for it."""
    with screen.progress() as progress:
        hooks: dict[str, Any] = {"progress": progress, "on_interrupt": say_interrupted(screen)}
        done = _applied(target, servers, options, reload_dir, jobs, hooks)
    rows = [row_of(replica.facts(), replica.error) for replica in done.replicas]
    document = {
        "step": done.step,
        "state": done.state,
        "newer": done.newer,
        "dry_run": options.dry_run,
        "replicas": rows,
    }
    warn_of_newer(screen, done.newer, target)
    screen.result(document, lambda: _lines(done, options.dry_run))
    for replica in done.replicas:
        if replica.error is not None:
            screen.fault(replica.error, hint=True)
    code = exit_of([replica.error for replica in done.replicas], done.interrupted)
    if code:
        raise typer.Exit(code)


def _applied(
    target: str,
    servers: Sequence[str],
    options: Options,
    reload_dir: Path | None,
    jobs: int | None,
    hooks: dict[str, Any],
) -> Applied:
    from deltactl.bucket import open_bucket
    from deltactl.server.apply import apply_delta_to_servers, apply_to_servers
    from deltactl.server.reload import reload_servers

    if is_delta(target):
        if reload_dir is not None:
            raise UsageError("--via reload takes a step of a chain, not a delta", file=target)
        if target == "-":
            raise UsageError("servers cannot read a delta from stdin", expected="a file")
        return apply_delta_to_servers(Path(target), servers, options, **hooks)
    name, step = bucket_and_step(target) or (target, None)
    bucket = open_bucket(name, jobs=jobs)
    if reload_dir is not None:
        return reload_servers(bucket, step, servers, reload_dir, options, **hooks)
    return apply_to_servers(bucket, step, servers, options, **hooks)


def _lines(done: Applied, dry_run: bool) -> Iterable[str]:
    for replica in done.replicas:
        yield f"{replica.url}  {'; '.join([_what(replica, done.step, dry_run), *replica.notes])}"


def _what(replica: Replica, step: int, dry_run: bool) -> str:
    if replica.error is not None:
        known = "" if replica.step_after is None else f", on step {replica.step_after}"
        paused = {True: ", paused", False: ", serving", None: ""}[replica.paused]
        return f"failed{known}{paused}"
    before = "unknown weights" if replica.step_before is None else f"step {replica.step_before}"
    if replica.how is None:
        return f"on step {step} already: nothing to do"
    by = {"deltas": text.plural(replica.deltas, "delta"), "full": "every tensor"}
    way = by.get(replica.how, "a reload")
    if dry_run:
        size = text.size(replica.bytes_fetched)
        return f"{before} to {step}: would load {way}, {size} to fetch at most"
    parts = [f"{before} to {step}: {way}", f"{text.count(replica.elements)} elements"]
    if replica.how == "reload":
        parts = parts[:1]
    else:
        parts.append(f"staged in {text.seconds(replica.seconds_staging)}")
    if replica.seconds_paused is not None:
        parts.append(f"paused {text.seconds(replica.seconds_paused)}")
    if replica.reloaded:
        parts.append(f"{text.plural(len(replica.reloaded), 'tensor')} by vLLM's own loader")
    return ", ".join(parts)
