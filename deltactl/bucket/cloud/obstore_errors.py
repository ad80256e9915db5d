"""What obstore raises, in the words of core.errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from obstore import exceptions

from deltactl.bucket.cloud.refusals import (
    CODE,
    Place,
    Refusal,
    elsewhere,
    no_credentials,
    refused,
    senseless,
    unreachable,
)
from deltactl.core.errors import DeltactlError, UsageError

# obstore says most of what it knows in text alone: Rust's debug output, a field a line.
_STATUS = re.compile(r"^ *status: (\d{3}),$", re.MULTILINE)
_KIND = re.compile(r"HttpError \{\s+kind: (\w+),")
_BEGINS_LATE = re.compile(r"InvalidRangeRequest \{\s+source: StartTooLarge \{")
_CODE = re.compile(f"<Code>({CODE.pattern})</Code>")
_MESSAGE = re.compile(r"<(?:Message|AuthenticationErrorDetail)>([^<]{1,2000})<")
_WRITTEN_BY_SERVER = re.compile(r"<\?xml.*?</Error>|body: Some\(.*?\),$", re.DOTALL | re.MULTILINE)
_OF_CREDENTIALS = re.compile(
    r"169\.254\.|metadata\.google\.internal|oauth2|TokenRequest|TokenResponse|ExternalToken",
)
_STATUS_OF: Mapping[type[BaseException], int] = {
    FileNotFoundError: 404,
    exceptions.PermissionDeniedError: 403,
    exceptions.UnauthenticatedError: 401,
    exceptions.AlreadyExistsError: 409,
    exceptions.PreconditionError: 412,
    exceptions.NotSupportedError: 501,
}


@contextlib.contextmanager
def translated(place: Place, name: str | None = None) -> Iterator[None]:
    """Raise what obstore raises within, about an object or the whole bucket, as core.errors."""
    try:
        yield
    except (exceptions.BaseError, FileNotFoundError, ValueError) as error:
        raise _meaning(error, place, name) from None


def is_out_of_range(error: exceptions.BaseError) -> bool:
    """Whether a read was refused because it begins at or after the object's end."""
    text = str(error)
    return _status(text) == 416 or (not _status(text) and bool(_BEGINS_LATE.search(text)))


def _meaning(error: Exception, place: Place, name: str | None) -> DeltactlError:
    text = str(error)
    if isinstance(error, ValueError):
        return UsageError("the store takes no such name", file=place.of(name))
    ours = place.scheme == "s3"  # its keys are botocore's to find
    if not ours and _OF_CREDENTIALS.search(_WRITTEN_BY_SERVER.sub("", text)):
        return no_credentials(place)
    refusal = refusal_of(error)
    if refusal.status:
        return refused(refusal, place, name)
    if "redirect" in text:
        return elsewhere(place)
    kind = _KIND.search(text)
    return unreachable(kind[1], place, name) if kind else senseless(place, name)


def refusal_of(error: Exception) -> Refusal:
    """What a reply says that obstore made an error of; its status is 0 where there was none."""
    text = str(error)
    code = _CODE.search(text)
    words = [_unquoted(found) for found in _MESSAGE.findall(text)]
    return Refusal(
        _STATUS_OF.get(type(error)) or _status(text),
        code[1] if code else "",
        message="\n".join(words),
    )


def _unquoted(text: str) -> str:
    """Text as it was before Rust's debug output put it between quotes."""
    return text.replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")


def _status(text: str) -> int:
    """The status of the reply; 0 where there was none."""
    found = _STATUS.findall(text)
    return int(found[-1]) if found else 0
