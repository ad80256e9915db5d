"""Calls of ``huggingface_hub`` that end in bounded time, in silence, and with errors of ours.

Its HTTP client is shared by everything in the process. It is changed for calls made within
``calls`` alone, which get a timeout and a single try: trying again is for whoever holds the bucket,
who is told for how long to wait. Importing this turns the library's progress bars off, and gives
Xet settings that end in bounded time too, each unless the environment says otherwise; Xet takes
them when it is first used in the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, get_session
from huggingface_hub.errors import (
    BucketBatchError,
    EntryNotFoundError,
    HfHubHTTPError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from deltactl.bucket.hub.errors import of_connection, of_status, of_xet
from deltactl.bucket.said import plain
from deltactl.core.errors import DeltactlError, Malformed, NotFound, UsageError

TIMEOUT = 60.0
"""Seconds without a byte after which the Hub is taken for dead."""

XET_SETTINGS = {
    # Three tries a second apart; with the defaults a storage that is down is asked for 200 s.
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "1s",
    "HF_XET_CLIENT_CONNECT_TIMEOUT": "20s",
    # It runs while a block is sent as well, and Xet takes up to 90 s for one to be healthy.
    "HF_XET_CLIENT_READ_TIMEOUT": "120s",
}
for _name, _value in XET_SETTINGS.items():
    os.environ.setdefault(_name, _value)

if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
    disable_progress_bars()

_EXPECTED = (416, 422)  # a range past the end; a batch of which nothing worked, with the reasons
_bucket: ContextVar[str | None] = ContextVar("bucket", default=None)
"""The bucket that this thread makes a call for, if it does."""


_asked: ContextVar[set[str] | None] = ContextVar("asked", default=None)
"""The addresses that this thread's listing has asked for, while it makes one."""


def _not_ours(_: logging.LogRecord) -> bool:
    return _bucket.get() is None


for _handler in logging.getLogger("huggingface_hub").handlers:
    _handler.addFilter(_not_ours)


def check_online() -> None:
    """Raise UsageError in offline mode. Xet does not know it, and would upload all the same."""
    if constants.is_offline_mode():
        raise UsageError(
            "the Hub may not be asked: offline mode is on",
            found="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
        )


def endpoint() -> str:
    """The Hub's address, as the environment has it now. Raises UsageError for what is none."""
    found = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    parts = urlsplit(found)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        what = "HF_ENDPOINT is no address of a Hub"
        raise UsageError(what, expected="https://HOST, without a user or a password")
    return found


def session() -> httpx2.Client:
    """The library's HTTP client; calls within ``calls`` are bounded. The same one every time, until
    somebody closes it."""
    client = get_session()
    if "send" not in vars(client):
        client.send = _bounded(client.send)  # type: ignore[method-assign]
    return client


def _bounded(plain_send: Callable[..., httpx2.Response]) -> Callable[..., httpx2.Response]:
    def send(request: httpx2.Request, **options: Any) -> httpx2.Response:
        bucket = _bucket.get()
        if bucket is None:
            return plain_send(request, **options)
        _note(str(request.url))
        request.extensions["timeout"] = httpx2.Timeout(TIMEOUT).as_dict()
        try:
            response = plain_send(request, **options)
        except httpx2.TransportError as error:  # which the library would try again
            raise of_connection(error, request.url.host) from None
        if response.status_code >= 400 and response.status_code not in _EXPECTED:
            response.close()
            raise of_status(response.status_code, response.headers, bucket)
        return response

    return send


def _note(url: str) -> None:
    """Raise Malformed for a page of a listing that was asked for before: the library would go on
    for ever."""
    asked = _asked.get()
    if asked is None:
        return
    if url in asked:
        raise Malformed("the Hub's listing comes to no end: it repeats itself", hint="try again")
    asked.add(url)


@contextlib.contextmanager
def listing() -> Iterator[None]:
    """A block that makes one listing, of pages that are all different."""
    token = _asked.set(set())
    try:
        yield
    finally:
        _asked.reset(token)


@contextlib.contextmanager
def calls(bucket: str, file: str) -> Iterator[None]:
    """A block that calls the Hub. What it raises is of core.errors and names ``file``, or is an
    OSError of this machine's."""
    session()
    token = _bucket.set(bucket)
    try:
        with _translated(bucket):
            yield
    except DeltactlError as error:
        error.file = error.file or file
        raise
    finally:
        _bucket.reset(token)


@contextlib.contextmanager
def _translated(bucket: str) -> Iterator[None]:
    try:
        yield
    except (DeltactlError, EntryNotFoundError) as error:
        raise error if isinstance(error, DeltactlError) else NotFound("no such object") from None
    except BucketBatchError as error:
        raise _of_batch(error) from None
    except HfHubHTTPError as error:
        response = error.response
        raise of_status(response.status_code, response.headers, bucket) from None
    except httpx2.TransportError as error:  # in the middle of a body
        raise of_connection(error, "the Hub") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise of_xet(error, bucket) from None
    except RuntimeError as error:
        raise of_xet(error, bucket) from None
    except (ValueError, LookupError, TypeError, AttributeError, httpx2.HTTPError) as error:
        what = "the Hub's answer makes no sense"
        raise Malformed(what, found=type(error).__name__) from error


def _of_batch(error: BucketBatchError) -> DeltactlError:
    reasons = ", ".join(sorted({str(failure.get("error")) for failure in error.failures}))
    return DeltactlError("the Hub did not do what it was asked to", found=plain(reasons))
