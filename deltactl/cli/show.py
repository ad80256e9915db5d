"""``deltactl show``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli.diff import record_document
from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    Jobs,
    Json,
    Quiet,
    bucket_and_step,
    complete_place,
    delta_file,
    is_delta,
    output,
)
from deltactl.core.errors import UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.format.anchor import AnchorHeader
    from deltactl.format.delta_header import DeltaHeader


@manual(
    keys={
        "links": "the delta, or the delta and the anchor of the step, each: kind, step, base_step, "
        "file, bytes, dialect, encoding, base_state, result_state, payload_digest, "
        "changed_elements, total_elements, metadata, files, tensors",
        "links[].files": "of a link of several files: name, bytes; the index is not among them",
        "links[].metadata": "the header's other keys, as strings",
        "links[].tensors": "of a delta as those of deltactl diff; of an anchor: name, dtype, "
        "shape, digest",
        "bytes_read": "size of the headers that were read: the file's, or of all the chain's links",
        "requests": "in how many requests to the bucket, the listing counted as one",
    },
    exits=[3, 4, 5, 10],
    examples=["deltactl show step_11.delta", "deltactl show /mnt/chain@11 --json"],
)
def show(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="DELTA|BUCKET@STEP",
            help="A delta file (- is stdin), or a step of a chain: its number, latest, or -2 for "
            "the one before.",
            autocompletion=complete_place,
        ),
    ],
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the header of a delta, or of a step's links.

    Payloads are not read; deltactl verify does that.
    """
    screen = output(ctx, json=json, quiet=quiet)
    document = _delta(Path(target)) if is_delta(target) else _step(target, jobs)
    screen.result(document, lambda: _lines(document))


def _delta(path: Path) -> dict[str, Any]:
    from deltactl.format.delta import open_delta

    with delta_file(path) as file:
        header = open_delta(file).header
    links = [_of_delta(header, str(path), header.nbytes, header.step)]
    return {"links": links, "bytes_read": header.header_bytes, "requests": 0}


def _step(target: str, jobs: int | None) -> dict[str, Any]:
    named = bucket_and_step(target)
    if named is None:
        what = "neither a delta file nor a step of a chain"
        bucket = target.rpartition("@")[0] or target  # what follows is no step
        raise UsageError(what, found=target, hint=f"deltactl show {quote(bucket)}@STEP")
    from deltactl.bucket import open_bucket
    from deltactl.chain.reading import read_chain
    from deltactl.format.anchor import AnchorHeader

    bucket, number = named
    chain = read_chain(open_bucket(bucket, jobs=jobs))
    step = chain.wanted(chain.numbered(number))
    chain.need(step)
    links = [
        _of_anchor(link.header, link.name, link.bytes, step)
        if isinstance(link.header, AnchorHeader)
        else _of_delta(link.header, link.name, link.bytes, step)
        for link in chain.links_at(step)
    ]
    return {"links": links, "bytes_read": chain.bytes_read, "requests": chain.requests}


def _of_delta(header: DeltaHeader, file: str, size: int, step: int | None) -> dict[str, Any]:
    return facts_of(
        header,
        *("kind", "step", "base_step", "file", "bytes", "dialect", "encoding", "base_state"),
        *("result_state", "payload_digest", "changed_elements", "total_elements"),
        kind="delta",
        step=step,
        file=file,
        bytes=size,
        metadata=_rest(header.metadata),
        files=[{"name": file.name, "bytes": file.nbytes} for file in header.files],
        tensors=[record_document(record) for record in header.records.values()],
    )


def _of_anchor(header: AnchorHeader, file: str, size: int, step: int) -> dict[str, Any]:
    return {
        "kind": "anchor",
        "step": step,
        "base_step": None,
        "file": file,
        "bytes": size,
        "dialect": header.dialect,
        "encoding": None,
        "base_state": None,
        "result_state": header.result_state,
        "payload_digest": None,
        "changed_elements": None,
        "total_elements": header.total_elements,
        "metadata": _rest(header.metadata),
        "files": [{"name": file.name, "bytes": file.nbytes} for file in header.files],
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "digest": t.digest or None}
            for t in header.tensors
        ],
    }


def _rest(metadata: dict[str, str]) -> dict[str, str]:
    """The metadata without the tables, which stand elsewhere."""
    tables = ("deltactl.tensors", "deltactl.files", "changed_params")
    return {key: value for key, value in metadata.items() if key not in tables}


def _lines(document: dict[str, Any]) -> Iterable[str]:
    for number, link in enumerate(document["links"]):
        if number:
            yield ""
        yield from _header_lines(link)
        yield ""
        yield from _anchor_table(link) if link["kind"] == "anchor" else _delta_table(link)
    if document["requests"]:
        yield ""
        yield text.read(document["bytes_read"], document["requests"])


def _header_lines(link: dict[str, Any]) -> Iterable[str]:
    rows: list[tuple[str, object]] = [
        (key.replace("_", " "), link[key])
        for key in ("kind", "step", "base_step", "file", "dialect", "encoding")
        if link[key] is not None
    ]
    rows += [("files", len(link["files"]) + 1)] if link["files"] else []
    rows.append(("size", text.size(link["bytes"])))
    rows += [
        (key.replace("_", " "), link[key])
        for key in ("base_state", "result_state", "payload_digest")
        if link[key] is not None
    ]
    total = link["total_elements"]
    if link["changed_elements"] is not None:
        rows.append(("changed", f"{text.count(link['changed_elements'])} of {text.count(total)}"))
    else:
        rows.append(("elements", text.count(total)))
    return text.pairs(rows)


def _delta_table(link: dict[str, Any]) -> list[str]:
    head = ("tensor", "kind", "dtype", "shape", ">changed", ">share", ">size")
    rows = [
        (
            row["name"],
            "replaced" if row["base_dtype"] else row["kind"],
            row["dtype"] or "-",
            text.shape(row["shape"]),
            text.count(row["changed"]),
            text.share(row["changed"] / row["elements"] if row["elements"] else None),
            text.size(row["bytes"]),
        )
        for row in link["tensors"]
    ]
    return text.table(head, rows)


def _anchor_table(link: dict[str, Any]) -> list[str]:
    head = ("tensor", "dtype", "shape", "digest")
    return text.table(
        head,
        [
            (row["name"], row["dtype"], text.shape(row["shape"]), text.short(row["digest"]))
            for row in link["tensors"]
        ],
    )
