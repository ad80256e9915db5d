"""What a store gives in pages, whole or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deltactl.bucket.cloud.refusals import Place, endless, senseless, truncated

_EMPTY_PAGES = 100
"""How many in a row may hold nothing, as after much was removed."""


def pages(
    ask: Callable[..., Mapping[str, Any]], place: Place, rows: str, tokens: Mapping[str, str]
) -> Iterator[Mapping[str, Any]]:
    """The pages of one of S3's listings.

    ``ask`` gives one, ``tokens`` are its parameters that say where to go on, with the keys of the
    reply that hold them; the first has to. ``rows``: the key of what is listed. Raises Malformed
    for a page that goes on and does not say where, for what goes in circles, and for what is none.
    """
    where: dict[str, Any] = {}
    seen, empty = set[tuple[Any, ...]](), 0
    while True:
        page = ask(**where)
        if not isinstance(page.get("IsTruncated"), bool):
            raise senseless(place, None)
        yield page
        if not page["IsTruncated"]:
            return
        where = {asked: page[given] for asked, given in tokens.items() if page.get(given)}
        if next(iter(tokens)) not in where:
            raise truncated(place)
        token = tuple(where.values())
        empty = 0 if page.get(rows) else empty + 1
        if token in seen or empty > _EMPTY_PAGES:
            raise endless(place)
        seen.add(token)
