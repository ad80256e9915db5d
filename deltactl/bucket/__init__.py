"""Where chains live: a directory, or what a URL's scheme names."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltactl.bucket.local import LocalBucket
from deltactl.bucket.retrying import RetryingBucket, eager
from deltactl.bucket.throttle import Throttle
from deltactl.chain.store import Bucket, refuse_secret
from deltactl.core.errors import UsageError

_LOCAL_JOBS = 16  # on a network file system it is latency that is waited for
_HUB_JOBS = 16


def open_bucket(
    url: str, *, jobs: int | None = None, limit_rate: int | None = None, publishes: bool = False
) -> Bucket:
    """The bucket at ``url``; it need not exist yet.

    ``jobs``: requests to make at once, by default what suits the store. ``limit_rate``: bytes a
    second, of all transfers together. ``publishes``: for a training run, which tries again sooner
    what a remote one fails to do. Raises UsageError for an unknown scheme, for a password in
    the address, and for a limit that the store's client cannot keep.
    """
    refuse_secret(url)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if not url:
        raise UsageError("the bucket has no name")
    if scheme is None and re.match(r"(s3|gs|az|hf|file|https?):", url, re.IGNORECASE):
        what = "the bucket's name looks like a URL but is not one"
        hint = "write SCHEME://, or ./ before the name of a directory"
        raise UsageError(what, expected="s3://BUCKET/PREFIX, a directory or the like", hint=hint)
    throttle = None if limit_rate is None else Throttle(limit_rate)
    remote = eager if publishes else _remote
    if scheme is None:
        return LocalBucket(Path(url), jobs or _LOCAL_JOBS, throttle)
    if scheme[1].lower() == "file":
        return LocalBucket(_local_path(url), jobs or _LOCAL_JOBS, throttle)
    if scheme[1].lower() == "hf":
        return remote(_open_hub(url, jobs or _HUB_JOBS, limit_rate))
    if scheme[1].lower() in ("s3", "gs", "az"):
        from deltactl.bucket.cloud.stores import open_objects

        return remote(open_objects(url, jobs, throttle))
    raise UsageError(
        "unknown kind of bucket",
        file=url,
        expected="a directory, file://, hf://buckets/, s3://, gs:// or az://",
        found=f"{scheme[1]}://",
    )


def _open_hub(url: str, jobs: int, limit_rate: int | None) -> Bucket:
    if limit_rate is not None:
        what = "the rate of transfers with the Hub cannot be limited: its client, Xet, has no limit"
        raise UsageError(what, hint="leave the limit out")
    from deltactl.bucket.hub.bucket import HubBucket  # slow to import

    return HubBucket(url, jobs)


def _remote(bucket: Bucket) -> Bucket:
    """A bucket behind a network, as every such scheme of ``open_bucket`` gives it."""
    return RetryingBucket(bucket)


def _local_path(url: str) -> Path:
    """The path of a file URL (RFC 8089). Raises UsageError for another machine's."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        what = "a file URL names an absolute path on this machine"
        raise UsageError(what, file=url, expected="file:///PATH")
    return Path(unquote(parts.path))
