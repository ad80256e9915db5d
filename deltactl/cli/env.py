"""``deltactl env``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from deltactl import __version__
from deltactl.cli.interface import text
from deltactl.cli.interface.manual import manual
from deltactl.cli.interface.options import Json, Quiet, output
from deltactl.core.facts import facts_of

if TYPE_CHECKING:
    from deltactl.ops.environment import Environment


@manual(
    keys={
        "deltactl": "its version",
        "machine": "cpu, architecture, cores (those that may be used), memory_bytes, system, "
        "python, numpy, compiled (whether the inner loops are, or numpy does their work)",
        "packages": "versions of packages; null if not installed",
        "credentials": "by store (hf, s3, gs, az, vllm), the variables that are set and the files "
        "that are there; values are never printed, and no store is asked",
        "variables": "names of other variables that are set and change what commands do",
        "cache": "where the cache is",
        "cache_bytes": "how much it takes",
        "scratch": "where temporary files go",
        "free_bytes": "how much is free there",
    },
    exits=[],
    examples=["deltactl env", "deltactl env --json"],
)
def env(ctx: typer.Context, json: Json = False, quiet: Quiet = False) -> None:
    """Show versions, caches, and which credentials are set, for bug reports.

    Prints names of variables and files, never their values. Asks no store and no server.
    """
    screen = output(ctx, json=json, quiet=quiet)
    from deltactl.bench.machine import facts
    from deltactl.ops.environment import environment

    found, machine = environment(), facts()
    own = ("packages", "credentials", "variables", "cache", "cache_bytes", "scratch", "free_bytes")
    document = {"deltactl": __version__, "machine": machine, **facts_of(found, *own)}
    screen.result(document, lambda: _lines(found, machine))


def _lines(found: Environment, machine: dict[str, Any]) -> Iterable[str]:
    cores, memory = text.plural(machine["cores"], "core"), text.size(machine["memory_bytes"])
    versions = [f"{name} {number}" for name, number in found.packages.items() if number]
    rows = [
        ("deltactl", __version__),
        ("python", f"{machine['python']}, {machine['system']} {machine['architecture']}"),
        ("machine", f"{machine['cpu']}, {cores}, {memory}"),
        ("inner loops", "compiled" if machine["compiled"] else "numpy: not compiled here"),
        ("packages", ", ".join(versions)),
        ("cache", f"{found.cache}, {text.size(found.cache_bytes)}"),
        ("scratch", f"{found.scratch}, {text.size(found.free_bytes)} free"),
        ("variables", ", ".join(found.variables) or "none set"),
    ]
    for store, places in found.credentials.items():
        rows.append((f"{store} credentials", ", ".join(places) or "none found"))
    yield from text.pairs(rows)
