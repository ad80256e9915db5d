"""The generated files are what the application would generate now, and are well formed."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from tests.support.generate import ROOT, generated
from tests.support.tools import need

FILES = generated()
PAGES = sorted(name for name in FILES if name.startswith("man/"))
REMEDY = "run: python -m tests.support.generate"


@pytest.mark.parametrize("name", FILES)
def test_no_drift(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name], REMEDY


def test_no_file_is_left_of_what_is_no_more() -> None:
    found = {path.name for path in (ROOT / "completions").iterdir()}
    found |= {path.name for path in (ROOT / "man").glob("*.1")}
    assert found == {name.split("/")[1] for name in FILES}, REMEDY


@pytest.mark.parametrize("name", PAGES)
def test_man_pages_have_no_fault(name: str) -> None:
    done = subprocess.run(
        [need("mandoc"), "-T", "lint", ROOT / name], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("name", PAGES)
def test_man_pages_render_with_all_sections(name: str) -> None:
    done = subprocess.run([need("mandoc"), "-T", "ascii", ROOT / name], capture_output=True)
    text = done.stdout.decode().replace("\b", "")
    titles = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"]
    titles += ["ENVIRONMENT"] if name == "man/deltactl.1" else ["JSON", "EXAMPLES"]
    for title in titles:
        assert "".join(2 * letter if letter != " " else " " for letter in title) in text


def test_the_wheel_installs_every_page_and_completion() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    pages = {f"man/{path.name}" for path in (ROOT / "man").iterdir()}
    assert set(shared) == pages | {name for name in FILES if name.startswith("completions/")}
    for source, target in shared.items():
        assert (ROOT / source).is_file()
        if source.startswith("man/"):
            section = source.rsplit(".", 1)[1]
            assert target == f"share/man/man{section}/{source.removeprefix('man/')}"
