"""The follower: has the server load each step that appears in the bucket, on its own time.

Nobody tells it; it looks. Where several steps have appeared it goes to the newest at once. What may
pass, as a server that does not answer, is tried again at the next look.
"""

from __future__ import annotations

import time
from typing import Any

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.core.errors import NotFound, Transient
from deltactl.demo.loop.processes import part, tell
from deltactl.server.apply import apply_to_servers

_LOOK = 0.1  # seconds between two looks at the bucket


def work(settings: dict[str, Any]) -> None:
    """Settings: bucket, server (URLs), last (the step after which nothing comes)."""
    bucket, seen, served = open_bucket(settings["bucket"]), frozenset[str](), -1
    while served < settings["last"]:
        links = _links(bucket)
        if links == seen:
            time.sleep(_LOOK)
            continue
        applied = apply_to_servers(bucket, None, [settings["server"]])
        row = applied.replicas[0]
        if isinstance(row.error, Transient):
            time.sleep(_LOOK)
            continue
        if row.error is not None:
            raise row.error
        seen = links
        if applied.step > served:
            served = applied.step
            tell(
                event="served",
                step=served,
                deltas=row.deltas,
                elements=row.elements,
                seconds_staging=row.seconds_staging,
                seconds_paused=row.seconds_paused,
            )


def _links(bucket: Bucket) -> frozenset[str]:
    try:
        names = [object.name for object in bucket.list()]
    except NotFound:
        return frozenset()
    return frozenset(name for name in names if name.startswith(("anchors/", "deltas/")))


if __name__ == "__main__":
    part(work)
