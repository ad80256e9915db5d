"""What README begins with, and what its commands need."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.readme_command import README, commands

ROOT = README.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"deltactl", "tests"}
ELSEWHERE = {"vllm"}
"""What is imported only where it is installed: tests of a real vLLM have an environment apart."""


def test_readme_begins_with_the_demo_and_the_tests() -> None:
    demo, tests = commands(README.read_text())
    assert demo.startswith("pip install '.[demo]' && deltactl demo ")
    assert tests.startswith("pip install -e '.[test]' && python -m pytest ")


BLOCK = "```\nx\n```\n"


@pytest.mark.parametrize(
    "readme",
    ["", "## Tests\n", BLOCK, 3 * BLOCK, f"{BLOCK}\n## Tests\n{BLOCK}", f"{BLOCK}```\nx\ny\n```\n"],
)
def test_other_blocks_are_refused(readme: str) -> None:
    with pytest.raises(ValueError, match="2 commands of one line"):
        commands(readme)


def test_what_a_terminal_showed_is_no_command() -> None:
    assert commands(f"```\n$ x\nprinted\n```\n{2 * BLOCK}") == ["x", "x"]


def test_blocks_below_the_first_heading_do_not_count() -> None:
    assert commands(f"{BLOCK}\n```sh\ny z\n```\n\n## More\n{BLOCK}") == ["x", "y z"]


def imported_by(directory: Path) -> set[str]:
    """The modules that Python files name in their imports, the first part of each."""
    found: set[str] = set()
    for path in directory.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module).partition(".")[0])
    return found - sys.stdlib_module_names - OWN - ELSEWHERE


def named(requirements: list[str]) -> set[str]:
    """The distributions in a list of requirements, in one spelling."""
    return {
        re.split(r"[^\w.-]", each, maxsplit=1)[0].lower().replace("_", "-") for each in requirements
    }


def test_the_test_extra_names_whatever_the_tests_import() -> None:
    """An import that another package happens to bring along, or a tool that the developers have,
    is not there for whoever runs README's second command."""
    allowed = named(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])
    known = packages_distributions()
    for module in sorted(imported_by(ROOT / "tests")):
        distributions = {name.lower().replace("_", "-") for name in known.get(module, [module])}
        assert distributions & allowed, f"{module} is imported, and {distributions} is not required"
