"""Names from outside: of files, of paths below a directory, of objects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.core.errors import UsageError
from deltactl.files.names import check_object_name, is_plain_name, is_plain_path, is_relative

_PARTS = st.lists(
    st.sampled_from(["", ".", "..", "a", "b.c", "...", "\\", "\n", "\0", "é"]), max_size=4
)


@pytest.mark.parametrize(
    "name", ["a", "a.b", "...", "a b", "model-00001-of-00002.safetensors", "é", "層"]
)
def test_plain_names(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        "../a",
        "a\\b",
        "a\0",
        "a\n",
        "\x1b[2J",
        "\x7f",
        "\u202e",
        "\ud800",
    ],
    ids=ascii,
)
def test_names_that_are_no_plain_names(name: str) -> None:
    assert not is_plain_name(name)


@given(_PARTS)
def test_a_relative_name_stays_below_and_has_one_spelling(parts: list[str]) -> None:
    name = "/".join(parts)
    normal = os.path.normpath(f"/root/{name}") if "\0" not in name else ""
    below = normal == f"/root/{name}" and not name.startswith("/") and name != ""
    assert is_relative(name) is below
    if below:
        assert check_object_name(name) == name
    else:
        with pytest.raises(UsageError, match="no plain name"):
            check_object_name(name)


@given(_PARTS)
def test_a_plain_path_is_of_names_that_every_system_can_hold(parts: list[str]) -> None:
    name = "/".join(parts)
    assert is_plain_path(name) is (is_relative(name) and not {"\\", "\n", "\0"} & set(name))
    assert is_plain_name(name) is (is_plain_path(name) and Path(name).name == name)


@pytest.mark.parametrize("name", [None, 1, b"a", ["a"]])
def test_what_is_no_text_is_no_path(name: object) -> None:
    assert not is_plain_path(name)
