"""What went wrong at an object store, in the words of core.errors.

Nothing that a server or a client library wrote is passed on, as it may hold a signed address or a
key: only the status, the store's one-word code, and what they mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltactl.core.errors import (
    DeltactlError,
    Malformed,
    NotAllowed,
    NotFound,
    Transient,
    Unsupported,
    UsageError,
)

CODE = re.compile(r"[A-Za-z][A-Za-z0-9.]{0,63}")
"""What a store's code for an error looks like; anything else is not repeated."""

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_CREDENTIALS = {
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "TokenRefreshRequired",
}
_GARBLED = {
    "BadDigest",
    "IncompleteBody",
    "Md5Mismatch",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_BUSY = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"}


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of a bucket. ``scheme``: s3, gs or az; ``prefix``: without slashes at its ends."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def container(self) -> str:
        """The bucket's address without the prefix."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def url(self) -> str:
        return f"{self.container}/{self.prefix}" if self.prefix else self.container

    def key(self, name: str) -> str:
        """What the store calls an object."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def of(self, name: str | None) -> str:
        """An object's address, or the prefix's."""
        return self.url if name is None else f"{self.url}/{name}"

    @property
    def try_it(self) -> str:
        """What to do about credentials."""
        return {
            "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and try: "
            f"aws s3 ls {self.container}",
            "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default "
            f"login; and try: gcloud storage ls {self.container}",
            "az": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, and "
            f"try: az storage blob list --container-name {self.bucket}",
        }[self.scheme]

    @property
    def make_it(self) -> str:
        """What makes the bucket."""
        return {
            "s3": f"aws s3 mb {self.container}",
            "gs": f"gcloud storage buckets create {self.container}",
            "az": f"az storage container create --name {self.bucket}",
        }[self.scheme]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's reply that is an error."""

    status: int
    code: str = ""
    retry_after: float | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.code}".strip()


def refused(refusal: Refusal, place: Place, name: str | None) -> DeltactlError:
    """What a reply with an error's status means."""
    status, where = refusal.status, place.of(name)
    if status in (401, 403) or refusal.code in _CREDENTIALS:
        what = f"the store refuses the credentials, or what was asked ({refusal})"
        return NotAllowed(what, file=where, hint=place.try_it)
    if refusal.code in _NO_BUCKET or (status == 404 and name is None):
        return NotFound("no such bucket", file=place.container, hint=place.make_it)
    if status == 404:
        return NotFound("no such object", file=where)
    if status in (409, 412):
        what = f"somebody else changed the object at the same moment ({refusal})"
        return _again(what, where, refusal.retry_after)
    if refusal.code in _GARBLED:
        return _again(f"what was sent did not arrive as it was ({refusal})", where)
    if status in (408, 425, 429) or refusal.code in _BUSY or (status >= 500 and status != 501):
        return _again(f"the server is busy or ill ({refusal})", where, refusal.retry_after)
    if status in (301, 307, 308):
        return elsewhere(place)
    what = f"the store does not take this request ({refusal})"
    return Unsupported(what, file=where, hint="look the code up in the store's documentation")


def _again(what: str, where: str, retry_after: float | None = None) -> Transient:
    error = Transient(what, file=where, hint="try again")
    error.retry_after = retry_after
    return error


def elsewhere(place: Place) -> UsageError:
    """The bucket is not where it was looked for."""
    what = "the bucket is in another region, or at another endpoint"
    return UsageError(what, file=place.container, hint="set AWS_REGION to the bucket's region")


def unreachable(kind: str, place: Place, name: str | None) -> Transient:
    """``kind``: Timeout, Connect, or another word for a connection that broke."""
    words = {
        "Timeout": "the server does not answer in time",
        "Connect": "the server cannot be reached",
    }
    return _again(words.get(kind, "the connection to the server broke"), place.of(name))


def cut_short(place: Place, name: str, expected: int, found: int) -> Transient:
    """A reply that has fewer bytes than it should."""
    return Transient(
        "the server sent fewer bytes than it said",
        file=place.of(name),
        expected=f"{expected} bytes",
        found=f"{found}",
        hint="try again",
    )


def no_credentials(place: Place) -> NotAllowed:
    """Nothing in the environment says who is asking, or it cannot be turned into a token."""
    return NotAllowed("no credentials that work", file=place.container, hint=place.try_it)


def senseless(place: Place, name: str | None) -> Malformed:
    """A reply that cannot be read."""
    return Malformed(
        "the server's reply makes no sense",
        file=place.of(name),
        hint=f"is it an object store that answers? try: {place.try_it.partition('try: ')[2]}",
    )


def truncated(place: Place) -> Malformed:
    """A page of a listing that is not the last, and does not say where the next begins."""
    return Malformed(
        "the store says that its listing goes on, and not from where: it is not whole",
        file=place.url,
        hint="try again; a store that does so again holds no chain that can be trusted",
    )


def endless(place: Place) -> Malformed:
    """A listing that goes in circles."""
    return Malformed(
        "the store's listing comes to no end: it repeats itself",
        file=place.url,
        hint="try again; a store that does so again holds no chain that can be trusted",
    )


def changed(place: Place, name: str) -> Transient:
    """An object that came, went or was exchanged between two requests."""
    return _again("somebody else changed the object at the same moment", place.of(name))
