"""What goes wrong with the Hub, said in our words.

The Hub's client raises its own errors, builtin ones (from Xet, with nothing but a text) and those
of its HTTP library. None of their texts is passed on as it is: they hold signed addresses.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from deltactl.bucket.said import plain
from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound, Transient

_BUSY = (408, 409, 412, 425, 429)
_XET_STATUS = re.compile(r"\((\d{3}) [A-Z]")
_XET_SYSTEM = re.compile(r"\(os error (\d+)\)")
_XET_CONNECTION = ("error sending request", "error decoding response body")
_XET_NONSENSE = ("corrupted", "mismatch", "invalid", "format error")


def of_status(status: int, headers: Mapping[str, str], bucket: str) -> DeltactlError:
    """The error for a refusal. ``headers``: of the reply, their names in any case; ``bucket``: the
    bucket's name, for the hint."""
    lower = {name.lower(): value for name, value in headers.items()}
    found = f"HTTP {status}"
    if text := plain(lower.get("x-error-message", "")):
        found += f" ({text})"
    if status in (401, 402, 403):
        return _not_allowed(status, found)
    if status == 404 and lower.get("x-error-code") == "EntryNotFound":
        return NotFound("no such object")
    if status == 404:
        what = "no such bucket, or it is private and your token may not see it"
        return NotFound(what, file=f"hf://buckets/{bucket}", hint=f"hf buckets create {bucket}")
    if status in _BUSY or status >= 500:
        error = Transient("the Hub is busy or out of order", found=found)
        error.retry_after = retry_after(lower)
        return error
    return DeltactlError("the Hub refused the request", found=found)


def _not_allowed(status: int, found: str) -> NotAllowed:
    if status == 401:
        what, hint = "the Hub wants a token that it knows", "hf auth login, or set HF_TOKEN"
    else:
        what, hint = "the Hub does not let this token do that", "hf auth whoami"
    return NotAllowed(what, found=found, hint=hint)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from Retry-After or else RateLimit, whose names are in lower case."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:  # a date counts from the server's own clock, or not at all
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(headers["date"])
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError, KeyError):
        pass
    limit = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""), re.ASCII)
    return float(limit[1]) if limit else None


def of_connection(error: Exception, host: str) -> Transient:
    """The error for a connection that was refused, broke, or went silent."""
    kind = type(error).__name__
    if "Timeout" in kind:
        return Transient("no answer in time", expected=f"one from {host}")
    return Transient("the connection could not be made, or broke", expected=f"{host}", found=kind)


def of_xet(error: Exception, bucket: str) -> Exception:
    """The error for one of Xet's, which says in its text alone what it means."""
    text = str(error)
    if match := _XET_STATUS.search(text):
        return _of_xet_status(int(match[1]), text, bucket)
    if match := _XET_SYSTEM.search(text):
        return _of_system(int(match[1]))
    if isinstance(error, PermissionError):
        return _not_allowed(401, "")
    if isinstance(error, FileNotFoundError):
        return _no_content()
    low = text.lower()
    if not any(word in low for word in _XET_CONNECTION):
        if any(word in low for word in _XET_NONSENSE):
            return Malformed("what the Hub's storage sent makes no sense", found=plain(text))
        if isinstance(error, RuntimeError):
            return Transient("the transfer failed", found=plain(text))
    return Transient("the connection to the Hub's storage failed", found=plain(text))


def _of_xet_status(status: int, text: str, bucket: str) -> DeltactlError:
    if status == 404 and "-token" not in text:
        return _no_content()
    return of_status(status, {}, bucket)


def _no_content() -> NotFound:
    return NotFound("the Hub lists the object, and its storage does not have it")


def _of_system(code: int) -> OSError:
    """Such as a full disk: an OSError that says so, or a connection's end."""
    if code in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT):
        return ConnectionError(code, os.strerror(code))
    return OSError(code, os.strerror(code))
