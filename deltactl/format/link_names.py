"""How the objects of a chain are called."""

from __future__ import annotations

import re

from deltactl.format.anchor import INDEX
from deltactl.format.delta_index import DELTA_INDEX

LINK_NAME = re.compile(r"(?P<kind>delta|anchor)s/step_(?P<step>\d{6,18})(?:\.safetensors|/.+)")
"""The name of an object that belongs to a link, sound or not."""


def delta_name(step: int) -> str:
    """The object that holds a step's delta, where it is one file."""
    return f"deltas/step_{step:06d}.safetensors"


def delta_directory(step: int) -> str:
    """The prefix of a step's delta, where it is several files."""
    return f"deltas/step_{step:06d}"


def anchor_file_name(step: int) -> str:
    """The object that holds a step's anchor, where it is one file."""
    return f"anchors/step_{step:06d}.safetensors"


def anchor_directory(step: int) -> str:
    """The prefix of a step's anchor, where it is a directory."""
    return f"anchors/step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step of the link that an object belongs to, sound or not; None where it is of none."""
    match = LINK_NAME.fullmatch(name)
    return int(match["step"]) if match else None


def is_in_directory(name: str) -> bool:
    """Whether an object is in the directory of a link, and not the only file of one."""
    return LINK_NAME.fullmatch(name) is not None and name.count("/") > 1


def index_of(directory: str) -> str:
    """The object that makes a link of a directory, "anchors/step_N" or "deltas/step_N"."""
    return f"{directory}/{INDEX if directory.startswith('anchors/') else DELTA_INDEX}"
