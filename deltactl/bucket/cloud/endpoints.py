"""Where a store is asked, if the environment says so."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from urllib.parse import urlsplit

from deltactl.bucket.cloud.refusals import Place, no_endpoint

_THEIR_OWN = (".amazonaws.com", ".amazonaws.com.cn", ".googleapis.com", ".core.windows.net")


def located(place: Place, endpoint: str | None) -> Place:
    """The place, with what of an endpoint may be shown, unless it is the store's own.

    Raises UsageError for one that is none: obstore would end in a panic.
    """
    if not endpoint:
        return place
    with contextlib.suppress(ValueError):
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
        plain = endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
        if plain and host and port != 0 and parts.scheme in ("http", "https"):
            if host.endswith(_THEIR_OWN):
                return place
            shown = f"[{host}]" if ":" in host else host
            return replace(
                place, endpoint=f"{parts.scheme}://{shown}" + (f":{port}" if port else "")
            )
    raise no_endpoint(place)
