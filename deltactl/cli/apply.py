"""``deltactl apply``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    STDIO,
    DryRun,
    Jobs,
    Json,
    Quiet,
    Servers,
    Timeout,
    bucket_and_step,
    complete_place,
    delta_file,
    is_delta,
    output,
)
from deltactl.cli.interface.output import Output
from deltactl.cli.interface.servers import REPLICA_KEYS, apply_to, warn_of_newer
from deltactl.core.errors import UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.core.progress import Progress
    from deltactl.ops.apply import ApplyReport


Pause = Literal["keep", "wait", "abort"]
Via = Literal["engine", "reload"]
TIMEOUT = 120.0


@manual(
    keys={
        "step": "the delta's step, or null; with --server the step to load",
        "state": "state digest of the result",
        "changed_elements": "elements that the delta changes",
        "written": "false if the result existed already",
        "proven": "false if the delta has no digest to check the result with, such as TRL's",
        "out": "where the result is",
        "newer": "with --server: newer steps in the bucket that cannot be rebuilt",
        "dry_run": "with --server: whether this was a dry run",
        "replicas": REPLICA_KEYS,
    },
    exits=[3, 4, 5, 10, 11],
    exit_1="any other failure; with --server: servers failed in different ways",
    examples=[
        "deltactl apply step_11.delta step_10 -o step_11",
        "deltactl apply step_11.delta model --in-place",
        "deltactl apply /mnt/chain@11 step_10 -o step_11",
        "deltactl apply /mnt/chain@11 --server http://a:8000 --server http://b:8000",
        "deltactl apply /mnt/chain@11 --server http://a:8000 --via reload --reload-dir /mnt/served",
    ],
)
def apply(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="DELTA|BUCKET@STEP",
            help="A delta file (- is stdin), or a step of a chain: its number, latest, or -2 for "
            "the one before. With --server also a bucket, for its tip.",
            autocompletion=complete_place,
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Argument(
            readable=False, metavar="BASE", help="The checkpoint to apply it to; not with --server."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", readable=False, metavar="OUT", help="Where to write the result."
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Replace BASE with the result, in one step."),
    ] = False,
    servers: Servers = None,
    pause: Annotated[
        Pause,
        typer.Option(
            "--pause",
            metavar="|".join(get_args(Pause)),
            help="With --server: what happens to running requests. keep: they continue "
            "afterwards; wait: they finish first; abort: they are aborted.",
        ),
    ] = "keep",
    keep_cache: Annotated[
        bool,
        typer.Option(
            "--keep-cache",
            help="With --server: keep what the old weights computed in the caches. Answers "
            "then mix old and new weights.",
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --server: write every tensor, whatever the server holds.",
        ),
    ] = False,
    via: Annotated[
        Via,
        typer.Option(
            "--via",
            metavar="|".join(get_args(Via)),
            help="With --server: engine: use deltactl's plugin in vLLM; reload: use vLLM's "
            "own loader, without the plugin.",
        ),
    ] = "engine",
    reload_dir: Annotated[
        Path | None,
        typer.Option(
            "--reload-dir",
            readable=False,
            metavar="DIR",
            help="For --via reload: where to rebuild the step, as pull does. The servers "
            "must see it at the same path.",
            show_default=False,
        ),
    ] = None,
    timeout: Timeout = TIMEOUT,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Apply a delta to a checkpoint, or load a step into running vLLM servers.

    The base is checked before anything is written, and the result is checked against the delta's
    digest before it becomes visible. The result has the same form and shards as BASE. Applying a
    delta twice changes nothing the second time.

    With --server, every server is brought to the step, side by side. Each server fetches the links
    itself, so it must reach BUCKET at the same address (or see the DELTA file at the same path). It
    prepares the update while it serves; then it is paused, its live weights are checked, the
    changes are written and read back, and it is resumed. The step a server is on is decided by the
    sums of its live weights, before and after the update, never by what it reports. A server that
    holds unknown weights (never loaded, reset, or loaded from elsewhere) gets every tensor. A
    server on a later step goes back only if you name the step. An update left by an apply that was
    killed is completed by the next one; a pause made by somebody else is left alone. A server whose
    weights are in an unknown state is never resumed: it is repaired or left paused, and the message
    says what to do. A sleeping server is refused until its weights are awake (POST
    /wake_up?tags=weights); wake its KV cache last. If vLLM's engine dies during an update, apply
    notices within seconds, and the server must be restarted. The server needs the deltactl plugin:
    see deltactl doctor.

    Tensors that cannot be written in place go through vLLM's own loader. Layers not known to work
    after such a reload are refused by name before the pause. After a reload the model answers a
    short prompt before the server is resumed; if the answer is noise, or differs although nothing
    changed, the server stays paused.

    --via reload needs no plugin, only vLLM's development mode. The servers are checked first, and
    the step is compared with the directory they were started from, if it is visible from here; if
    none of them can load the step, nothing is fetched. It needs room for the whole checkpoint in
    DIR, reads all of it during the pause, and checks only that a short prompt is not answered with
    noise: the server is asked after it is resumed, and paused again if it fails. A server with
    --api-key needs VLLM_API_KEY for that. A reload that fails, for example because the server
    cannot see DIR, leaves the server paused, and vLLM's engine may exit at the next request.
    Quantised models, models with experts and, on a CPU, models that share the embedding with the
    output layer are refused: vLLM keeps copies of their weights that its reload does not renew.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if servers:
        if base is not None or out is not None or in_place:
            raise UsageError("--server takes no BASE, no -o and no --in-place")
        if (via == "reload") != (reload_dir is not None):
            raise UsageError("--via reload and --reload-dir go together")
        if via == "reload" and (dry_run or repair):
            raise UsageError("--via reload always writes everything; it takes no such option")
        from deltactl.server.update import Options

        options = Options(pause, keep_cache, repair, dry_run, timeout)
        return apply_to(screen, target, servers, options, reload_dir, jobs)
    if dry_run or keep_cache or repair or reload_dir or via == "reload":
        raise UsageError("the option is for --server", expected="--server URL")
    if base is None:
        raise UsageError("give the BASE that the delta stands on, or --server URL")
    if (out is not None) == in_place:
        raise UsageError("give either -o OUT or --in-place")
    if out == STDIO:
        raise UsageError("a checkpoint cannot be written to stdout")
    with screen.progress() as progress:
        report = _onto(screen, target, base, out, jobs, progress)
    if not report.proven:
        screen.warn("the delta names no digest: nothing proves the result")
    screen.result(facts_of(report), lambda: _lines(report))


def _onto(
    screen: Output, target: str, base: Path, out: Path | None, jobs: int | None, progress: Progress
) -> ApplyReport:
    """Apply a delta, or that of a step, to a checkpoint."""
    from deltactl.ops.apply import apply_delta

    named = None if Path(target).exists() else bucket_and_step(target)
    if named is not None:
        from deltactl.bucket import open_bucket
        from deltactl.ops.apply_step import apply_step

        bucket, step = named
        opened = open_bucket(bucket, jobs=jobs)
        report, newer = apply_step(opened, step, base, out, progress=progress)
        warn_of_newer(screen, newer, bucket)
        return report
    if Path(target).is_dir() and not is_delta(target):
        hint = (
            f"name a step: deltactl apply {quote(target.rstrip('/'))}@STEP {quote(str(base))} ..."
        )
        raise UsageError("neither a delta nor a step of a chain", found=target, hint=hint)
    with delta_file(Path(target)) as file:
        return apply_delta(file, base, out, progress=progress)


def _lines(report: ApplyReport) -> Iterable[str]:
    step = "" if report.step is None else f", step {report.step}"
    if not report.written:
        yield f"{report.out} holds the delta's result already{step}: nothing to do"
    else:
        yield f"applied the delta{step}: {text.plural(report.changed_elements, 'element')} changed"
    yield from text.pairs([("state", report.state), ("output", report.out)])
