"""Rules that hold for the help of every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main

from deltactl import __version__
from deltactl.chain.anchor_policy import ANCHOR_EVERY
from deltactl.cli.app import app
from deltactl.cli.interface import exits, options
from deltactl.cli.interface.manual import Verb
from deltactl.cli.interface.options import EncodingName
from deltactl.cli.verify import Level
from deltactl.codec import DEFAULT, ENCODINGS
from deltactl.ops.advice import AUTO, BANDWIDTH
from deltactl.ops.verify import LEVELS
from tests.cli.conftest import Cli

GROUP: Any = typer.main.get_command(app)
VERBS: dict[str, Verb] = GROUP.commands
PARAMS = [(name, param) for name, verb in VERBS.items() for param in verb.params]
PARAMS += [("", param) for param in GROUP.params]

PYDANTIC = {
    "annotated_types",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}
"""What typer takes where it is installed."""
WRITES = ("push", "copy", "clean")


def test_the_commands() -> None:
    expected = ["push", "pull", "copy", "log", "verify", "clean", "diff", "apply", "show", "stats"]
    expected += ["doctor", "demo", "bench", "env"]
    assert list(VERBS) == expected


@pytest.mark.parametrize(("verb", "param"), PARAMS, ids=lambda p: getattr(p, "name", p))
def test_every_argument_and_option_has_help_that_is_a_sentence(verb: str, param: Any) -> None:
    assert param.help, verb
    assert param.help[0].isupper() or param.help.split(":")[0] in LEVELS
    assert param.help.endswith(".")


@pytest.mark.parametrize(("verb", "param"), PARAMS, ids=lambda p: getattr(p, "name", p))
def test_every_value_has_a_name_of_its_own(verb: str, param: Any) -> None:
    if param.param_type_name == "argument" or not (param.is_flag or param.count):
        assert param.metavar, verb


@pytest.mark.parametrize("name", VERBS)
def test_every_command_has_the_modes(name: str) -> None:
    options = {option for param in VERBS[name].params for option in param.opts}
    assert {"--json", "--quiet", "-q"} <= options
    assert "--token" not in options
    if name in WRITES:
        assert {"--dry-run", "-n"} <= options


@pytest.mark.parametrize("name", VERBS)
def test_every_command_documents_itself(name: str, cli: Cli) -> None:
    ran = cli(name, "--help")
    assert ran.code == 0
    assert ran.stderr == ""
    assert "\x1b" not in ran.stdout
    manual = VERBS[name].manual
    assert {0, 1, 2, 130} <= manual.exits.keys() <= exits.MEANINGS.keys()
    for title in ("JSON", "Exit status", "Examples"):
        assert re.search(rf"^{title}.*:$", ran.stdout, re.MULTILINE)
    for code in manual.exits:
        assert re.search(rf"^  {code} ", ran.stdout, re.MULTILINE)
    for key in manual.keys:
        assert re.search(rf"^  {re.escape(key)}\b", ran.stdout, re.MULTILINE)
    assert manual.keys
    assert manual.examples


@pytest.mark.parametrize("name", VERBS)
def test_examples_use_options_that_there_are(name: str) -> None:
    for example in VERBS[name].manual.examples:
        for part in re.split(r"[|&]+", example):
            words = part.split()
            if "deltactl" not in words:
                continue
            verb, *rest = words[words.index("deltactl") + 1 :]
            known = {option for param in VERBS[verb].params for option in param.opts}
            assert {word for word in rest if word.startswith("-") and word != "-"} <= known


@pytest.mark.parametrize("name", VERBS)
def test_help_has_no_markup(name: str) -> None:
    assert not re.search(r"\[/?(bold|red|green|cyan|dim|yellow)\]|``", VERBS[name].help or "")


@pytest.mark.parametrize("name", VERBS)
def test_the_list_of_commands_shows_whole_summaries(name: str, cli: Cli) -> None:
    summary = VERBS[name].get_short_help_str()
    assert summary.endswith(".")
    assert len(summary) < 100
    assert " ".join([name, *summary.split()]) in " ".join(cli("--help").stdout.split())


def test_the_words_of_the_interface_are_the_librarys() -> None:
    assert set(get_args(EncodingName)) == {*ENCODINGS, AUTO}
    assert options.rate(options.BANDWIDTH) == BANDWIDTH
    assert get_args(Level) == LEVELS
    defaults = {(verb, param.name): param.default for verb, param in PARAMS}
    assert defaults["diff", "encoding"] == defaults["push", "encoding"] == DEFAULT
    assert defaults["push", "anchor_every"] == ANCHOR_EVERY
    assert defaults["verify", "level"] == "data"


def test_version(cli: Cli) -> None:
    ran = cli("--version")
    assert (ran.code, ran.stdout) == (0, f"deltactl {__version__}\n")


def test_help_names_the_program_however_it_was_started(process: Cli) -> None:
    assert process("-h").stdout.startswith("Usage: deltactl [OPTIONS] COMMAND")


def imported_by(*args: str, **env: str) -> set[str]:
    """The modules that Python imports when called so, by its own account."""
    command = [sys.executable, "-X", "importtime", *args]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    return set(re.findall(r"\|\s+([\w.]+)$", done.stderr, re.MULTILINE))


@pytest.fixture(scope="module")
def of_typer() -> set[str]:
    """What there is no help without."""
    return imported_by("-c", "import typer.main")


def others(found: set[str], of_typer: set[str]) -> set[str]:
    """The packages among the modules that are neither ours nor Python's nor typer's."""
    assert "deltactl.cli.app" in found
    packages = {module.partition(".")[0] for module in found - of_typer}
    return packages - sys.stdlib_module_names - PYDANTIC - {"deltactl", "typer"}


COMPLETION = {
    "_DELTACTL_COMPLETE": "complete_fish",
    "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    "_TYPER_COMPLETE_ARGS": "deltactl verify --level re",
}


@pytest.mark.parametrize("args", [("--help",), *((name, "--help") for name in VERBS)], ids=" ".join)
def test_help_imports_nothing_heavy(args: tuple[str, ...], of_typer: set[str]) -> None:
    """So that it is quick: which module takes its time is no matter of the machine's."""
    assert others(imported_by("-m", "deltactl", *args), of_typer) == set()


def test_completion_imports_nothing_heavy(of_typer: set[str]) -> None:
    assert others(imported_by("-m", "deltactl", **COMPLETION), of_typer) == set()


def test_a_heavy_import_would_be_seen(of_typer: set[str]) -> None:
    found = imported_by("-c", "import deltactl.cli.app, numpy")
    assert others(found, of_typer) == {"numpy"}


def test_the_entry_point_is_installed() -> None:
    script = Path(sys.executable).with_name("deltactl")
    if not script.exists():
        pytest.skip("deltactl is not installed in this environment")
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.stdout == f"deltactl {__version__}\n"
