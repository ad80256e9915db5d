"""Where chains live. ``open_bucket`` takes a directory today; other stores come by URL scheme."""

from __future__ import annotations

import re
from pathlib import Path

from deltactl.bucket.local import LocalBucket
from deltactl.core.errors import UsageError
from deltactl.core.store import Bucket


def open_bucket(url: str) -> Bucket:
    """The bucket at ``url``; it need not exist yet. Raises UsageError for an unknown scheme."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if scheme is None:
        return LocalBucket(Path(url))
    if scheme[1].lower() == "file":
        return LocalBucket(Path(url[len("file://") :]))
    raise UsageError(
        "unknown kind of bucket",
        file=url,
        expected="a directory, or file://",
        found=f"{scheme[1]}://",
    )
