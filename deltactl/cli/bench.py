"""``deltactl bench``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import Json, Quiet, output
from deltactl.core.errors import UsageError

Row = Mapping[str, Any]

_PARAMS = 1 << 26
_LIMITS = {
    "read": "read both",
    "read_and_hash": "read and BLAKE3 both",
    "copy_and_hash": "cp and BLAKE3 one",
    "copy_sync_and_hash": "cp, sync and BLAKE3 one",
}


@manual(
    keys={
        "machine": "cpu, architecture, cores (those that may be used), memory_bytes, system, "
        "python, numpy, compiled (whether the inner loops are, or numpy does their work)",
        "checkpoint": "bytes (of B's files), elements, changed_elements, sparsity, learning_rate "
        "(of made checkpoints, else null)",
        "rounds": "how often each was run; every time is the median",
        "limits": "what this machine can do at best: read and read_and_hash (of both "
        "checkpoints, on all cores), copy_and_hash and copy_sync_and_hash (cp of B, then BLAKE3 "
        "of the copy); each: seconds, and bytes_per_second of one checkpoint",
        "encodings": "each: encoding, bytes, bytes_per_changed_element (null where nothing "
        "changed), times_smaller, and the stages below, which have the keys of limits",
        "encodings[].encode": "two checkpoints to a delta, written and synced, with both digests; "
        "also share_of_reading (speed over that of read) and times_read_and_hash (time over that "
        "of read_and_hash)",
        "encodings[].decode": "the delta's changes alone",
        "encodings[].apply": "the result in memory, with its digest; null where memory is short",
        "encodings[].rebuild": "deltactl apply to a new checkpoint, synced; also share_of_copy "
        "and share_of_synced_copy (speed over that of copy_and_hash and of copy_sync_and_hash)",
        "peers": "other ways to store B, most of them given A: name, problem (not installed, or "
        "what failed; null), sample_bytes (of the sample it was given; null: it was given all), "
        "bytes, bytes_per_changed_element, times_smaller, encode, decode (both as limits; all "
        "null where there is a problem, decode also where it is not measured)",
        "catch_up": "a rebuild over merged deltas: links, changed_elements (of all together), "
        "bytes, seconds, seconds_per_changed_element; of given checkpoints for one link alone, "
        "otherwise on a small made chain",
    },
    exits=[3, 4, 10],
    examples=[
        "deltactl bench",
        "deltactl bench step_10 step_11 --rounds 3 --json",
        "deltactl bench --params 250000000 --scratch /mnt/fast",
    ],
)
def bench(
    ctx: typer.Context,
    a: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            metavar="CKPT_A",
            help="The base, a checkpoint; without the two a pair is made.",
            show_default=False,
        ),
    ] = None,
    b: Annotated[
        Path | None,
        typer.Argument(
            readable=False, metavar="CKPT_B", help="The result, a checkpoint.", show_default=False
        ),
    ] = None,
    params: Annotated[
        int | None,
        typer.Option(
            "--params",
            metavar="N",
            min=1,
            help=f"Parameters of the made checkpoints. Default: {_PARAMS}.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", metavar="N", min=1, help="How often everything is run; medians are shown."
        ),
    ] = 5,
    scratch: Annotated[
        Path | None,
        typer.Option(
            "--scratch",
            readable=False,
            metavar="DIR",
            help="Where temporary files go, some times the size of a checkpoint; by default the "
            "system's place for such.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the encodings on this machine, beside its limits and other tools.

    Everything runs in turn, round after round, so that each figure is a share of what the machine
    can do in the same minutes: read both files from memory, hash them, and copy one. The generated
    checkpoints are bf16, one AdamW step at learning rate 1e-6 apart. Other tools (zstd, xdelta3,
    ZipNN) are measured if they are installed, on a sample of a large checkpoint.
    """
    screen = output(ctx, json=json, quiet=quiet)
    if a is not None and params is not None:
        raise UsageError("--params is for made checkpoints, and one is given", found=a)
    from deltactl.bench.run import bench as measure

    with screen.progress() as progress:
        report = measure(
            a, b, params=params or _PARAMS, rounds=rounds, scratch=scratch, progress=progress
        )
    document = report.facts()
    screen.result(document, lambda: bench_lines(document))


def bench_lines(document: Row) -> Iterable[str]:
    """A report, as ``--json`` has it, for people to read."""
    yield from _facts(document)
    for title, table in (
        ("limits of this machine, GB of one checkpoint a second", _limits(document["limits"])),
        ("encodings, GB of one checkpoint a second", _encodings(document["encodings"])),
        ("other ways, GB of one checkpoint a second", _peers(document["peers"])),
        ("catching up: a rebuild over merged deltas", _catch_up(document["catch_up"])),
    ):
        yield ""
        yield title
        yield from table


def _facts(document: Row) -> list[str]:
    machine, checkpoint = document["machine"], document["checkpoint"]
    lr = checkpoint["learning_rate"]
    made = "" if lr is None else f", made, one step at learning rate {lr:g}"
    changed = text.count(checkpoint["changed_elements"])
    share = text.share(1 - checkpoint["sparsity"])
    memory, cores = text.size(machine["memory_bytes"]), text.plural(machine["cores"], "core")
    return text.pairs(
        [
            ("machine", f"{machine['cpu']}, {cores}, {memory} of memory"),
            ("inner loops", "compiled" if machine["compiled"] else "numpy: not compiled here"),
            ("checkpoint", f"{text.size(checkpoint['bytes'])}{made}"),
            ("changed", f"{changed} of {text.count(checkpoint['elements'])} elements, {share}"),
            ("times", f"medians of {text.plural(document['rounds'], 'round')}"),
        ]
    )


def _limits(limits: Row) -> list[str]:
    return text.table(("", ">GB/s"), [(_LIMITS[name], _speed(row)) for name, row in limits.items()])


def _encodings(rows: Sequence[Row]) -> list[str]:
    head = ["encoding", ">size", ">bytes/changed", ">smaller", ">encode", ">of reading"]
    head += [">x BLAKE3", ">decode", ">apply", ">rebuild", ">of cp", ">of cp, sync"]
    return text.table(head, map(_encoding, rows))


def _encoding(row: Row) -> list[str]:
    encode, rebuild = row["encode"], row["rebuild"]
    return [
        *_size(row["encoding"], row),
        _speed(encode),
        f"{encode['share_of_reading']:.2f}",
        f"{encode['times_read_and_hash']:.2f}",
        _speed(row["decode"]),
        _speed(row["apply"]),
        _speed(rebuild),
        f"{rebuild['share_of_copy']:.2f}",
        f"{rebuild['share_of_synced_copy']:.2f}",
    ]


def _peers(rows: Sequence[Row]) -> list[str]:
    head = ("", ">size", ">bytes/changed", ">smaller", ">encode", ">decode", "measured on")
    return text.table(head, map(_peer, rows))


def _peer(row: Row) -> list[str]:
    if row["problem"] is not None:
        return [row["name"], "-", "-", "-", "-", "-", row["problem"]]
    sample = row["sample_bytes"]
    where = "all" if sample is None else f"a sample of {text.size(sample)}"
    return [*_size(row["name"], row), _speed(row["encode"]), _speed(row["decode"]), where]


def _size(name: str, row: Row) -> list[str]:
    each = row["bytes_per_changed_element"]
    shown = "-" if each is None else f"{each:.2f}"
    return [name, text.size(row["bytes"]), shown, text.times(row["times_smaller"])]


def _speed(stage: Row | None) -> str:
    return "-" if stage is None else f"{stage['bytes_per_second'] / 1e9:.2f}"


def _catch_up(rows: Sequence[Row]) -> list[str]:
    return text.table(
        (">deltas", ">size", ">changed", ">time", ">for each changed"),
        [
            (
                row["links"],
                text.size(row["bytes"]),
                text.count(row["changed_elements"]),
                text.seconds(row["seconds"]),
                _nanoseconds(row["seconds_per_changed_element"]),
            )
            for row in rows
        ],
    )


def _nanoseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e9:,.0f} ns"
