"""What a command's help and man page say beside its options: JSON keys, exit status, examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typer.core import TyperCommand

from deltactl.cli.interface.exits import MEANINGS

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "deltactl_manual"


@dataclass(frozen=True, slots=True)
class Manual:
    """``exits``: status to meaning. ``keys``: of the ``--json`` object. ``examples``: commands."""

    exits: Mapping[int, str]
    keys: Mapping[str, str]
    examples: Sequence[str]


def manual(
    *, keys: Mapping[str, str], exits: Sequence[int], examples: Sequence[str], **special: str
) -> Callable[[F], F]:
    """Attach a manual to a command. Statuses 0, 1, 2 and 130 are everybody's.

    ``special``: another meaning of one status, as ``exit_1="they differ"``.
    """
    own = {int(name.removeprefix("exit_")): meaning for name, meaning in special.items()}
    codes = sorted({0, 1, 2, 130, *exits, *own})
    known = {**MEANINGS, 1: "any other failure", **own}
    made = Manual({code: known[code] for code in codes}, keys, examples)

    def attach(function: F) -> F:
        setattr(function, _ATTRIBUTE, made)
        return function

    return attach


class Verb(TyperCommand):
    """A command whose help ends with its manual."""

    @property
    def manual(self) -> Manual:
        found = getattr(self.callback, _ATTRIBUTE)
        assert isinstance(found, Manual)
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line, with plain names for the arguments that have to be given."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first paragraph of the help, whole."""
        return " ".join((self.help or "").strip().split("\n\n")[0].split())

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the manual's sections after the options."""
        with formatter.section("JSON (one object on stdout; ignore keys that you do not know)"):
            formatter.write_dl(list(self.manual.keys.items()))
        with formatter.section("Exit status"):
            formatter.write_dl([(str(code), text) for code, text in self.manual.exits.items()])
        with formatter.section("Examples"):
            for example in self.manual.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
