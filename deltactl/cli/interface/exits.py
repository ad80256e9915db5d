"""What each way to end means to the shell that called."""

from __future__ import annotations

import errno

from deltactl.core.errors import (
    Conflict,
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    Unproven,
    UsageError,
)

OK = 0
FAILED = 1
USAGE = 2
UNSOUND = 3
NOT_ALLOWED = 4
TRANSIENT = 5
NOT_FOUND = 10
CONFLICT = 11
INTERRUPTED = 130

MEANINGS = {
    OK: "success",
    FAILED: "any other failure; for diff --exit-code: they differ",
    USAGE: "usage error",
    UNSOUND: "verification failed: a broken chain, a damaged file, or bits that differ",
    NOT_ALLOWED: "not allowed: authentication or permission failed",
    TRANSIENT: "temporary failure: network or a busy server; try again",
    NOT_FOUND: "no such bucket, chain, step or file",
    CONFLICT: "conflict: the step exists with other content, the base or the model is not "
    "the right one, or a directory holds something that must not be replaced",
    INTERRUPTED: "interrupted",
}
"""Every exit status, in order; the manual's table."""

_CLASSES: tuple[tuple[type[DeltactlError], int], ...] = (
    (UsageError, USAGE),
    (Malformed, UNSOUND),
    (Unproven, UNSOUND),
    (NotAllowed, NOT_ALLOWED),
    (Transient, TRANSIENT),
    (NotFound, NOT_FOUND),
    (Conflict, CONFLICT),
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def code_of(error: DeltactlError) -> int:
    """The exit status for an error of the library."""
    return next((code for kind, code in _CLASSES if isinstance(error, kind)), FAILED)


def from_system(error: OSError | MemoryError) -> DeltactlError:
    """What the operating system refused, as an error of ours with the same facts."""
    if isinstance(error, MemoryError):
        return DeltactlError("out of memory")
    file = error.filename2 or error.filename
    what = (error.strerror or str(error) or type(error).__name__).lower()
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(what, file=file)
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return NotAllowed(what, file=file)
    if isinstance(error, ConnectionError | TimeoutError):
        return Transient(what, file=file)
    if error.errno in _FULL:
        hint = "free some space there, or write to another place"
        if file is None:
            hint = "free some space where the output, the bucket, TMPDIR or DELTACTL_CACHE is"
        return DeltactlError(what, file=file, hint=hint)
    return DeltactlError(what, file=file)
