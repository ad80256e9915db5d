"""What ``--encoding auto`` found, for scripts and for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltactl.cli.interface import text
from deltactl.core.facts import as_json

if TYPE_CHECKING:
    from deltactl.ops.advice import Advice

KEY = (
    "with --encoding auto, of each encoding: encoding, seconds (expected to make, ship and decode "
    "the delta), bytes (expected size); otherwise null"
)
"""The manual's line on the key ``advice``."""


def advice_document(advice: Advice | None) -> list[dict[str, Any]] | None:
    """The value of the key ``advice``."""
    return None if advice is None else as_json(list(advice.estimates))


def advice_lines(advice: Advice | None) -> list[str]:
    """A table of what was expected of each encoding; nothing where nobody asked."""
    if advice is None:
        return []
    rows = [(e.encoding, text.size(e.bytes), text.seconds(e.seconds)) for e in advice.estimates]
    head = ("expected of", ">size", f">made, shipped at {text.size(advice.bandwidth)}/s, decoded")
    return ["", *text.table(head, rows), f"taken: {advice.encoding}"]
