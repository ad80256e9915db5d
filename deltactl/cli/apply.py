"""``deltactl apply``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
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
    delta_file,
    output,
)
from deltactl.cli.interface.servers import REPLICA_KEYS, apply_to
from deltactl.core.errors import UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.apply import ApplyReport


Pause = Literal["keep", "wait", "abort"]
Via = Literal["engine", "reload"]
TIMEOUT = 120.0


@manual(
    keys={
        "step": "the delta's step; null if it names none; with --server the step to load",
        "state": "state digest of the result",
        "changed_elements": "elements that the delta changes",
        "written": "false if the result was there already",
        "proven": "false if the delta names no digest to prove the result by, as TRL's",
        "out": "where the result is",
        "newer": "with --server: newer steps in the bucket that cannot be rebuilt",
        "dry_run": "with --server: whether nothing was done",
        "replicas": REPLICA_KEYS,
    },
    exits=[3, 4, 5, 10, 11],
    exit_1="any other failure; with --server: servers that failed did so in different ways",
    examples=[
        "deltactl apply step_11.delta step_10 -o step_11",
        "deltactl apply step_11.delta model --in-place",
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
            help="A delta file; - is stdin. With --server also a step of a chain, or its bucket "
            "for the tip.",
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Argument(
            readable=False, metavar="BASE", help="The checkpoint it stands on; none with --server."
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
        typer.Option("--in-place", help="Let the result take the place of BASE, in one step."),
    ] = False,
    servers: Servers = None,
    pause: Annotated[
        Pause,
        typer.Option(
            "--pause",
            metavar="|".join(get_args(Pause)),
            help="With --server: what becomes of requests in flight. keep: they go on afterwards; "
            "wait: they end before; abort: they are ended.",
        ),
    ] = "keep",
    keep_cache: Annotated[
        bool,
        typer.Option(
            "--keep-cache",
            help="With --server: leave what the old weights computed in the caches. Answers then "
            "mix old and new weights.",
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --server: write every tensor, whatever the server says it holds.",
        ),
    ] = False,
    via: Annotated[
        Via,
        typer.Option(
            "--via",
            metavar="|".join(get_args(Via)),
            help="With --server: engine: deltactl's plugin in vLLM; reload: vLLM's own loader, "
            "which needs no plugin.",
        ),
    ] = "engine",
    reload_dir: Annotated[
        Path | None,
        typer.Option(
            "--reload-dir",
            readable=False,
            metavar="DIR",
            help="For --via reload: where to rebuild the step, as pull does. The servers have to "
            "see it under the same path.",
            show_default=False,
        ),
    ] = None,
    timeout: Timeout = TIMEOUT,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Apply a delta to the checkpoint that it stands on, or have running vLLM servers load a step.

    Another base is refused before anything is written, and the result is compared with the digest
    that the delta names before it is visible. The result keeps the form and the shards of BASE.
    Applying a delta twice does nothing the second time, and says so.

    With --server every server is brought to the step, side by side. Each fetches the links itself,
    so it has to reach BUCKET by the same address (and see a DELTA file under the same path), and
    lays the changes out while it goes on serving. Then it is paused, compares its live weights with
    what the links stand on, writes, reads back and is resumed. A server is on the step that its
    live weights add up to: they are summed first, whatever it said before, and again after the
    update. One on weights that are none of the chain's, or that nobody knows (never loaded, reset,
    loaded from elsewhere), gets every tensor, and so does one on a later step, if the step is
    named: without a name none goes back, with --repair neither. What an apply that was killed left
    behind is carried to an end by the next one; a pause that somebody else made stays. A server
    whose weights are in an unknown state is never resumed: it is repaired, or left paused, and the
    message says how to go on. One that sleeps is refused until its weights are woken (POST
    /wake_up?tags=weights); its KV cache is woken last. Where vLLM's engine dies meanwhile, that is
    noticed in seconds, and the server has to be restarted. The plugin has to run there: see
    deltactl doctor.

    Tensors that cannot be written in place go through vLLM's own loader. Layers for which that was
    not shown to give the answers of a fresh server are refused before the pause, by name. After it
    the model answers a short prompt before the server is resumed, which stays paused where the
    answer is noise, or another one although nothing has changed.

    --via reload works with any vLLM that has its development mode on. The servers are looked at
    first, and the step is compared with the directory that they were started on, if it is to be
    seen from here; where none of them can load it nothing is fetched. It needs room for the whole
    checkpoint in DIR, reads all of it in the pause, and proves nothing about what is live but that
    a short prompt is not answered with noise: it is asked once the server is resumed, which is
    paused again where it is. A server with --api-key needs VLLM_API_KEY for that. A reload that
    fails, as for a DIR that the server does not see, leaves the server paused, and vLLM's engine
    may end at the next request. Refused are models that are quantised or have experts, and on a CPU
    those whose output layer shares the embedding: vLLM computes with copies of their weights that
    its reload does not renew, or was not shown to.
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
    from deltactl.ops.apply import apply_delta

    with delta_file(Path(target)) as file, screen.progress() as progress:
        report = apply_delta(file, base, out, progress=progress)
    if not report.proven:
        screen.warn("the delta names no digest: nothing proves the result")
    screen.result(facts_of(report), lambda: _lines(report))


def _lines(report: ApplyReport) -> Iterable[str]:
    step = "" if report.step is None else f", step {report.step}"
    if not report.written:
        yield f"{report.out} holds the delta's result already{step}: nothing to do"
    else:
        yield f"applied the delta{step}: {text.plural(report.changed_elements, 'element')} changed"
    yield from text.pairs([("state", report.state), ("output", report.out)])
