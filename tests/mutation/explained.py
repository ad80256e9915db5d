"""Mutants that no test is to kill, and why: ``explained.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.mutation.mutants import Mutant

TABLE = Path(__file__).with_name("explained.toml")

Name = tuple[str, str, str, int]
Explained = Mapping[str, Mapping[Name, str]]
"""By module, and by the mutant's name, the reason."""


def explained(table: Path = TABLE) -> Explained:
    """The table. Raises ValueError for a row that lacks something, or gives no reason."""
    found: dict[str, dict[Name, str]] = {}
    for row in tomllib.loads(table.read_text()).get("mutant", []):
        missing = {"module", "where", "was", "now", "why"} - row.keys()
        if missing or not row["why"].strip():
            raise ValueError(f"a row lacks {sorted(missing) or 'a reason'}: {row}")
        name = row["where"], row["was"], row["now"], row.get("nth", 0)
        found.setdefault(row["module"], {})[name] = row["why"]
    return found


def row_for(module: str, mutant: Mutant) -> str:
    """The row to fill in, for the table."""
    values = {"module": module, "where": mutant.where, "was": mutant.was, "now": mutant.now}
    lines = [f"{key} = {_quoted(value)}" for key, value in values.items()]
    nth = [f"nth = {mutant.nth}"] if mutant.nth else []
    return "\n".join(["[[mutant]]", *lines, *nth, 'why = ""', ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f"'{text}'" if "'" not in text else f'"{escaped}"'
