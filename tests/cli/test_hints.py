"""Commands in hints: what they name can be pasted into a shell, whatever a path is called."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import deltactl
from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import Conflict
from deltactl.format.link_names import delta_name
from deltactl.trainer.upload.put import put_link
from tests.cli.conftest import Checkpoints, Cli

SOURCES = sorted(Path(deltactl.__file__).parent.rglob("*.py"))
_COMMAND = re.compile(r"deltactl [a-z]+ (?:[^;,]* )?$")
_OF_PEOPLE = re.compile(r"\b(url|path|file|dest|directory|target|bucket|source|place)$")
"""Names of what a person or a program named, which may have any character in it."""

AWKWARD = "my run; rm -rf $HOME 'x'"


def in_commands(source: str) -> Iterator[tuple[int, str]]:
    """Line and expression of all that f-strings put into a command of ours."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                if _COMMAND.search(text) and not text.endswith("--server "):  # an address
                    yield node.lineno, ast.unparse(part.value)
                text += "X"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_command_quotes_what_people_named(path: Path) -> None:
    bare = [
        (line, expression)
        for line, expression in in_commands(path.read_text())
        if _OF_PEOPLE.search(expression)
    ]
    assert bare == []


def test_the_rule_finds_what_it_is_for() -> None:
    found = list(in_commands('f"see deltactl log {chain.url} --json; {x.url}" f"{y.path}"'))
    assert found == [(1, "chain.url")]
    assert _OF_PEOPLE.search("chain.url") and not _OF_PEOPLE.search("quote(chain.url)")


def words(hint: str) -> list[str]:
    """A hint's command, as a shell takes it apart."""
    return shlex.split(hint[hint.index("deltactl") :])


def test_hints_that_name_an_awkward_directory(
    cli: Cli, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    root = tmp_path / AWKWARD
    root.mkdir()
    ran = cli("log", root, "--json")
    assert ran.code == 10
    assert words(ran.json["error"]["hint"]) == ["deltactl", "push", "CKPT", str(root)]
    bucket = LocalBucket(root)
    assert bucket.put(delta_name(1), Path(__file__))
    with pytest.raises(Conflict) as caught:
        put_link(bucket, delta_name(1), Path(deltactl.__file__), 1)
    assert f"see deltactl log {shlex.quote(bucket.url)};" in str(caught.value.hint)


def test_an_ordinary_address_is_shown_as_it_is(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run-1.2_x@7").mkdir()
    hint = cli("log", tmp_path / "run-1.2_x@7", "--json").json["error"]["hint"]
    assert hint == f"deltactl push CKPT {tmp_path / 'run-1.2_x@7'}"
