"""Numbers, names and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf


def count(number: int | None) -> str:
    """``1234567`` as ``1,234,567``; ``-`` for what is not known."""
    return "-" if number is None else f"{number:,}"


def size(number: float) -> str:
    """Bytes in decimal units: ``999 B``, ``1.23 kB``, ``45.6 MB``."""
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        number /= 1000
        if number < 999.5 or unit == "PB":
            break
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def share(fraction: float | None) -> str:
    """A fraction in percent, which never rounds to none or all where it is neither."""
    if fraction is None:
        return "-"
    text = f"{fraction:.2%}"
    if text == "0.00%" and fraction > 0:
        text = "<0.01%"
    elif text == "100.00%" and fraction < 1:
        text = ">99.99%"
    return text


def times(factor: float) -> str:
    """How many times smaller or larger: ``148x``, ``3.2x``."""
    return f"{factor:,.{0 if factor >= 99.5 else 1}f}x"


def short(digest: str | None) -> str:
    """The first digits of a digest, enough to tell states apart by eye."""
    return "-" if digest is None else digest[:12]


def plural(number: int, noun: str) -> str:
    """``1 link``, ``2 links``, ``1,000 links``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def read(size_in_bytes: int, requests: int) -> str:
    """How much a command read of a bucket: ``read 12.3 kB in 7 requests``."""
    return f"read {size(size_in_bytes)} in {plural(requests, 'request')}"


def shape(dims: Sequence[int] | None) -> str:
    """``[4, 8]``; ``-`` for what is not known."""
    return "-" if dims is None else f"[{', '.join(map(str, dims))}]"


def printable(text: str) -> str:
    """Text fit for a terminal: what a file's author put in that would steer it is spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Names and values, a line each, the values in one column."""
    known = [(name, str(value)) for name, value in rows]
    width = max((len(name) for name, _ in known), default=0)
    return [f"{name:<{width}}  {value}" for name, value in known]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table. A column is flush right if its head begins with ``>``."""
    right = [title.startswith(">") for title in head]
    cells = [[title.lstrip(">") for title in head]] + [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        filled = zip(row, widths, right, strict=True)
        return "  ".join(f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in filled).rstrip()

    return [line(row) for row in cells]


def seconds(number: float) -> str:
    """A time: ``0.7 ms``, ``12 ms``, ``3.4 s``, ``5.6 min``, ``7.8 h``."""
    limits = (("ms", 1e-3, 1.0), ("s", 1.0, 100.0), ("min", 60.0, 6000.0), ("h", 3600.0, inf))
    unit, length = next((unit, length) for unit, length, limit in limits if number < limit)
    value = number / length
    if 0 < value < 0.05:
        return f"<0.1 {unit}"
    return f"{value:,.{1 if value < 9.95 else 0}f} {unit}"


def bandwidth(bits_per_second: float) -> str:
    """A rate in bits: ``100 Mbit/s``, ``2.5 Gbit/s``."""
    giga = bits_per_second >= 1e9
    return f"{bits_per_second / (1e9 if giga else 1e6):,g} {'G' if giga else 'M'}bit/s"
