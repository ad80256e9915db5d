"""``deltactl push``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.advice import KEY, advice_document, advice_lines
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    Bandwidth,
    Bucket,
    DryRun,
    Encoding,
    Jobs,
    Json,
    LimitRate,
    Quiet,
    bandwidth_of,
    delta_file,
    output,
    whole_chain,
)
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.push import PushReport


@manual(
    keys={
        "step": "the step",
        "kind": "anchor or delta; an anchor's step has a delta too, unless it is the first",
        "bytes": "bytes written, or that would be",
        "state": "state digest of the step",
        "written": "false if the step existed with the same content, and in a dry run",
        "changed_elements": "elements that the delta changes; null for a first anchor",
        "total_elements": "elements of the checkpoint",
        "encoding": "encoding of the delta that was made here; null if none was",
        "advice": KEY,
        "dry_run": "whether this was a dry run",
        "files": "names of the objects in the bucket",
        "left_behind": "files beside the weights that differ from the last anchor's: they are not"
        " published until the next anchor",
        "notes": "what changed in the model, or looks odd, one sentence each",
    },
    exits=[3, 4, 5, 10, 11],
    examples=[
        "deltactl push step_1 /mnt/chain",
        "deltactl push step_2 /mnt/chain --base step_1 --json",
        "deltactl push step_3 /mnt/chain --step 3 --dry-run",
    ],
)
def push(
    ctx: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="CKPT|DELTA",
            help="The step's checkpoint, or a delta that leads to it.",
        ),
    ],
    bucket: Bucket,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", min=0, help="The step; by default the one after the tip."
        ),
    ] = None,
    anchor_every: Annotated[
        int,
        typer.Option(
            "--anchor-every",
            metavar="N",
            min=0,
            help="Write an anchor at each multiple of N; 0: only the first.",
        ),
    ] = 10,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            readable=False,
            metavar="CKPT",
            help="The checkpoint of the tip, to skip the cache lookup.",
        ),
    ] = None,
    encoding: Encoding = "ulp",
    bandwidth: Bandwidth = None,
    allow_other_model: Annotated[
        bool,
        typer.Option(
            "--allow-other-model", help="Push it although it is not of the model that is there."
        ),
    ] = False,
    jobs: Jobs = None,
    limit_rate: LimitRate = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Publish a checkpoint as the next step of a chain.

    The first step is an anchor: the whole checkpoint, with its config and tokenizer. Later steps
    are deltas against the tip of the chain, which is kept in a local cache and rebuilt if it is
    missing or wrong. A step that exists with the same content is left alone, and so is the chain if
    no step is named and the checkpoint is the tip. A step that exists with other content, or that
    is not above the tip, is refused.

    A chain holds one model. A checkpoint is refused if its config names another architecture; if it
    lacks more than half of the tip's tensors, or has some under the names that torch.compile,
    DistributedDataParallel or PEFT give them; if more than half of the tensors changed shape, or of
    the tensors or elements changed dtype; or if a tensor became empty, or stopped being empty. A
    single shard of several is refused too, and, as the first step, an adapter or a checkpoint of
    empty tensors. With --allow-other-model it is pushed anyway, as an anchor with its own config.
    Smaller changes, such as a new head, are pushed with a warning; so are weights of 16 bits or
    fewer of which more than 95 % changed, which suggests another run: training changes about 1 % a
    step.
    """
    screen = output(ctx, json=json, quiet=quiet)
    rate = bandwidth_of(encoding, bandwidth)
    from deltactl.bucket import open_bucket
    from deltactl.ops.push import push as publish

    with delta_file(source) as file, screen.progress() as progress:
        report = publish(
            file,
            open_bucket(whole_chain(bucket, "push"), jobs=jobs, limit_rate=limit_rate),
            step=step,
            anchor_every=anchor_every,
            base=base,
            encoding=encoding,
            bandwidth=rate,
            allow_other_model=allow_other_model,
            dry_run=dry_run,
            progress=progress,
        )
    if report.left_behind:
        names = ", ".join(report.left_behind)
        screen.warn(
            f"these files differ from the last anchor and are not published until the next: {names}"
        )
    for note in report.notes:
        screen.warn(note)
    written = report.written and not report.dry_run
    document = facts_of(report, written=written, advice=advice_document(report.advice))
    screen.result(document, lambda: _lines(report, asked=step is not None))


def _lines(report: PushReport, *, asked: bool) -> Iterable[str]:
    if not report.written and asked:
        yield f"step {report.step} is there already with the same content: nothing to do"
        return
    if not report.written:
        yield f"already the tip, step {report.step}: nothing to do"
        yield f"--step {report.step + 1} would publish it as a step of its own"
        return
    verb = "would push" if report.dry_run else "pushed"
    article = "an anchor" if report.kind == "anchor" else "a delta"
    yield f"{verb} step {report.step} as {article}, {text.size(report.bytes)}"
    rows: list[tuple[str, object]] = []
    if report.changed_elements is not None:
        total = text.plural(report.total_elements, "element")
        rows.append(("changed", f"{text.count(report.changed_elements)} of {total}"))
    rows.append(("state", report.state))
    yield from text.pairs([*rows, *(("object", name) for name in report.files)])
    yield from advice_lines(report.advice)
