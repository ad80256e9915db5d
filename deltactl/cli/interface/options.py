"""Options and arguments that several commands share, and what their words mean."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, get_args

import typer

from deltactl.cli.interface.output import Output
from deltactl.core.errors import UsageError

EncodingName = Literal["raw", "gap_delta", "ulp", "ulp_ctx", "auto"]
BANDWIDTH = "1G"
STDIO = Path("-")

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def rate(text: str) -> int:
    """Bytes a second, as ``10M``, ``1.5G``, or ``10Gbit``; the units are decimal, as in all that is
    printed."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kMG]?)(bit)?", text)
    found = int(float(match[1]) * _UNITS[match[2]] / (8 if match[3] else 1)) if match else 0
    if not found:
        what = f"{text!r} is not a rate: bytes a second, as 500k, 10M or 1.5G, or bits, as 10Gbit"
        raise typer.BadParameter(what)
    return found


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def age(text: str) -> int:
    """Seconds, as ``30m``, ``12h`` or ``7d``."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age: a number and a unit, as 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


LATEST = "latest"
_STEP = re.compile(rf"-?[0-9]{{1,18}}|{LATEST}")


def step_named(word: str) -> int | None:
    """A step: its number, ``latest``, which is None, or from the tip back, -1 being the tip."""
    if _STEP.fullmatch(word) is None:
        raise typer.BadParameter(f"{word!r} is not a step: a number, {LATEST}, or -2 and so on")
    return None if word == LATEST else int(word)


def _steps_in(bucket: str) -> list[int]:
    """The steps of a bucket on this machine, newest first, by the names of its objects alone."""
    from deltactl.format.link_names import step_of

    found = set()
    for kind in ("deltas", "anchors"):
        with suppress(OSError):
            for path in Path(bucket, kind).iterdir():
                name = f"{kind}/{path.name}"
                found |= {step_of(name), step_of(f"{name}/any")}
    return sorted((step for step in found if step is not None), reverse=True)


def complete_place(incomplete: str) -> list[str]:
    """The steps of a local bucket once ``@`` is typed."""
    bucket, at, begun = incomplete.rpartition("@")
    steps = [LATEST, *map(str, _steps_in(bucket))] if at and bucket else []
    return [f"{bucket}@{step}" for step in steps if step.startswith(begun)]


def complete_step(ctx: typer.Context, incomplete: str) -> list[str]:
    """The steps of the local bucket that is named already, for ``--step``."""
    words = (ctx.params.get("bucket"), ctx.params.get("target"), *ctx.args)
    place = next((str(word) for word in words if word), "")
    steps = [LATEST, *map(str, _steps_in(place))]
    return [step for step in steps if step.startswith(incomplete)]


WHERE = (
    "a directory, hf://buckets/NAMESPACE/NAME[/PREFIX], s3://BUCKET[/PREFIX], gs://BUCKET[/PREFIX] "
    "or az://CONTAINER[/PREFIX]"
)
"""The addresses that buckets have."""

Bucket = Annotated[str, typer.Argument(metavar="BUCKET", help=f"Where the chain lives: {WHERE}.")]
BucketAtStep = Annotated[
    str,
    typer.Argument(
        metavar="BUCKET[@STEP]",
        help=f"Where the chain lives: {WHERE}. STEP: a number, latest, or -2 for the one before.",
        autocompletion=complete_place,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        min=1,
        help="Number of parallel requests; by default what suits the store.",
        show_default=False,
    ),
]
LimitRate = Annotated[
    int | None,
    typer.Option(
        "--limit-rate",
        metavar="RATE",
        parser=rate,
        help="Limit transfers to this many bytes a second in all, as 500k, 10M or 1.5G (k"
        " is 1000). Files that are read in place, from a directory, are not limited.",
        show_default=False,
    ),
]
Encoding = Annotated[
    EncodingName,
    typer.Option(
        "--encoding",
        metavar="|".join(get_args(EncodingName)),
        help="How changes are stored: ulp_ctx is the smallest, ulp is larger and faster, "
        "raw and gap_delta can be read by TRL; auto picks the one that is fastest "
        "end to end, from a sample.",
    ),
]
Bandwidth = Annotated[
    int | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        parser=rate,
        help="For --encoding auto: bytes a second between the two sides, as 500k, 10M or 1.5G. "
        f"Default: {BANDWIDTH}.",
        show_default=False,
    ),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="A running vLLM server, as http://HOST:PORT; repeat the option for each server.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.1,
        help="How long to wait for an answer; ten times as long for work in the server "
        "that shows no progress.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be done, and do nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and warnings.")]


def output(ctx: typer.Context, *, json: bool, quiet: bool) -> Output:
    """The command's Output, in the mode that its options ask for."""
    out = ctx.find_root().obj
    assert isinstance(out, Output)
    out.configure(json=json, quiet=quiet)
    ctx.with_resource(out.kept_for_result())
    return out


def bandwidth_of(encoding: EncodingName, bandwidth: int | None) -> int:
    """Bytes a second that ``--encoding auto`` is to count on. Raises UsageError."""
    if bandwidth is not None and encoding != "auto":
        raise UsageError("--bandwidth is for --encoding auto", found=f"--encoding {encoding}")
    return bandwidth or rate(BANDWIDTH)


def is_delta(word: str) -> bool:
    """Whether a word that may be a delta or a bucket is a delta, on stdin too."""
    from deltactl.format.delta_index import is_delta_path

    path = Path(word)
    return path == STDIO or is_delta_path(path)


def bucket_and_step(word: str) -> tuple[str, int | None] | None:
    """``BUCKET@STEP`` apart, at the last ``@`` that a step follows; None if there is no step."""
    bucket, at, step = word.rpartition("@")
    return (bucket, step_named(step)) if at and bucket and _STEP.fullmatch(step) else None


def place_and_step(word: str, step: int | None) -> tuple[str, int | None]:
    """The bucket and the step of a word that may have one, beside ``--step``. Raises UsageError."""
    apart = bucket_and_step(word)
    if apart is None:
        return word, step
    if step not in (None, apart[1]):
        raise UsageError("two steps are named", expected=f"{word} or --step {step}")
    return apart


def whole_chain(word: str, verb: str) -> str:
    """The bucket that a word names. Raises UsageError where it names a step of one, but for a
    directory that is really called so."""
    apart = bucket_and_step(word)
    if apart is None or Path(word).exists():
        return word
    what = f"{verb} takes a whole chain, and this is a step of one"
    hint = f"leave out the step: {quote(apart[0])}; a bucket of that name is {quote(word + '/')}"
    raise UsageError(what, found=word, hint=hint)


@contextmanager
def delta_file(path: Path) -> Iterator[Path]:
    """A delta as a path that can be opened: what comes on stdin (``-``) is put into a file."""
    if path != STDIO:
        yield path
        return
    with TemporaryDirectory() as directory:
        spooled = Path(directory, "stdin")
        with open(spooled, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield spooled
