"""What each room says of itself in its __init__: the names to call are there, and so is a word."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import deltactl

ROOMS = [found.name for found in pkgutil.iter_modules(deltactl.__path__) if found.ispkg]


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_that_a_room_gives_are_there(room: str) -> None:
    said = importlib.import_module(f"deltactl.{room}").__doc__
    assert said
    names = said.partition("Names to call:")[2]
    for path in re.findall(r"``([\w.]+)``", names):
        at = importlib.import_module(f"deltactl.{room}")
        for name in path.split("."):
            if not hasattr(at, name):  # then it is a module that nobody has imported yet
                importlib.import_module(f"{at.__name__}.{name}")
            at = getattr(at, name)
