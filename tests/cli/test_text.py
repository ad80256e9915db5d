"""Numbers, names and tables as people read them."""

from __future__ import annotations

import pytest

from deltactl.cli.interface import text


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (67_110_912, "67.1 MB"),
        (1_200_000_000, "1.20 GB"),
        (14e15, "14.0 PB"),
        (14e18, "14000 PB"),
    ],
)
def test_size(number: float, shown: str) -> None:
    assert text.size(number) == shown


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (None, "-"),
        (0, "0.00%"),
        (1e-9, "<0.01%"),
        (0.98904, "98.90%"),
        (1 - 1e-9, ">99.99%"),
        (1, "100.00%"),
    ],
)
def test_share_never_rounds_to_none_or_all(fraction: float | None, shown: str) -> None:
    assert text.share(fraction) == shown


@pytest.mark.parametrize(
    ("factor", "shown"), [(3.21, "3.2x"), (99.6, "100x"), (12345.6, "12,346x")]
)
def test_times(factor: float, shown: str) -> None:
    assert text.times(factor) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 links"), (1, "1 link"), (1234567, "1,234,567 links")]
)
def test_plural(number: int, shown: str) -> None:
    assert text.plural(number, "link") == shown


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("é 模型", "é 模型"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb\r", r"a\nb\r"),
        ("\udcff", r"\udcff"),
        ("right\u202eleft", r"right\u202eleft"),
    ],
)
def test_printable_spells_out_what_would_steer_a_terminal(raw: str, shown: str) -> None:
    assert text.printable(raw) == shown


def test_pairs_align_the_values() -> None:
    assert text.pairs([("a", 1), ("long", "x")]) == ["a     1", "long  x"]
    assert text.pairs([]) == []


def test_table_aligns_columns_and_leaves_no_space_at_the_ends() -> None:
    lines = text.table((">step", "kind", "note"), [(1, "anchor", ""), (10, "delta", "x")])
    assert lines == ["step  kind    note", "   1  anchor", "  10  delta   x"]


def test_table_without_rows_is_its_head() -> None:
    assert text.table(("a", ">b"), []) == ["a  b"]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0.0 ms"),
        (1e-9, "<0.1 ms"),
        (0.0007, "0.7 ms"),
        (0.0123, "12 ms"),
        (3.4, "3.4 s"),
        (99.0, "99 s"),
        (336, "5.6 min"),
        (28_080, "7.8 h"),
        (36_000_000, "10,000 h"),
    ],
)
def test_seconds(number: float, shown: str) -> None:
    assert text.seconds(number) == shown


@pytest.mark.parametrize(
    ("rate", "shown"), [(5e5, "0.5 Mbit/s"), (1e8, "100 Mbit/s"), (2.5e9, "2.5 Gbit/s")]
)
def test_bandwidth(rate: float, shown: str) -> None:
    assert text.bandwidth(rate) == shown
