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
)
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.push import PushReport


@manual(
    keys={
        "step": "the step",
        "kind": "anchor or delta; an anchor's step has a delta too, unless it is the first",
        "bytes": "size of what was written, or would be",
        "state": "state digest of the step",
        "written": "false if the step was there already with the same content, and in a dry run",
        "changed_elements": "elements that the delta changes; null for a first anchor",
        "total_elements": "elements of the checkpoint",
        "encoding": "how the delta that was made here stores changes; null where none was made",
        "advice": KEY,
        "dry_run": "whether this only says what would be done",
        "files": "names of the objects in the bucket",
        "left_behind": "files beside the weights that differ from the newest anchor's: a delta "
        "does not carry them",
        "notes": "what changed of the model, or is odd about it, a sentence each",
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
            help="Write an anchor at each multiple of this step; 0: only the first.",
        ),
    ] = 10,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            readable=False,
            metavar="CKPT",
            help="The checkpoint of the tip, to spare a look at the cache.",
        ),
    ] = None,
    encoding: Encoding = "ulp",
    bandwidth: Bandwidth = None,
    allow_other_model: Annotated[
        bool,
        typer.Option(
            "--allow-other-model", help="Push it though it is not of the model that is there."
        ),
    ] = False,
    jobs: Jobs = None,
    limit_rate: LimitRate = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Publish a checkpoint as the next step of a chain.

    The first step is an anchor: the whole checkpoint, with its config and tokenizer. Later ones
    are deltas against the tip of the chain, which is kept in a local cache and rebuilt when it is
    missing or wrong. A step that is there with the same content is left as it is, and so is the
    chain where no step is named and the checkpoint is the tip; one with other content, and a step
    that is not above the tip, are refused.

    A chain is of one model. Refused is a checkpoint whose config names another architecture; that
    lacks more than half of the tip's tensors, or has some under the names that torch.compile,
    DistributedDataParallel or PEFT give them; in which more than half of the tensors have another
    shape, or of the tensors or their elements another dtype; or in which one has lost all its
    elements, or has some where there were none. So is one shard of several, and as the first step
    an adapter, or a checkpoint of empty tensors. With --allow-other-model it is pushed all the
    same, as an anchor with its own config. Smaller changes, such as a new head, are pushed and
    warned of; so are weights of 16 bits or fewer of which more than 95 % changed, as where they are
    another run's: training changes about 1 % of them in a step.
    """
    screen = output(ctx, json=json, quiet=quiet)
    rate = bandwidth_of(encoding, bandwidth)
    from deltactl.bucket import open_bucket
    from deltactl.ops.push import push as publish

    with delta_file(source) as file, screen.progress() as progress:
        report = publish(
            file,
            open_bucket(bucket, jobs=jobs, limit_rate=limit_rate),
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
        screen.warn(f"not as in the newest anchor, and only the next one carries it: {names}")
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
