"""S3, Google Cloud Storage and Azure Blob Storage: the bucket at an address.

Credentials, region and endpoint are found where each store's own tools find them: S3 as botocore
does; Google's in GOOGLE_APPLICATION_CREDENTIALS, what gcloud left, or the machine's account, with
STORAGE_EMULATOR_HOST for another endpoint; Azure's in AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY
or AZURE_STORAGE_SAS_TOKEN, in AZURE_STORAGE_CONNECTION_STRING, in what obstore reads besides, or
the machine's identity. (Of Google's store no server could be had to test with, only what is asked
of it.) Where S3's tools have none, requests are not signed: a public bucket can be
read. Without TLS only at an endpoint that was named so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError

from deltactl.bucket.cloud.endpoints import located
from deltactl.bucket.cloud.objects import ObjectBucket
from deltactl.bucket.cloud.refusals import Place, no_credentials
from deltactl.bucket.throttle import Throttle
from deltactl.bucket.timeouts import TIMEOUTS, Timeouts
from deltactl.core.errors import UsageError
from deltactl.files.names import check_object_name

if TYPE_CHECKING:
    from obstore.store import (
        AzureConfig,
        AzureStore,
        ClientConfig,
        GCSConfig,
        GCSCredential,
        GCSStore,
    )

JOBS = 10
"""As many as AWS's own transfers make. Each holds a piece of 8 MiB in memory."""

_ADDRESS = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{2,254})(?:/+([^?#]*))?")
_NAMED = re.compile(r"[A-Za-z0-9]+://[^/?#@:]*(?:/[^?#]*)?")
_NO_RETRIES: Any = {"max_retries": 0}


def open_objects(
    url: str,
    jobs: int | None = None,
    throttle: Throttle | None = None,
    timeouts: Timeouts = TIMEOUTS,
) -> ObjectBucket:
    """The bucket at s3://, gs:// or az://, then BUCKET[/PREFIX]; no request is made.

    Raises UsageError for an address that is none and for settings that cannot be.
    """
    place = parse(url)
    count = jobs or JOBS
    pool = ThreadPoolExecutor(count, thread_name_prefix="transfer")
    try:
        if place.scheme == "s3":
            return _s3(place, pool, count, throttle, timeouts)
        return _staged(place, pool, count, throttle, timeouts)
    except (BaseError, ValueError):
        raise no_credentials(place) from None


def parse(url: str) -> Place:
    """The parts of an address. Raises UsageError, without repeating what may be a secret."""
    scheme = url.partition(":")[0].lower()
    found = _ADDRESS.fullmatch(f"{scheme}{url[len(scheme) :]}")
    if found is None and _NAMED.fullmatch(url):
        raise UsageError(
            "no name of a bucket: it has 3 characters or more, letters, digits, dots and dashes",
            expected=f"{scheme}://BUCKET or {scheme}://BUCKET/PREFIX",
            hint="is a part of the address missing?",
        )
    if found is None:
        raise UsageError(
            "no address of a bucket: it takes no user, password, port, query or fragment",
            expected=f"{scheme}://BUCKET or {scheme}://BUCKET/PREFIX",
            hint="credentials and endpoints are set in the environment, as for the store's tools",
        )
    prefix = (found[3] or "").rstrip("/")
    return Place(found[1], found[2], check_object_name(prefix) if prefix else "")


def _s3(
    place: Place,
    pool: ThreadPoolExecutor,
    jobs: int,
    throttle: Throttle | None,
    timeouts: Timeouts,
) -> ObjectBucket:
    from obstore.store import S3Store

    from deltactl.bucket.cloud.aws import connect
    from deltactl.bucket.cloud.listing import S3Listing
    from deltactl.bucket.cloud.multipart import Multipart

    clients = connect(place, jobs, timeouts)
    place = clients.place
    endpoint = clients.parts.meta.endpoint_url
    store = S3Store(
        place.bucket,
        prefix=place.prefix or None,
        region=_region(clients.parts.meta.region_name),
        aws_endpoint_url_s3=endpoint,
        skip_signature=clients.keys is None,
        checksum_algorithm="sha256",  # computed for the signature anyway; some check only this
        disable_bulk_delete=True,
        credential_provider=clients.keys,
        client_options=_client_options(endpoint, timeouts),
        retry_config=_NO_RETRIES,
    )
    large, listing = Multipart(clients.parts, place, pool), S3Listing(clients.single, place)
    return ObjectBucket(place, store, listing, large, pool, jobs, throttle)


def _region(name: str | None) -> str:
    return "us-east-1" if name in (None, "aws-global") else name


def _staged(
    place: Place,
    pool: ThreadPoolExecutor,
    jobs: int,
    throttle: Throttle | None,
    timeouts: Timeouts,
) -> ObjectBucket:
    from deltactl.bucket.cloud.listing import ObstoreListing, check_emulator
    from deltactl.bucket.cloud.temporary_upload import TemporaryUpload

    google = place.scheme == "gs"
    endpoint = _emulator() if google else azure_settings(os.environ).get("endpoint")
    place = located(place, endpoint)
    store = (_google if google else _azure)(place, timeouts)
    listing = ObstoreListing(store, place, pool, ordered=google, seconds=timeouts.whole)
    if google and endpoint:
        listing.check = partial(check_emulator, endpoint, place, timeouts.read)
    large = TemporaryUpload(store, place, listing, jobs)
    return ObjectBucket(place, store, listing, large, pool, jobs, throttle)


def _google(place: Place, timeouts: Timeouts) -> GCSStore:
    from obstore.store import GCSStore

    endpoint = _emulator()
    config: GCSConfig = {"base_url": endpoint} if endpoint else {}
    return GCSStore(
        place.bucket,
        prefix=place.prefix or None,
        config=config,
        credential_provider=_no_token if endpoint else None,
        client_options=_client_options(endpoint, timeouts),
        retry_config=_NO_RETRIES,
    )


def _emulator() -> str | None:
    """The address of what stands in for Google's store, where there is one."""
    endpoint = os.environ.get("STORAGE_EMULATOR_HOST")
    return f"http://{endpoint}" if endpoint and "://" not in endpoint else endpoint


def _no_token() -> GCSCredential:
    """What an emulator is content with."""
    return {"token": "none", "expires_at": None}


def _azure(place: Place, timeouts: Timeouts) -> AzureStore:
    from obstore.store import AzureStore

    config = azure_settings(os.environ)
    return AzureStore(
        place.bucket,
        prefix=place.prefix or None,
        config=config,
        client_options=_client_options(config.get("endpoint"), timeouts),
        retry_config=_NO_RETRIES,
    )


def azure_settings(environment: Mapping[str, str]) -> AzureConfig:
    """What Azure's own tools take from the environment and obstore does not."""
    found = dict(
        part.split("=", 1)
        for part in environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
        if "=" in part
    )
    values = {
        "account_name": environment.get("AZURE_STORAGE_ACCOUNT") or found.get("AccountName"),
        "account_key": environment.get("AZURE_STORAGE_KEY") or found.get("AccountKey"),
        "sas_key": environment.get("AZURE_STORAGE_SAS_TOKEN") or found.get("SharedAccessSignature"),
        "endpoint": environment.get("AZURE_STORAGE_SERVICE_ENDPOINT") or found.get("BlobEndpoint"),
    }
    settings: Any = {name: value for name, value in values.items() if value}
    return settings  # type: ignore[no-any-return]


def _client_options(endpoint: str | None, timeouts: Timeouts) -> ClientConfig:
    return {
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=timeouts.connect),
        "read_timeout": timedelta(seconds=timeouts.read),
        "timeout": timedelta(seconds=timeouts.whole),
    }
