"""``deltactl log``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.exits import UNSOUND
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import Bucket, Jobs, Json, Quiet, is_delta, output, whole_chain
from deltactl.core.errors import NotFound, UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.chain.chain import Chain, Link


_LINK = (
    "step", "kind", "bytes", "changed_elements", "sparsity", "base_state", "result_state",
    "encoding", "dialect", "name",
)  # fmt: skip


@manual(
    keys={
        "bucket": "the bucket",
        "tip": "the newest step that can be rebuilt; null if there is none",
        "links": "in order, with -n the last ones: step, kind (delta, anchor), bytes, "
        "changed_elements, sparsity, base_state, result_state, encoding, dialect, "
        "name; null if not known; replaces_all: whether it keeps almost nothing of "
        "the step before",
        "problems": "objects that look like links and are not valid: step, file, tensor, what,"
        " expected, found",
        "leftovers": "what deltactl clean would remove with its default age: count, bytes",
        "bytes_read": "bytes read from the bucket",
        "requests": "requests made to the bucket; the listing counts as one",
    },
    exits=[3, 4, 5, 10],
    exit_3="an object that should be a link is not valid",
    examples=[
        "deltactl log /mnt/chain",
        "deltactl log -n 5 /mnt/chain",
        "deltactl log /mnt/chain --json | jq .tip",
    ],
)
def log(
    ctx: typer.Context,
    bucket: Bucket,
    number: Annotated[
        int | None,
        typer.Option("-n", "--max-count", metavar="N", min=1, help="Only the last N links."),
    ] = None,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the links of a chain, oldest first.

    Only headers are read; deltactl verify checks whether the links fit together. A step with an
    anchor has two links, unless it is the first: a delta for those who have the step before, and
    the anchor for those who do not. A link that keeps almost nothing of the step before, as where
    another model begins, shows "replaced" in the sparsity column: no tensor keeps its name, dtype
    and shape, or more than 95 % of the elements of 16 bits or fewer changed. (Training changes
    about 1 % of those in a step, and nearly all float32 ones.)
    """
    screen = output(ctx, json=json, quiet=quiet)
    from deltactl.bucket import open_bucket
    from deltactl.chain.reading import read_chain
    from deltactl.chain.replaced import replaces_all
    from deltactl.ops.clean import leftovers_of

    if is_delta(bucket):
        hint = f"deltactl show {quote(bucket)}"
        raise UsageError("this is a delta, and not a chain's bucket", file=bucket, hint=hint)
    opened = open_bucket(whole_chain(bucket, "log"), jobs=jobs)
    chain = read_chain(opened)
    if not chain.links and not chain.problems:
        raise NotFound(
            "the bucket holds no chain", file=bucket, hint=f"deltactl push CKPT {quote(bucket)}"
        )
    left = leftovers_of(opened, chain)
    shown = chain.links[-(number or 0) :]
    replaced = {link.name for link in chain.links if replaces_all(chain, link)}
    document = facts_of(
        chain,
        *("bucket", "tip", "links", "problems", "leftovers", "bytes_read", "requests"),
        bucket=chain.url,
        links=[facts_of(link, *_LINK, replaces_all=link.name in replaced) for link in shown],
        problems=[problem.facts() for problem in chain.problems],
        leftovers={"count": len(left.cleaned), "bytes": left.bytes},
    )
    screen.result(document, lambda: _lines(chain, shown, replaced))
    if left.cleaned:
        found = f"{text.plural(len(left.cleaned), 'left-over')}, {text.size(left.bytes)}"
        screen.warn(f"{found}, of commands that died: deltactl clean {quote(chain.url)}")
    if chain.problems:
        for problem in chain.problems:
            screen.fault(problem)
        raise typer.Exit(UNSOUND)


def _lines(chain: Chain, shown: Sequence[Link], replaced: Collection[str]) -> Iterable[str]:
    head = (">step", "kind", ">size", ">changed", ">sparsity", "base", "result")
    rows = [
        (
            link.step,
            link.kind,
            text.size(link.bytes),
            text.count(link.changed_elements),
            "replaced" if link.name in replaced else text.share(link.sparsity),
            text.short(link.base_state),
            text.short(link.result_state),
        )
        for link in shown
    ]
    yield from text.table(head, rows)
    total = text.size(sum(link.bytes for link in chain.links))
    tip = "no step can be rebuilt" if chain.tip is None else f"tip: step {chain.tip}"
    links = text.plural(len(chain.links), "link")
    last = f"the last {len(rows)} of {links}" if len(rows) < len(chain.links) else links
    yield f"{last}, {total} in all; {tip}" if last != links else f"{links}, {total}; {tip}"
    yield text.read(chain.bytes_read, chain.requests)
