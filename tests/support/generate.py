"""Writes completions/ and man/ from the application: ``python -m tests.support.generate``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from deltactl import __version__
from deltactl.cli.app import ENVIRONMENT, app
from deltactl.cli.interface.completion import SCRIPTS
from deltactl.cli.interface.exits import MEANINGS
from deltactl.cli.interface.manual import Verb

ROOT = Path(__file__).parents[2]
DATE = "2025-12-01"
"""In the footer of the pages. Fixed, so that the same application gives the same bytes."""

_COMPLETIONS = {"bash": "deltactl.bash", "zsh": "_deltactl", "fish": "deltactl.fish"}


def generated() -> dict[str, str]:
    """Every generated file: path from the top of the repository, and content."""
    files = {f"completions/{_COMPLETIONS[shell]}": text for shell, text in SCRIPTS.items()}
    root: Any = typer.main.get_command(app)
    context = root.make_context("deltactl", [], resilient_parsing=True)
    verbs: dict[str, Verb] = {name: root.get_command(context, name) for name in root.commands}
    files["man/deltactl.1"] = _page(_main_page(root, verbs))
    for name, verb in verbs.items():
        files[f"man/deltactl-{name}.1"] = _page(_verb_page(name, verb, verbs))
    return files


def _main_page(root: Any, verbs: Mapping[str, Verb]) -> Iterator[str]:
    summary, *rest = _paragraphs(root.help)
    yield f'.TH DELTACTL 1 "{DATE}" "deltactl {__version__}" "User Commands"'
    yield from (".SH NAME", *_prose([f"deltactl - {_name_line(summary)}"]))
    yield from (".SH SYNOPSIS", ".B deltactl", _roman("[OPTIONS] COMMAND [ARGS]..."))
    yield from (".SH DESCRIPTION", *_prose(rest))
    yield ".SH COMMANDS"
    for name, verb in verbs.items():
        yield from _entry(f"\\fBdeltactl\\-{name}\\fR(1)", _paragraphs(verb.help)[0])
    yield from (".SH OPTIONS", *_options(root))
    yield from (".SH EXIT STATUS", *_table(MEANINGS))
    yield from (".SH ENVIRONMENT", *_table(ENVIRONMENT))
    yield from _see_also([*(f"deltactl-{name}" for name in verbs)])


def _verb_page(name: str, verb: Verb, verbs: Mapping[str, Verb]) -> Iterator[str]:
    summary, *rest = _paragraphs(verb.help)
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    yield f'.TH DELTACTL\\-{name.upper()} 1 "{DATE}" "deltactl {__version__}" "User Commands"'
    yield from (".SH NAME", *_prose([f"deltactl-{name} - {_name_line(summary)}"]))
    synopsis = " ".join(["[OPTIONS]", *(_in_synopsis(a) for a in arguments)])
    yield from (".SH SYNOPSIS", f".B deltactl {name}", _roman(synopsis))
    yield from (".SH DESCRIPTION", *_prose(rest or [summary]))
    if arguments:
        yield ".SH ARGUMENTS"
        for argument in arguments:
            yield from _entry(f"\\fI{_roman(argument.metavar)}\\fR", _with_default(argument))
    yield from (".SH OPTIONS", *_options(verb))
    yield ".SH JSON"
    yield from _prose(["With --json the command prints one object on stdout, also when it fails:"])
    yield from _table(verb.manual.keys)
    failure = "what, file, tensor, step, expected, found, hint, exit_code"
    yield from _entry(
        "\\fBerror\\fR", f"instead of all others, where the command failed: {failure}"
    )
    yield ".PP"
    yield from _prose(["Sizes are in bytes, times in seconds. Ignore keys that you do not know."])
    yield from (".SH EXIT STATUS", *_table(verb.manual.exits))
    yield from (".SH EXAMPLES", ".nf")
    yield from (_roman(example) for example in verb.manual.examples)
    yield ".fi"
    yield from _see_also(["deltactl", *(f"deltactl-{other}" for other in verbs if other != name)])


def _options(command: Any) -> Iterator[str]:
    for option in command.params:
        if option.param_type_name != "option":
            continue
        names = sorted(option.opts, key=len)
        title = ", ".join(f"\\fB{_roman(opt)}\\fR" for opt in names)
        if not (option.is_flag or option.count):
            title += f" \\fI{_roman(option.metavar)}\\fR"
        yield from _entry(title, _with_default(option))
    yield from _entry("\\fB\\-h\\fR, \\fB\\-\\-help\\fR", "Show a help page and exit.")


def _with_default(param: Any) -> str:
    is_flag = param.param_type_name == "option" and (param.is_flag or param.count)
    shown = None if is_flag else param.default
    return param.help if shown in (None, [], ()) else f"{param.help} Default: {shown}."


def _in_synopsis(argument: Any) -> str:
    name = f"{argument.metavar}..." if argument.nargs != 1 else argument.metavar
    return str(name if argument.required else f"[{name}]")


def _see_also(names: Iterable[str]) -> Iterator[str]:
    yield ".SH SEE ALSO"
    pages = [*sorted((name, 1) for name in names), ("deltactl-python", 3), ("deltactl-format", 5)]
    for at, (name, section) in enumerate(pages):
        comma = "," if at < len(pages) - 1 else ""
        yield f".BR {_roman(name)} ({section}){comma}"


def _table(rows: Mapping[Any, str]) -> Iterator[str]:
    for key, meaning in rows.items():
        yield from _entry(f"\\fB{_roman(str(key))}\\fR", meaning)


def _entry(title: str, text: str) -> Iterator[str]:
    yield from (".TP", title, *_prose([text]))


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", (text or "").strip())]


def _name_line(summary: str) -> str:
    """A summary as NAME wants it: no capital, no full stop."""
    return summary[:1].lower() + summary[1:].rstrip(".")


def _prose(paragraphs: Iterable[str]) -> Iterator[str]:
    """Paragraphs of lines; each sentence begins on a line of its own, as roff wants it."""
    for number, paragraph in enumerate(paragraphs):
        if number:
            yield ".PP"
        for sentence in re.split(r"(?<=[.:;]) (?=[A-Z])", paragraph):
            for line in textwrap.wrap(sentence, 76, break_on_hyphens=False, break_long_words=False):
                yield _roman(line)


def _roman(text: str) -> str:
    """Text that roff prints as it stands."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _page(lines: Iterable[str]) -> str:
    return '.\\" Generated by tests/support/generate.py.\n' + "\n".join(lines) + "\n"


def main() -> None:
    """Write all files, and remove pages of commands that are no more."""
    files = generated()
    for stale in (ROOT / "man").glob("*.1"):
        if f"man/{stale.name}" not in files:
            stale.unlink()
    for name, text in files.items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
