"""``deltactl diff``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.advice import KEY, advice_document, advice_lines
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import (
    STDIO,
    Bandwidth,
    Encoding,
    Json,
    Quiet,
    bandwidth_of,
    output,
)
from deltactl.core.errors import UsageError
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.format.header import Record
    from deltactl.ops.diff import DiffReport

_SHOWN = 20  # tensors that are named on the screen


@manual(
    keys={
        "changed_elements": "elements whose bits changed, those of added tensors included",
        "total_elements": "elements of B",
        "sparsity": "share of elements that kept their bits; 1 where nothing changed",
        "delta_bytes": "size of the delta",
        "bytes_per_changed_element": "delta_bytes over changed_elements; null where none changed",
        "checkpoint_bytes": "size of B's tensors",
        "times_smaller": "checkpoint_bytes over delta_bytes",
        "encoding": "how changes are stored",
        "advice": KEY,
        "base_state": "state digest of A",
        "result_state": "state digest of B",
        "identical": "whether the two states are one",
        "notes": "what is odd about the values, such as NaN that was not there, a sentence each",
        "file": "where the delta was written; null where it was only measured",
        "tensors": "changed tensors: name, kind (sparse, dense, added, removed), dtype, shape, "
        "changed, elements, bytes, base_dtype, base_shape (both null unless replaced)",
    },
    exits=[3, 4, 10],
    exit_1="any other failure; with --exit-code: the checkpoints differ",
    examples=[
        "deltactl diff step_10 step_11",
        "deltactl diff step_10 step_11 -o step_11.delta --json",
        "deltactl diff step_10 step_11 -o step_11.delta --encoding auto --bandwidth 100M",
        "deltactl diff step_10 step_11 -o - | ssh host deltactl apply - step_10 -o step_11",
    ],
)
def diff(
    ctx: typer.Context,
    a: Annotated[Path, typer.Argument(readable=False, metavar="A", help="The base: a checkpoint.")],
    b: Annotated[
        Path, typer.Argument(readable=False, metavar="B", help="The result: a checkpoint.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            readable=False,
            metavar="FILE",
            help="Write the delta to this file; - is stdout.",
        ),
    ] = None,
    encoding: Encoding = "ulp",
    bandwidth: Bandwidth = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="The step that the delta says it is."),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if the checkpoints differ.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make or measure the delta from one checkpoint to another.

    A checkpoint is a safetensors file, a Hugging Face directory (sharded or not), or a PyTorch
    file. Elements are compared bit for bit. Tensors that are new, or that changed shape or dtype,
    are stored whole. Two equal checkpoints give an empty delta, which is valid.
    """
    screen = output(ctx, json=json, quiet=quiet)
    to_stdout = out == STDIO
    if to_stdout and json:
        raise UsageError("--json and -o - both want stdout", hint="write the delta to a file")
    if to_stdout and sys.stdout.isatty():
        raise UsageError("a delta is no text for a terminal", hint="redirect it, or -o FILE")
    rate = bandwidth_of(encoding, bandwidth)
    from deltactl.checkpoint.checkpoint import open_checkpoint
    from deltactl.ops.advice import advise
    from deltactl.ops.diff import diff as make_delta

    with (
        open_checkpoint(a) as base,
        open_checkpoint(b) as result,
        _target(out) as target,
        screen.progress() as progress,
    ):
        advice = advise(base, result, rate) if encoding == "auto" else None
        taken = encoding if advice is None else advice.encoding
        report = make_delta(base, result, target, encoding=taken, step=step, progress=progress)
    for note in report.notes:
        screen.warn(note)
    document = {**_document(report, out), "advice": advice_document(advice)}
    stream = sys.stderr if to_stdout else None
    screen.result(document, lambda: [*_lines(report, out), *advice_lines(advice)], stream=stream)
    if exit_code and not report.identical:
        raise typer.Exit(1)


@contextmanager
def _target(out: Path | None) -> Iterator[Path | IO[bytes] | None]:
    """Where to write; stdout may be a pipe, so what goes there is made in a file first."""
    if out != STDIO:
        yield out
        return
    with NamedTemporaryFile() as file:
        yield file
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout.buffer)


def _document(report: DiffReport, out: Path | None) -> dict[str, Any]:
    return facts_of(
        report,
        *("changed_elements", "total_elements", "sparsity", "delta_bytes"),
        *("bytes_per_changed_element", "checkpoint_bytes", "times_smaller", "encoding"),
        *("base_state", "result_state", "identical", "notes"),
        file=out,
        tensors=[record_document(record) for record in report.records],
    )


def record_document(record: Record) -> dict[str, Any]:
    """One changed tensor as ``--json`` has it."""
    own = ("name", "kind", "dtype", "shape", "changed", "elements", "bytes")
    return facts_of(record, *own, "base_dtype", "base_shape", bytes=record.nbytes)


def _lines(report: DiffReport, out: Path | None) -> Iterable[str]:
    changed, total = report.changed_elements, report.total_elements
    each, times = report.bytes_per_changed_element, text.times(report.times_smaller)
    delta = f"{text.size(report.delta_bytes)} ({report.encoding})"
    delta += "" if each is None else f", {each:.2f} bytes per changed element"
    yield from text.pairs(
        [
            ("changed", f"{text.count(changed)} of {text.plural(total, 'element')}"),
            ("sparsity", text.share(report.sparsity)),
            ("delta", delta),
            ("checkpoint", f"{text.size(report.checkpoint_bytes)}, {times} the delta"),
            ("base state", report.base_state),
            ("result state", report.result_state),
        ]
    )
    yield from _whole_tensors(report.records)
    if report.identical:
        yield "the checkpoints are identical"
    if out is not None and out != STDIO:
        yield f"written to {out}"


def _whole_tensors(records: Iterable[Record]) -> Iterable[str]:
    """A line for each tensor that was added, removed or replaced, as far as a screen holds them."""
    whole = [r for r in records if r.replaced or r.kind in ("added", "removed")]
    for record in whole[:_SHOWN]:
        described = f"{record.name}  {record.dtype} {text.shape(record.shape)}"
        if record.replaced:
            was = f"{record.base_dtype} {text.shape(record.base_shape)}"
            yield f"replaced  {described}, was {was}"
        else:
            yield f"{record.kind:<8}  {described}"
    if len(whole) > _SHOWN:
        yield f"and {text.count(len(whole) - _SHOWN)} more, which --json lists"
