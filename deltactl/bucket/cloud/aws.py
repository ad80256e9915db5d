"""AWS's own client: where credentials, region and endpoint come from, and what it raises."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore import UNSIGNED, exceptions
from botocore.config import Config
from botocore.parsers import ResponseParserError

from deltactl.bucket.cloud.endpoints import located
from deltactl.bucket.cloud.refusals import (
    CODE,
    Place,
    Refusal,
    no_credentials,
    no_endpoint,
    refused,
    senseless,
    unreachable,
)
from deltactl.bucket.timeouts import Timeouts
from deltactl.core.errors import UsageError

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.credentials import Credentials
    from obstore.store import S3Credential

_FRESH = timedelta(minutes=5)  # botocore renews what expires 15 minutes before it does
_TRIES = 3  # of one part: a large file is not begun anew for each broken connection


class Keys:
    """Gives obstore the credentials that botocore has, renewed when they expire."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __call__(self) -> S3Credential:
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key or "",
            "secret_access_key": frozen.secret_key or "",
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _FRESH,
        }


@dataclass(frozen=True, slots=True)
class Clients:
    """``parts``: for parts of uploads, which are tried again; ``single``: for requests that are
    tried once, and are not signed where there are no ``keys``; ``place``: with the endpoint."""

    place: Place
    parts: BaseClient
    single: BaseClient
    keys: Keys | None


def connect(place: Place, jobs: int, timeouts: Timeouts) -> Clients:
    """Clients as the environment, AWS_PROFILE, ~/.aws/config and ~/.aws/credentials say. Raises
    UsageError for settings that cannot be, an endpoint among them."""
    config = Config(
        connect_timeout=timeouts.connect,
        read_timeout=timeouts.read,
        max_pool_connections=jobs,
        retries={"total_max_attempts": _TRIES, "mode": "standard"},
    )
    try:
        session = botocore.session.Session()
        credentials = session.get_credentials()
        client = session.create_client("s3", config=config)
        once = Config(
            retries={"total_max_attempts": 1},
            signature_version=UNSIGNED if credentials is None else None,
        )
        single = session.create_client("s3", config=config.merge(once))
    except exceptions.BotoCoreError as error:
        raise _meaning(error, place, None) from None
    except ValueError:  # botocore's word for an endpoint that it cannot parse
        raise no_endpoint(place) from None
    place = located(place, client.meta.endpoint_url)
    for one in (client, single):
        one.meta.events.register("before-call.s3", _stay)
    return Clients(place, client, single, None if credentials is None else Keys(credentials))


def _stay(context: dict[str, Any], **_: Any) -> None:
    """Have botocore follow no redirection: it asks for the bucket's region, and where that is
    redirected too, again, for ever."""
    context.setdefault("s3_redirect", {})["redirected"] = True


@contextlib.contextmanager
def translated(place: Place, name: str | None = None) -> Iterator[None]:
    """Raise what botocore raises within as core.errors."""
    try:
        yield
    except exceptions.ClientError as error:
        raise refused(refusal_of(error.response), place, name) from None
    except exceptions.BotoCoreError as error:
        raise _meaning(error, place, name) from None
    except ResponseParserError:
        raise senseless(place, name) from None


def _meaning(error: exceptions.BotoCoreError, place: Place, name: str | None) -> Exception:
    if isinstance(error, exceptions.ReadTimeoutError | exceptions.ConnectTimeoutError):
        return unreachable("Timeout", place, name)
    if isinstance(error, exceptions.EndpointConnectionError):
        return unreachable("Connect", place, name)
    if isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError):
        return unreachable("Broken", place, name)
    if "Credential" in type(error).__name__ or "Token" in type(error).__name__:
        return no_credentials(place)
    what = f"the settings of AWS's tools cannot be used ({type(error).__name__})"
    return UsageError(what, file=place.container, hint="aws configure list")


def refusal_of(response: Mapping[str, Any]) -> Refusal:
    """What a reply says that botocore made an error of."""
    about, error = response.get("ResponseMetadata", {}), response.get("Error", {})
    code, message = str(error.get("Code", "")), str(error.get("Message", ""))
    after = str(about.get("HTTPHeaders", {}).get("retry-after", ""))
    status = int(about.get("HTTPStatusCode", 0))
    if code == str(status):  # made up by botocore, with a message, where there is no body
        code = message = ""
    return Refusal(
        status,
        code if CODE.fullmatch(code) else "",
        float(after) if re.fullmatch(r"\d{1,5}", after) else None,
        message,
    )
