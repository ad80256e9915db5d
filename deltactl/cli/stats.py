"""``deltactl stats``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.exits import UNSOUND
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    Json,
    Quiet,
    delta_file,
    is_delta,
    output,
    rate,
    whole_chain,
)
from deltactl.core.errors import DeltactlError, UsageError
from deltactl.core.progress import Progress

if TYPE_CHECKING:
    from deltactl.ops.stats import Stats

Row = Mapping[str, Any]

_SHOWN = 20  # rows of one table on the screen
_LONG = 64  # steps above this share a row


@manual(
    keys={
        "source": "pair, delta or bucket",
        "encoding": "the delta's; null otherwise",
        "changed_elements": "elements whose bits changed; of a bucket, in all its deltas",
        "total_elements": "elements of the result; of a bucket, of its newest step",
        "sparsity": "share of elements that kept their bits; of a bucket, over all its deltas",
        "sizes": "bytes that the changes take in each encoding, and the whole checkpoint (dense), "
        "without headers; of a bucket, for all its deltas; null for what is not known",
        "ship": "for each bandwidth: bits_per_second, and seconds by the keys of sizes",
        "ulp_steps": "how far changed floats moved, in units in the last place: counted, one_share "
        "(share of steps of 1), sign_flips, bins (min, max, up, down); null where not known",
        "exponents": "of floats, by the exponent of the base: dtype, exponent (biased), power (of "
        "two), elements, changed, rate; null where not known",
        "modules": "by kind of module: name, tensors, elements, changed, sparsity",
        "layers": "by layer; keys as those of modules",
        "tensors": "name, status (unchanged, changed, replaced, added, removed), dtype, shape, "
        "elements, changed, sparsity, changed_steps (of a bucket: how many deltas changed it); "
        "of a delta, those that it changes",
        "chain": "of a bucket: anchors and deltas (links, bytes), sparsity (mean, min, max), links "
        "(step, kind, encoding, bytes, changed_elements, sparsity, bytes_per_changed_element), "
        "problems; null otherwise",
    },
    exits=[3, 4, 5, 10],
    exit_3="a torn file, or an object of a bucket that should be a link is none",
    examples=[
        "deltactl stats step_10 step_11",
        "deltactl stats step_11.delta --json",
        "deltactl stats /mnt/chain --bandwidth 50Mbit --bandwidth 400Mbit",
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
        list[int] | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            parser=rate,
            help="Show shipping times for this rate, in bytes a second as 10M or in bits as 1Gbit; "
            "repeat the option for each. By default 100Mbit, 1Gbit and 10Gbit.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how sparse training is: what changes, by how much, and what it costs to ship.

    Two checkpoints tell most. A delta tells what it holds: without its base the steps are known
    only for the ulp encodings, and exponents are not. For a bucket only headers are read.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if len(targets) > 2:
        raise UsageError("too many targets", expected="A B, DELTA or BUCKET", found=len(targets))
    with screen.progress() as progress:
        found = _measure(targets, progress)
    rates = [8.0 * each for each in bandwidth] if bandwidth else None
    document = found.facts(rates) if rates else found.facts()
    screen.result(document, lambda: _lines(document))
    problems = document["chain"]["problems"] if document["chain"] else []
    for problem in problems:
        screen.fault(DeltactlError(**problem))
    if problems:
        raise typer.Exit(UNSOUND)


def _measure(targets: Sequence[str], progress: Progress) -> Stats:
    if len(targets) == 2:
        from deltactl.checkpoint.checkpoint import open_checkpoint
        from deltactl.ops.stats import stats_pair

        with open_checkpoint(Path(targets[0])) as a, open_checkpoint(Path(targets[1])) as b:
            return stats_pair(a, b, progress)
    (target,) = targets
    if is_delta(target):
        from deltactl.format.delta import open_delta
        from deltactl.ops.stats import stats_delta

        with delta_file(Path(target)) as file:
            return stats_delta(open_delta(file), progress)
    from deltactl.bucket import open_bucket
    from deltactl.ops.stats import stats_bucket

    return stats_bucket(open_bucket(whole_chain(target, "stats")), progress)


def _lines(document: Row) -> Iterable[str]:
    yield from _totals(document)
    chain = document["chain"]
    for title, table in (
        ("", _sizes(document)),
        ("", _links(chain["links"]) if chain else []),
        ("steps in units in the last place", _steps(document["ulp_steps"])),
        ("by exponent of the base", _exponents(document["exponents"])),
        ("by kind of module", _groups(document["modules"])),
        ("by layer", _groups(document["layers"])),
        ("most changed tensors", _tensors(document["tensors"], of_chain=chain is not None)),
    ):
        if len(table) > 1:
            yield ""
            yield from [title] if title else []
            yield from table


def _totals(document: Row) -> list[str]:
    changed, chain = document["changed_elements"], document["chain"]
    kept = text.share(document["sparsity"])
    if chain is None:
        total = document["total_elements"]
        of_all = "" if total is None else f" of {text.count(total)}"
        rows = [("changed", f"{text.count(changed)}{of_all} elements"), ("sparsity", kept)]
        if document["encoding"] is not None:
            rows.append(("encoding", document["encoding"]))
        return text.pairs(rows)
    spread = chain["sparsity"]
    if spread["min"] is not None:
        kept += f" ({text.share(spread['min'])} to {text.share(spread['max'])})"
    return text.pairs(
        [
            ("deltas", _count_and_size(chain["deltas"])),
            ("anchors", _count_and_size(chain["anchors"])),
            ("elements", text.count(document["total_elements"])),
            ("changed", f"{text.count(changed)} in all deltas"),
            ("sparsity", kept),
        ]
    )


def _count_and_size(kind: Row) -> str:
    return f"{text.count(kind['links'])}, {text.size(kind['bytes'])}"


def _sizes(document: Row) -> list[str]:
    sizes, changed = document["sizes"], document["changed_elements"]
    whole = sizes["dense"]
    head = ["encoding", ">size", ">bytes/changed", ">smaller"]
    head += [f">{text.bandwidth(row['bits_per_second'])}" for row in document["ship"]]
    rows = []
    for name, size in sizes.items():
        if size is None:
            continue
        each = f"{size / changed:.2f}" if changed and name != "dense" else "-"
        times = text.times(whole / size) if whole and size and name != "dense" else "-"
        shipped = [text.seconds(row["seconds"][name]) for row in document["ship"]]
        rows.append([name, text.size(size), each, times, *shipped])
    return text.table(head, rows)


def _links(links: Sequence[Row]) -> list[str]:
    head = (">step", "kind", ">size", ">changed", ">sparsity", ">bytes/changed")
    rows = [
        (
            link["step"],
            link["kind"],
            text.size(link["bytes"]),
            text.count(link["changed_elements"]),
            text.share(link["sparsity"]),
            "-"
            if link["bytes_per_changed_element"] is None
            else f"{link['bytes_per_changed_element']:.2f}",
        )
        for link in links
    ]
    return _cut(text.table(head, rows[-_SHOWN:]), len(rows))


def _steps(steps: Row | None) -> list[str]:
    if not steps or not steps["counted"]:
        return []
    short = [row for row in steps["bins"] if row["max"] <= _LONG]
    long = [row for row in steps["bins"] if row["max"] > _LONG]
    shown = [(_range(row), row["up"], row["down"]) for row in short]
    if long:
        up, down = (sum(row[way] for row in long) for way in ("up", "down"))
        shown.append((f"above {_LONG}", up, down))
    lines = text.table(
        (">length", ">up", ">down", ">share"),
        [
            (name, text.count(up), text.count(down), text.share((up + down) / steps["counted"]))
            for name, up, down in shown
        ],
    )
    if steps["sign_flips"] is not None:
        lines.append(f"{text.count(steps['sign_flips'])} of them change the sign")
    return lines


def _range(row: Row) -> str:
    return str(row["min"]) if row["min"] == row["max"] else f"{row['min']}-{row['max']}"


def _exponents(rows: Sequence[Row] | None) -> list[str]:
    if not rows:
        return []
    most = sorted(rows, key=lambda row: -row["changed"])[:_SHOWN]
    least = min(row["changed"] for row in most)
    shown = [row for row in rows if row["changed"] >= least][:_SHOWN]
    lines = text.table(
        ("dtype", ">from", ">elements", ">changed", ">share"),
        [
            (
                row["dtype"],
                f"2^{row['power']}" if row["exponent"] else "0",
                text.count(row["elements"]),
                text.count(row["changed"]),
                text.share(row["rate"]),
            )
            for row in shown
        ],
    )
    return _cut(lines, len(rows))


def _groups(groups: Sequence[Row]) -> list[str]:
    shown = groups[:_SHOWN]
    lines = text.table(
        ("name", ">tensors", ">elements", ">changed", ">sparsity"),
        [
            (
                group["name"],
                text.count(group["tensors"]),
                text.count(group["elements"]),
                text.count(group["changed"]),
                text.share(group["sparsity"]),
            )
            for group in shown
        ],
    )
    return _cut(lines, len(groups))


def _tensors(tensors: Sequence[Row], *, of_chain: bool) -> list[str]:
    changed = [row for row in tensors if row["changed"] or row["status"] == "removed"]
    shown = sorted(changed, key=lambda row: 1.0 if row["sparsity"] is None else row["sparsity"])
    head = ["name", "status", "dtype", "shape", ">changed", ">sparsity"]
    head += [">in deltas"] if of_chain else []
    rows = []
    for row in shown[:_SHOWN]:
        cells = [row["name"], row["status"], row["dtype"] or "-", text.shape(row["shape"])]
        cells += [text.count(row["changed"]), text.share(row["sparsity"])]
        rows.append(cells + ([text.count(row["changed_steps"])] if of_chain else []))
    return _cut(text.table(head, rows), len(changed))


def _cut(lines: list[str], count: int) -> list[str]:
    """A table's lines, and how many rows of all are left out."""
    left = count - (len(lines) - 1)
    return [*lines, f"and {text.count(left)} more, which --json lists"] if left > 0 else lines
