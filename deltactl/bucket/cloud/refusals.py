"""What went wrong at an object store, in the words of core.errors.

What a server or a client library wrote may hold a signed address or a key. Passed on are the
status, the store's one-word code, and of its message what is left by ``said``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltactl.bucket.said import said
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

NOT_IMPLEMENTED = 501

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
_CLOCK = {"RequestExpired", "RequestTimeTooSkewed"}
_OF_CLOCKS = re.compile(
    r"date header too old|specified time frame|reasonable timeframe|difference between the request "
    r"time and",
    re.IGNORECASE,
)
_BUSY = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"}


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of a bucket. ``scheme``: s3, gs or az; ``prefix``: without slashes at its ends;
    ``endpoint``: scheme, host and port of the server, where the environment names one."""

    scheme: str
    bucket: str
    prefix: str
    endpoint: str = ""

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

    @property
    def is_it(self) -> str:
        """What to ask where another server may answer than was meant; "" where none was named."""
        if not self.endpoint:
            return ""
        settings = ENDPOINT_SETTINGS[self.scheme]
        if self.scheme == "gs":
            settings += "; an emulator has to answer Google's XML interface, with its conditions: "
            settings += "fake-gcs-server does not"
        return f"is {self.endpoint} the right endpoint? ({settings})"


ENDPOINT_SETTINGS = {
    "s3": "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or endpoint_url in ~/.aws/config",
    "gs": "STORAGE_EMULATOR_HOST",
    "az": "AZURE_STORAGE_SERVICE_ENDPOINT, or BlobEndpoint in AZURE_STORAGE_CONNECTION_STRING",
}
"""What names each store's endpoint."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's reply that is an error. ``message``: what it says beside the code, as it came."""

    status: int
    code: str = ""
    retry_after: float | None = None
    message: str = ""

    def __str__(self) -> str:
        words = said(self.message)
        return f"{self.status} {self.code}".strip() + (f": {words}" if words else "")

    @property
    def is_of_clocks(self) -> bool:
        """Whether it is the time of the request that is wrong."""
        return self.code in _CLOCK or bool(_OF_CLOCKS.search(self.message))

    @property
    def is_mute(self) -> bool:
        """Whether it says nothing that an object store would say."""
        return not self.code and not self.message


def refused(refusal: Refusal, place: Place, name: str | None) -> DeltactlError:
    """What a reply with an error's status means."""
    status, where = refusal.status, place.of(name)
    is_it = place.is_it if refusal.is_mute else ""
    if refusal.is_of_clocks:
        what = f"this machine's clock and the store's are too far apart ({refusal})"
        return NotAllowed(
            what, file=where, hint="set this machine's clock, as with: timedatectl set-ntp true"
        )
    if status in (401, 403) or refusal.code in _CREDENTIALS:
        what = f"the store refuses the credentials, or what was asked ({refusal})"
        if is_it:
            what = f"{place.endpoint} refuses what was asked, and does not say why ({refusal})"
        return NotAllowed(what, file=where, hint=_hint(is_it, place.try_it))
    if refusal.code in _NO_BUCKET or (status == 404 and name is None):
        hint = _hint(is_it, place.make_it)
        return NotFound("no such bucket", file=place.container, hint=hint)
    if status == 404:
        return NotFound("no such object", file=where, hint=_hint(is_it))
    if status in (409, 412):
        what = f"somebody else changed the object at the same moment ({refusal})"
        return _again(what, where, refusal.retry_after)
    if refusal.code in _GARBLED:
        return _again(f"what was sent did not arrive as it was ({refusal})", where)
    if (
        status in (408, 425, 429)
        or refusal.code in _BUSY
        or (status >= 500 and status != NOT_IMPLEMENTED)
    ):
        return _again(f"the server is busy or ill ({refusal})", where, refusal.retry_after)
    if status in (301, 307, 308):
        return elsewhere(place)
    what = f"the store does not take this request ({refusal})"
    hint = _hint(is_it, "look the code up in the store's documentation")
    return Unsupported(what, file=where, hint=hint)


def _hint(*parts: str) -> str | None:
    """The parts that say something, as one."""
    return "; ".join(filter(None, parts)) or None


def no_conditions(refusal: Refusal, place: Place, name: str) -> Unsupported:
    """What a store means that does not know the condition of a put: that the name be free."""
    return Unsupported(
        "the store has no conditional writes: it would let two publishers overwrite each other "
        f"({refusal})",
        file=place.of(name),
        hint=_hint(
            place.is_it if refusal.is_mute else "",
            "publish into a store that has them (If-None-Match: *), or into a directory, and copy "
            "that with the store's own tools",
        ),
    )


def _again(what: str, where: str, retry_after: float | None = None) -> Transient:
    error = Transient(what, file=where, hint="try again")
    error.retry_after = retry_after
    return error


def no_endpoint(place: Place) -> UsageError:
    """An endpoint that is set and is none; not repeated, as it may hold a password."""
    return UsageError(
        f"the endpoint that is set for {place.scheme}:// is no address of a server",
        file=place.container,
        expected="https://HOST or http://HOST:PORT",
        hint=f"look at {ENDPOINT_SETTINGS[place.scheme]}",
    )


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
    error = _again(words.get(kind, "the connection to the server broke"), place.of(name))
    error.hint = _hint("try again", place.is_it)
    return error


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
        hint=_hint(
            place.is_it or "is it an object store that answers?",
            f"try: {place.try_it.partition('try: ')[2]}",
        ),
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
